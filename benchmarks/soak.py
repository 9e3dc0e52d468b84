"""A million requests with 30 % cancels: does the gateway's memory stay where it is, and is anything left?

::

    python benchmarks/soak.py                                # 1,000,000 requests (10 to 20 minutes on two processors)
    python benchmarks/soak.py --requests 100000 --minutes 5
    python benchmarks/soak.py --trace --requests 50000       # where memory grows, by source line (slow)
    python benchmarks/soak.py --check                        # exit 1 where memory grew or something was left

Stub, gateway and clients are processes of their own, and the gateway's admin port is asked with every sample.
See docs/benchmarks.md for how to read it. Linux only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it also runs where the checkout is not installed

from benchmarks._accounting import memory_of, raise_descriptor_limit, slope
from benchmarks._scale_run import Helper, Scene, end_cleanly
from benchmarks._soak_load import WINDOWS

GROWTH_MAX = 0.01
WARM_UP = 0.1
SAMPLES = 100
DESCRIPTORS = 4096
MINUTES = 60.0
SAY_EVERY = 5


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway at one moment; `requests` is how many have ended, well or not."""

    at_seconds: float
    requests: int
    resident_kib: int
    anonymous_kib: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run has seen."""

    requests: int
    wanted: int
    cancelled: int
    seconds: float
    ended: dict[str, int]
    """By what was meant to become of them: answered, streamed, or cancelled in which window."""
    failures: dict[str, int]
    samples: tuple[Sample, ...]
    left: dict[str, str]
    left_before_collection: dict[str, str]
    history: dict[str, int]
    unreachable: int
    """Objects at the end that only a garbage collection could free."""
    grown: tuple[str, ...]
    """With `--trace`: the source lines whose memory grew after the warm-up."""
    exit_code: int | None

    @property
    def settled_samples(self) -> tuple[Sample, ...]:
        """The samples after the warm-up."""
        return tuple(one for one in self.samples if one.requests >= WARM_UP * self.requests)

    @property
    def growth(self) -> float:
        """How much resident memory grew after the warm-up, by least squares, as a share of what it was then."""
        values = [float(one.resident_kib) for one in self.settled_samples]
        return slope(values) * (len(values) - 1) / values[0] if len(values) > 1 else 0.0

    @property
    def highest(self) -> float:
        """How far above its first value after the warm-up resident memory ever was, as a share."""
        values = [one.resident_kib for one in self.settled_samples]
        return max(values) / values[0] - 1 if values else 0.0

    @property
    def reached(self) -> bool:
        """Whether memory was flat, every request ended as it should, and nothing was left."""
        return self.growth < GROWTH_MAX and not (self.left or self.left_before_collection or self.failures)


def run(
    requests: int,
    *,
    cancels: float = 0.3,
    connections: int = 64,
    seed: int = 1,
    minutes: float = MINUTES,
    trace: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Send the requests, watch the gateway's memory, and look for what is left."""
    raise_descriptor_limit(DESCRIPTORS)
    step = max(requests // SAMPLES, 1)
    with Scene(trace=trace) as scene:
        # So that what the first requests build once is no difference at the end.
        scene.scrape()
        _drain(_load(scene, 20 * connections, cancels, connections, seed + 1, 20 * connections, 60.0))
        before = scene.baseline()
        began_at = time.monotonic()
        load = _load(scene, requests, cancels, connections, seed, step, minutes * 60)
        samples: list[Sample] = []
        traced = False
        try:
            while True:
                counts = load.answer()
                scene.scrape()
                samples.append(_sample(scene, counts, began_at))
                if trace and not traced and samples[-1].requests >= WARM_UP * requests:
                    scene.gateway.ask("trace")
                    traced = True
                if counts["over"] or len(samples) % SAY_EVERY == 0:
                    say(_progress(samples, counts, requests))
                if counts["over"]:
                    break
        finally:
            load.stop()
        seconds = time.monotonic() - began_at
        at_rest, left_before_collection = scene.until_left(before)
        grown = tuple(scene.gateway.ask("trace")["grown"]) if trace else ()
        collected, left = scene.until_left(before, "collect")
    ended: dict[str, int] = counts["ended"]
    return Report(
        requests=sum(ended.values()) + sum(counts["failures"].values()),
        wanted=requests,
        cancelled=sum(ended.get(window, 0) for window in WINDOWS),
        seconds=seconds,
        ended=ended,
        failures=counts["failures"],
        samples=tuple(samples),
        left=left,
        left_before_collection=left_before_collection,
        history={name: count - before["history"][name] for name, count in at_rest["history"].items()},
        unreachable=collected["unreachable"],
        grown=grown,
        exit_code=scene.exit_code,
    )


def _load(
    scene: Scene, requests: int, cancels: float, connections: int, seed: int, step: int, seconds: float
) -> Helper:
    values = (scene.port, requests, cancels, connections, seed, step, seconds)
    return Helper("benchmarks._soak_load", *map(str, values))


def _drain(load: Helper) -> None:
    try:
        while not load.answer()["over"]:
            pass
    finally:
        load.stop()


def _sample(scene: Scene, counts: dict[str, Any], began_at: float) -> Sample:
    memory = memory_of(scene.gateway.pid)
    return Sample(
        at_seconds=time.monotonic() - began_at,
        requests=sum(counts["ended"].values()) + sum(counts["failures"].values()),
        resident_kib=memory.resident_kib,
        anonymous_kib=memory.anonymous_kib,
    )


def _progress(samples: list[Sample], counts: dict[str, Any], wanted: int) -> str:
    last = samples[-1]
    failed = sum(counts["failures"].values())
    rate = last.requests / last.at_seconds
    return (
        f"[{last.at_seconds:5.0f} s] {last.requests:,} of {wanted:,} requests, {rate:,.0f} a second, "
        f"resident {last.resident_kib:,} KiB, failed {failed}"
    )


def show(report: Report) -> None:
    """Print the report for people."""
    console = Console() if sys.stdout.isatty() else Console(width=118)
    table = Table("what became of the requests", "")
    for name, count in sorted(report.ended.items(), key=lambda each: -each[1]):
        table.add_row(f"cancelled: {name}" if name in WINDOWS else name, f"{count:,}")
    for name, count in sorted(report.failures.items()):
        table.add_row(f"FAILED: {name}", f"{count:,}")
    console.print(table)
    if report.requests < report.wanted:
        console.print(f"{report.requests:,} requests instead of {report.wanted:,}: the time was up")
    settled = report.settled_samples
    console.print(
        f"{report.requests:,} requests in {report.seconds:,.0f} s, {report.cancelled:,} cancelled "
        f"({report.cancelled / max(report.requests, 1):.1%})",
        soft_wrap=True,
    )
    console.print(
        f"resident memory: {settled[0].resident_kib:,} KiB after the warm-up ({WARM_UP:.0%}), "
        f"{settled[-1].resident_kib:,} KiB at the end; growth by least squares {report.growth:+.2%}, highest "
        f"{report.highest:+.2%}; target < {GROWTH_MAX:.0%}: {'met' if report.growth < GROWTH_MAX else 'MISSED'}",
        soft_wrap=True,
    )
    for when, left in (("", report.left_before_collection), (" after a garbage collection", report.left)):
        text = "; ".join(f"{name}: {change}" for name, change in left.items()) or "nothing"
        console.print(f"left{when}: {text}", soft_wrap=True)
    console.print("books: " + ", ".join(f"{name} {count:,}" for name, count in report.history.items()), soft_wrap=True)
    for line in report.grown:
        console.print(line, soft_wrap=True, markup=False)


@click.command()
@click.option("--requests", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--cancels", default=0.3, show_default=True, type=click.FloatRange(0, 1), help="Share that is cancelled.")
@click.option("--connections", default=64, show_default=True, type=click.IntRange(1, 1000))
@click.option("--seed", default=1, show_default=True)
@click.option("--minutes", default=MINUTES, show_default=True, type=click.FloatRange(0.1), help="End the load then.")
@click.option("--trace", is_flag=True, help="Also say which source lines' memory grew (several times slower).")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, every sample included, instead of tables.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write that document to a file too.")
@click.option("--check", is_flag=True, help="Exit 1 where memory grew, a request failed or something was left.")
def main(
    requests: int,
    cancels: float,
    connections: int,
    seed: int,
    minutes: float,
    trace: bool,
    as_json: bool,
    output: Path | None,
    check: bool,
) -> None:
    """Soak the gateway and watch its memory."""
    end_cleanly()
    report = run(
        requests,
        cancels=cancels,
        connections=connections,
        seed=seed,
        minutes=minutes,
        trace=trace,
        say=lambda line: click.echo(line, err=True),
    )
    document = msgspec.to_builtins(report)
    document |= {"growth": report.growth, "highest": report.highest, "reached": report.reached}
    if output is not None:
        output.write_text(json.dumps(document, indent=1), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(document, indent=1))
    else:
        show(report)
    sys.exit(check and not report.reached)


if __name__ == "__main__":
    main()
