"""How long an urgent request waits for its first token at an engine that is full, by the way it may go first.

    python -m benchmarks.urgent                             every engine that can run here
    python -m benchmarks.urgent vllm
    python -m benchmarks.urgent sglang --urgent 20 --json out.json --markdown out.md
    python -m benchmarks.urgent llamacpp

The engine is installed where it is not and started once, with a small pool (or few slots) and priority scheduling,
under which requests of equal priority go in the order of their arrival. Clients keep it full with long greedy streams
of the class `background`; now and then a request of the class `urgent` comes. The ways take turns, each for a few
urgent requests with a gateway of its own, so that a busy moment of the machine meets all of them. Every background
stream is compared with its text when it was alone. The exit status is 1 when one differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import secrets
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import click
import msgspec

from benchmarks._urgent_load import Load, Streams, Way, fronting, numbers_from, references_of
from stopguard.gateway.probing import ProbeSettings
from stopguard.preemption import Mode
from stopguard.testing import rig
from stopguard.testing.staging import Shape

FULL_SECONDS = 20.0
FIRST_PROMPT = 1000
ALONE = 7


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: how it is started, what is asked of it, and the ways that it knows, the one to compare with first."""

    options: dict[str, Any]
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    load: Load
    ways: tuple[Way, ...]


CASES: dict[str, Case] = {
    "vllm": Case(
        # A pool of 64 blocks of 32 tokens.
        options={"pool_blocks": 65, "max_model_len": 2048, "max_num_seqs": 16},
        arguments=("--scheduling-policy", "priority"),
        load=Load(clients=6, tokens=900, block_tokens=32),
        ways=(
            Way(name="first come, first served", mode=Mode.OFF),
            Way(name="the engine's priorities", mode=Mode.QUEUE),
            Way(name="preempted inside", mode=Mode.PREEMPT, probe=True),
            Way(name="stopped and resumed at the gateway", mode=Mode.PREEMPT),
        ),
    ),
    "sglang": Case(
        options={"pool_tokens": 2048, "context_tokens": 2048, "priority_scheduling": True},
        # Two threads that wait for each other without sleeping make steps 40 times as long when a core is busy.
        environment={"OMP_NUM_THREADS": "1"},
        load=Load(clients=8, tokens=500, reserves=True),
        # SGLang's own scheduler evicts for a request that is more than 10 above (--priority-scheduling-preemption-
        # threshold), when slots are full; closer classes are sorted only.
        ways=(
            Way(name="first come, first served", mode=Mode.OFF),
            Way(name="the engine's priorities, 5 apart", mode=Mode.QUEUE, apart=5),
            Way(name="the engine's priorities, 20 apart", mode=Mode.QUEUE),
            Way(name="preempted inside", mode=Mode.PREEMPT, probe=True, apart=5),
            Way(name="stopped and resumed at the gateway", mode=Mode.PREEMPT, apart=5),
        ),
    ),
    "llamacpp": Case(
        options={"model": "exact", "slots": 4},
        load=Load(clients=6, tokens=300, urgent_words=40, gap_seconds=4.0, places=4),
        ways=(
            Way(name="first come, first served", mode=Mode.OFF),
            Way(name="first in the gateway's queue", mode=Mode.QUEUE),
            Way(name="stopped and resumed at the gateway", mode=Mode.PREEMPT),
        ),
    ),
}


class Row(msgspec.Struct):
    """What came of one way: seconds to the first token of each urgent request, and of the streams beside them."""

    way: str
    seconds: list[float] = []
    streams: int = 0
    different: int = 0
    preempted: int = 0
    pressures: dict[str, int] = {}
    guard_closings: int = 0
    refusals: dict[str, int] = {}
    tokens: float = 0.0
    """Tokens of background streams that came in `loaded_seconds`, the time in which urgent requests come."""
    loaded_seconds: float = 0.0
    not_full: int = 0
    """Urgent requests before which the engine was not seen to be full within the patience."""


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def compared(value: float, reference: float) -> str:
    """`value` as a share or a multiple of `reference`."""
    if value == reference:
        return "1"
    return f"1/{reference / value:.1f}" if value < reference else f"{value / reference:.1f}"


