"""Ten thousand idle streams in one process: what each costs, and what is left when all leave at once.

::

    python benchmarks/streams.py                     # 10,000 streams, two rounds (about a minute)
    python benchmarks/streams.py --streams 2000 --json
    python benchmarks/streams.py --check             # exit 1 where a target was missed or something was left

Stub, gateway and clients are processes of their own. Memory is the operating system's account of the gateway's
process; see docs/benchmarks.md for how to read it. Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it also runs where the checkout is not installed

from benchmarks._accounting import (
    Kernel,
    Memory,
    descriptors_of,
    kernel_memory,
    memory_of,
    processor_seconds_of,
    raise_descriptor_limit,
)
from benchmarks._scale_run import ROOT, Helper, Scene, Stub, end_cleanly
from benchmarks.relay_bench.processes import free_port

STREAM_KIB_MAX = 16.0
WARM_UP_STREAMS = 64
SPARE_DESCRIPTORS = 24
"""What the gateway needs beside two descriptors a stream: listeners, loops, pipes, the health check's connection."""
SETTLE_SECONDS = 1.0
CLOSE_SECONDS = 60.0
SOCKETS_A_STREAM = 4


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One time that all streams were opened and cancelled. KiB are the gateway's; a stream's unless said otherwise."""

    open_seconds: float
    resident_kib: float
    proportional_kib: float
    anonymous_kib: float
    kernel_slab_kib: float
    kernel_buffers_kib: float
    descriptors: int
    client_close_seconds: float
    """From the first close to the last of the clients' own system calls."""
    upstream_closed_seconds: float
    """From the first close until the stub had seen all of its connections close."""
    empty_seconds: float
    """From the first close until the gateway had no open book and no client's connection."""
    seen_p50_ms: float
    """A stream's own close → its upstream's close."""
    seen_p99_ms: float
    cancel_cpu_us: float
    """Processor time of the gateway a cancelled stream, the kernel's part included."""
    process_after_kib: int
    """The gateway's whole resident memory when all was gone."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run has seen."""

    streams: int
    wanted: int
    process_before_kib: int
    rounds: tuple[Round, ...]
    floor_kib: float | None
    """KiB a stream of a bare relay on the same parts: sockets, transports, parsers and no books."""
    left: dict[str, str]
    """What was held at the end and not at the beginning; empty when nothing was left."""
    left_before_collection: dict[str, str]
    """The same before a full garbage collection."""
    history: dict[str, int]
    exit_code: int | None

    @property
    def stream_kib(self) -> float:
        """The gateway's resident memory a stream: the highest of the rounds."""
        return max(one.resident_kib for one in self.rounds)

    @property
    def reached(self) -> bool:
        """Whether nothing was left and the target was met."""
        return not self.left and not self.left_before_collection and self.stream_kib <= STREAM_KIB_MAX