def shares(total: int, turns: int) -> list[int]:
    """`total` in `turns` parts that differ by one at most; none of them is empty."""
    turns = min(total, turns)
    return [total // turns + (turn < total % turns) for turn in range(turns)]


def in_turn(ways: Sequence[Way], turn: int) -> list[Way]:
    """The ways in the order of this turn: each goes first once, so that none has always the same one before it."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


def markdown(
    kind: str, version: str, load: Load, rows: Sequence[Row], *, prompts: tuple[int, int], alone: float
) -> str:
    """One engine's table. The first row is what the others are compared with.

    `prompts` are the lengths of the streams' and of the urgent prompts, in tokens; `alone` is the median of urgent
    requests that had the engine for themselves, in seconds.
    """
    reference = statistics.median(rows[0].seconds)
    lines = [
        f"### {kind} {version}",
        "",
        f"{load.clients} clients with streams of {load.tokens} tokens, each after a prompt of {prompts[0]}, and each"
        f" {load.gap_seconds:g} s an urgent request with a prompt of {prompts[1]}. Milliseconds to the first token of"
        f" the urgent ones; alone at the engine one takes {alone * 1000:.0f}.",
        "",
        "| way | median | p95 | worst | n | of the first | preempted | streams identical | their tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        median = statistics.median(row.seconds)
        milliseconds = (median, quantile(row.seconds, 0.95), max(row.seconds))
        cells = [
            row.way,
            *(f"{value * 1000:.0f}" for value in milliseconds),
            str(len(row.seconds)),
            compared(median, reference),
            str(row.preempted),
            f"{row.streams - row.different} of {row.streams}",
            f"{row.tokens / row.loaded_seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


class Bench:
    """All ways before one engine that runs."""

    def __init__(self, kind: str, url: str, model: str, probes: ProbeSettings, seed: int) -> None:
        self.kind = kind
        self.url = url
        self.case = CASES[kind]
        self.shape = Shape(model=model, chat=False, fields={"ignore_eos": True})
        self.rows = {way.name: Row(way.name, [], pressures={}, refusals={}) for way in self.case.ways}
        self._probes = probes
        self._choices = random.Random(seed)
        self._numbers = numbers_from(FIRST_PROMPT)
        self._references: list[str] = []
        self.prompts = (0, 0)
        self.alone: list[float] = []

    async def measure(self, urgent: int, turns: int, only: Sequence[str]) -> None:
        """`urgent` requests each way, in `turns` turns."""
        ways = [way for way in self.case.ways if not only or any(word in way.name for word in only)]
        load = self.case.load
        async with fronting(self.kind, self.url, self.case.ways[0], self.shape, load, self._probes) as front:
            self.prompts = await front.prompt_tokens(load.words), await front.prompt_tokens(load.urgent_words)
            self.alone = [await front.urgent(next(self._numbers)) for _ in range(ALONE)]
            self._references = await references_of(front)
        for turn, count in enumerate(shares(urgent, turns)):
            for way in in_turn(ways, turn):
                row = self.rows[way.name]
                began = monotonic()
                await self._turn(way, count, row)
                said = ", ".join(f"{seconds * 1000:.0f}" for seconds in row.seconds[-count:])
                click.echo(
                    f"  {turn + 1}: {way.name}: {said} ms; {row.preempted} preempted, {row.different} of {row.streams}"
                    f" streams differ, for {row.pressures}, refused {row.refusals}, guard {row.guard_closings};"
                    f" {monotonic() - began:.0f} s",
                    err=True,
                )

    async def _turn(self, way: Way, count: int, row: Row) -> None:
        load = self.case.load
        async with fronting(self.kind, self.url, way, self.shape, load, self._probes) as front:
            streams = Streams(front, self._references, self._choices)
            async with streams.running():
                await asyncio.sleep(load.gap_seconds)
                began, before = monotonic(), streams.characters
                async with asyncio.TaskGroup() as asking:
                    asked = []
                    for number in range(count):
                        planned = began + load.gap_seconds * (number + self._choices.uniform(0.0, 0.5))
                        await asyncio.sleep(max(0.0, planned - monotonic()))
                        row.not_full += not await streams.full(self.prompts[1], FULL_SECONDS)
                        asked.append(asking.create_task(front.urgent(next(self._numbers))))
                    await asyncio.sleep(max(0.0, began + load.gap_seconds * count - monotonic()))
                    row.loaded_seconds += monotonic() - began
                    characters = sum(map(len, self._references)) / (len(self._references) * load.tokens)
                    row.tokens += (streams.characters - before) / characters
                row.seconds += [each.result() for each in asked]
            row.streams += streams.ended
            row.different += len(streams.different)
            said = front.statistics()
            if said is not None:
                row.preempted += said.taken
                row.guard_closings += said.guard_closings
                row.refusals = dict(Counter(row.refusals) + Counter(said.refusals))
                row.pressures = dict(Counter(row.pressures) + front.pressures())


class Result(msgspec.Struct):
    """One engine's figures, with the table that says them."""

    kind: str
    version: str
    prompts: tuple[int, int]
    alone_seconds: list[float]
    rows: list[Row]
    table: str


def measure(
    kind: str, urgent: int, turns: int, only: Sequence[str], seed: int, running: tuple[str, str, str] | None = None
) -> Result:
    """All figures of one engine, which is started unless `running` says where one is: URL, probe's socket, token."""
    case, recipe = CASES[kind], rig.recipe_of(kind)
    with contextlib.ExitStack() as stack:
        model = "tiny"
        if running is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stopguard-bench-")))
            socket, token = str(folder / "probe.sock"), secrets.token_hex(16)
            probe = {"STOPGUARD_COLLECTOR": socket, "STOPGUARD_COLLECTOR_TOKEN": token}
            engine = stack.enter_context(
                rig.start(recipe, *case.arguments, options=case.options, environment={**case.environment, **probe})
            )
            url, model = engine.url, engine.model
        else:
            url, socket, token = running
        bench = Bench(kind, url, model, ProbeSettings(listen=(socket,), token=token), seed)
        with asyncio.Runner() as runner:  # the clients want asyncio's own transports
            runner.run(bench.measure(urgent, turns, only))
    rows = [row for row in bench.rows.values() if row.seconds]
    table = markdown(kind, recipe.version, case.load, rows, prompts=bench.prompts, alone=statistics.median(bench.alone))
    return Result(kind, recipe.version, bench.prompts, bench.alone, rows, table)


@click.command(help=__doc__)
@click.argument("kinds", nargs=-1, type=click.Choice(sorted(CASES)))
@click.option("--urgent", default=20, show_default=True, type=click.IntRange(1, 1000), help="Urgent requests each way.")
@click.option("--turns", default=4, show_default=True, type=click.IntRange(1, 100))
@click.option("--way", "only", multiple=True, help="Only ways with this in their names; may be repeated.")
@click.option("--running", nargs=3, help="URL, probe's socket and token of an engine that runs already, started alike.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the tables here.")
def main(
    kinds: tuple[str, ...],
    urgent: int,
    turns: int,
    only: tuple[str, ...],
    running: tuple[str, str, str] | None,
    seed: int,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    results = [measure(kind, urgent, turns, only, seed, running) for kind in kinds or sorted(CASES)]
    text = "\n".join(result.table for result in results)
    click.echo(text)
    if markdown_file is not None:
        markdown_file.write_text(text, encoding="utf-8")
    if json_file is not None:
        json_file.write_text(json.dumps(msgspec.to_builtins(results), indent=1), encoding="utf-8")
    rows = [row for result in results for row in result.rows]
    for row in rows:
        if row.not_full:
            click.echo(f"{row.way}: {row.not_full} urgent requests came when the engine was not full", err=True)
    sys.exit(any(row.different for row in rows))


if __name__ == "__main__":
    main()