def streams_possible(wanted: int) -> int:
    """How many streams one process may have: each takes two descriptors of the gateway."""
    limit = raise_descriptor_limit(2 * wanted + SPARE_DESCRIPTORS)
    return min(wanted, (limit - SPARE_DESCRIPTORS) // 2)


def run(wanted: int, *, rounds: int = 2, floor: bool = True) -> Report:
    """Open and cancel the streams `rounds` times."""
    streams = streams_possible(wanted)
    with Scene() as scene:
        clients = Helper("benchmarks._idle_clients", str(scene.port))
        try:
            clients.ask(f"open {min(WARM_UP_STREAMS, streams)}")
            clients.ask("close")
            before = scene.baseline()
            memory, kernel = memory_of(scene.gateway.pid), kernel_memory()
            seen = tuple(_round(scene, clients, streams, memory, kernel) for _ in range(rounds))
            at_rest, left_before_collection = scene.until_left(before)
            _, left = scene.until_left(before, "collect")
        finally:
            clients.stop()
    return Report(
        streams=streams,
        wanted=wanted,
        process_before_kib=memory.resident_kib,
        rounds=seen,
        floor_kib=_floor(streams) if floor else None,
        left=left,
        left_before_collection=left_before_collection,
        history=at_rest["history"],
        exit_code=scene.exit_code,
    )


def _round(scene: Scene, clients: Helper, streams: int, memory: Memory, kernel: Kernel) -> Round:
    """`memory` and `kernel` are from before the first round: what an earlier round has left counts in a later one."""
    pid = scene.gateway.pid
    began_at = time.monotonic()
    clients.ask(f"open {streams}")
    open_seconds = time.monotonic() - began_at
    time.sleep(SETTLE_SECONDS)
    held = scene.gateway.ask("holdings")
    if held["registered requests"] != streams:
        raise RuntimeError(f"{held['registered requests']} of {streams} streams are open: {scene.gateway.errors()}")
    full_memory, full_kernel = memory_of(pid), kernel_memory()
    descriptors = descriptors_of(pid)
    scene.stub.closed_ns.clear()
    processor_seconds = processor_seconds_of(pid)
    clients.say("close")
    scene.gateway.say("empty")
    client_ns: dict[str, int] = clients.answer()["closed_ns"]
    empty_ns = int(scene.gateway.answer()["at_ns"])
    upstream_ns = _until_closed(scene.stub, streams)
    first_ns, last_ns = min(client_ns.values()), max(client_ns.values())
    waits = sorted((upstream_ns[name] - at_ns) / 1e6 for name, at_ns in client_ns.items())
    return Round(
        open_seconds=open_seconds,
        **_difference(memory, full_memory, streams),
        **_kernel_difference(kernel, full_kernel, streams),
        descriptors=descriptors,
        client_close_seconds=(last_ns - first_ns) / 1e9,
        upstream_closed_seconds=(max(upstream_ns.values()) - first_ns) / 1e9,
        empty_seconds=(empty_ns - first_ns) / 1e9,
        seen_p50_ms=waits[len(waits) // 2],
        seen_p99_ms=waits[int(len(waits) * 0.99)],
        cancel_cpu_us=(processor_seconds_of(pid) - processor_seconds) / streams * 1e6,
        process_after_kib=memory_of(pid).resident_kib,
    )


def _until_closed(stub: Stub, streams: int) -> dict[str, int]:
    ends_at = time.monotonic() + CLOSE_SECONDS
    while len(stub.closed_ns) < streams:
        if time.monotonic() > ends_at:
            raise RuntimeError(f"the stub saw {len(stub.closed_ns)} of {streams} connections close")
        time.sleep(0.01)
    return dict(stub.closed_ns)


def _difference(before: Memory, full: Memory, streams: int) -> dict[str, Any]:
    return {
        "resident_kib": (full.resident_kib - before.resident_kib) / streams,
        "proportional_kib": (full.proportional_kib - before.proportional_kib) / streams,
        "anonymous_kib": (full.anonymous_kib - before.anonymous_kib) / streams,
    }


def _kernel_difference(before: Kernel, full: Kernel, streams: int) -> dict[str, Any]:
    return {
        "kernel_slab_kib": (full.slab_kib - before.slab_kib) / streams,
        "kernel_buffers_kib": (full.buffers_kib - before.buffers_kib) / streams,
    }


def _floor(streams: int) -> float:
    """The resident memory a stream of the bare relay, by the same clients."""
    stub = Stub()
    port = free_port()
    relay = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.relay_bench.bare_relay", str(port), str(stub.port)], cwd=ROOT
    )
    try:
        clients = Helper("benchmarks._idle_clients", str(port))
        try:
            _until_listening(clients)
            clients.ask("close")
            before = memory_of(relay.pid)
            clients.ask(f"open {streams}")
            time.sleep(SETTLE_SECONDS)
            return (memory_of(relay.pid).resident_kib - before.resident_kib) / streams
        finally:
            clients.stop()
    finally:
        relay.terminate()
        relay.wait()
        stub.stop()


def _until_listening(clients: Helper) -> None:
    time.sleep(SETTLE_SECONDS)
    clients.ask(f"open {WARM_UP_STREAMS}")


def show(report: Report) -> None:
    """Print the report for people."""
    console = Console() if sys.stdout.isatty() else Console(width=118)
    if report.streams < report.wanted:
        console.print(
            f"{report.streams} streams instead of {report.wanted}: a process may have no more descriptors here "
            "(raise the hard limit with `ulimit -Hn`)",
            soft_wrap=True,
        )
    table = Table("figure", "unit", *(f"round {number}" for number in range(1, len(report.rounds) + 1)))
    for title, unit, name in _ROWS:
        values = [getattr(one, name) for one in report.rounds]
        table.add_row(title, unit, *(f"{value:,}" if isinstance(value, int) else f"{value:,.2f}" for value in values))
    console.print(table)
    floor = f", a bare relay on the same parts {report.floor_kib:.2f}" if report.floor_kib is not None else ""
    mark = "met" if report.stream_kib <= STREAM_KIB_MAX else "MISSED"
    console.print(
        f"{report.streams} streams, {report.stream_kib:.2f} KiB each{floor}; target {STREAM_KIB_MAX:g}: {mark}. "
        f"The process before: {report.process_before_kib:,} KiB",
        soft_wrap=True,
    )
    for when, left in (("", report.left_before_collection), (" after a garbage collection", report.left)):
        text = "; ".join(f"{name}: {change}" for name, change in left.items()) or "nothing"
        console.print(f"left{when}: {text}", soft_wrap=True)
    console.print("books: " + ", ".join(f"{name} {count:,}" for name, count in report.history.items()), soft_wrap=True)


_ROWS = (
    ("opened in", "s", "open_seconds"),
    ("resident a stream", "KiB", "resident_kib"),
    ("proportional a stream", "KiB", "proportional_kib"),
    ("anonymous a stream", "KiB", "anonymous_kib"),
    (f"kernel's structures a stream ({SOCKETS_A_STREAM} sockets)", "KiB", "kernel_slab_kib"),
    ("kernel's TCP buffers a stream", "KiB", "kernel_buffers_kib"),
    ("descriptors of the gateway", "", "descriptors"),
    ("the clients' own closes", "s", "client_close_seconds"),
    ("first close → all closed upstream", "s", "upstream_closed_seconds"),
    ("first close → books and connections empty", "s", "empty_seconds"),
    ("a close → its upstream close, p50", "ms", "seen_p50_ms"),
    ("a close → its upstream close, p99", "ms", "seen_p99_ms"),
    ("gateway's processor time a cancel", "µs", "cancel_cpu_us"),
    ("the process afterwards", "KiB", "process_after_kib"),
)


@click.command()
@click.option("--streams", default=10_000, show_default=True, type=click.IntRange(1, 100_000))
@click.option(
    "--rounds", default=2, show_default=True, type=click.IntRange(1, 20), help="Times to open and cancel all."
)
@click.option("--floor/--no-floor", default=True, help="Also measure a bare relay on the same parts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
@click.option("--check", is_flag=True, help="Exit 1 where something was left or the target was missed.")
def main(streams: int, rounds: int, floor: bool, as_json: bool, check: bool) -> None:
    """Hold many idle streams, cancel all at once, and look for what is left."""
    end_cleanly()
    report = run(streams, rounds=rounds, floor=floor)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(report), indent=1))
    else:
        show(report)
    sys.exit(check and not report.reached)


if __name__ == "__main__":
    main()
