"""From a client's leaving to an idle engine, in every state of a request, with and without StopGuard, side by side.

    python -m benchmarks.engine_stops                           every engine that can run here
    python -m benchmarks.engine_stops --engine sglang           one of them; may be repeated
    python -m benchmarks.engine_stops --json out.json --markdown out.md

Each engine is installed where it is not, and started on this machine with a small random model. In one run and in turn
a client leaves the engine itself, and a client leaves StopGuard in front of the same engine; then, where the engine has
a plugin, a second start with the plugin does the latter again. What is measured is outside StopGuard: the engine's own
gauges, read as fast as its adapter allows (that is the resolution, which is printed), and for llama.cpp, whose gauges
would disturb what they show, its log. Queued means that every place is taken by others, who stay.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine
from importlib.metadata import entry_points
from pathlib import Path
from time import monotonic
from typing import Any

import click
import msgspec

from benchmarks._engine_log import LogOfServer
from stopguard.audit.client import SocketWorld
from stopguard.engines.registry import adapter_class
from stopguard.gateway.probing import ProbeSettings
from stopguard.testing import rig
from stopguard.testing.conformance import Subject
from stopguard.testing.staging import STATES, StagingFailed, stage

PATIENCE_SECONDS = 30.0
SEEN_SECONDS = 2.0
ARRIVES_SECONDS = 0.2
"""A request that was left on its way may still get there: for so long nothing may be seen of it."""
#: What each engine is started with, and how its requests look: long enough to be met, few enough places to be filled.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llamacpp": (
        {"model": "slow", "slots": 4, "batch": 128, "verbosity": 5},
        {"slots": 4, "long_tokens": 1200, "prompt_words": 700, "fields": {"cache_prompt": False}},
    ),
    # The pool covers what they may all come to, or SGLang would not admit as many as it may.
    "sglang": ({"running_requests": 8, "pool_tokens": 131_072}, {"slots": 8, "long_tokens": 1500}),
    "vllm": ({"max_num_seqs": 16}, {"slots": 16, "long_tokens": 1900}),
    "deepinfer": ({}, {}),
}
#: What else must be known to read an engine's gauges.
STALE = {"sglang": ", and are up to 15 steps old while others run"}
ALONE, THROUGH, INSIDE = "the engine alone", "through StopGuard", "with its probe inside"

Idle = Callable[[int], Coroutine[Any, Any, float]]


class Cell(msgspec.Struct):
    """One state in one way: milliseconds of each round (`None`: not within the patience), and evidence by grade."""

    milliseconds: list[float | None] = []
    evidence: dict[str, int] = {}
    failures: list[str] = []

    @property
    def text(self) -> str:
        known = [value for value in self.milliseconds if value is not None]
        if not self.milliseconds:
            return "–"
        if len(known) < len(self.milliseconds):
            return f"{len(self.milliseconds) - len(known)} of {len(self.milliseconds)} over {PATIENCE_SECONDS:.0f} s"
        return f"{statistics.median(known):.0f} ({max(known):.0f})"


class Table(msgspec.Struct):
    """One engine's figures."""

    kind: str
    version: str
    resolution: str
    rounds: int
    cells: dict[str, dict[str, Cell]]
    started_seconds: float
    memory_mebibytes: float

    def cell(self, state: str, way: str) -> Cell:
        return self.cells.setdefault(state, {}).setdefault(way, Cell([], {}, []))

    def markdown(self) -> str:
        ways = [way for way in (ALONE, THROUGH, INSIDE) if any(way in row for row in self.cells.values())]
        lines = [
            f"### {self.kind} {self.version}",
            "",
            f"Milliseconds from a client's leaving to the engine's letting go: median (worst) of {self.rounds}; "
            f"{self.resolution}. Started in {self.started_seconds:.0f} s, {self.memory_mebibytes:.0f} MiB.",
            "",
            f"| state | {' | '.join(ways)} | evidence |",
            f"|---|{'---:|' * len(ways)}---|",
        ]
        for state, row in self.cells.items():
            last = row.get(INSIDE) or row.get(THROUGH) or Cell([], {}, [])
            grades = ", ".join(f"{number} {grade}" for grade, number in sorted(last.evidence.items()))
            cells = " | ".join(row[way].text if way in row else "–" for way in ways)
            lines.append(f"| {state.replace('_', ' ')} | {cells} | {grades} |")
        return "\n".join([*lines, ""])


async def _inside(subject: Subject) -> tuple[float, int]:
    """When the engine's own gauges were read, and how many requests they show."""
    gauges = await subject.gauges()
    if gauges is None or gauges.running is None or gauges.waiting is None:
        raise SystemExit(f"{subject.kind} has no gauges to measure by")
    return gauges.at, gauges.running + gauges.waiting


async def _until_seen(subject: Subject, others: int) -> None:
    """Until the gauges show the staged request: one that has not arrived yet would be gone at once."""
    due_at = monotonic() + SEEN_SECONDS
    while monotonic() < due_at and (await _inside(subject))[1] <= others:
        pass


async def _until_few(subject: Subject, left_at: float, others: int) -> float | None:
    """Seconds from `left_at` until the gauges show no more than `others`, and still do when it can have arrived.

    `None` when that takes longer than the patience.
    """
    since: float | None = None
    while monotonic() < left_at + PATIENCE_SECONDS:
        at, inside = await _inside(subject)
        if at <= left_at or inside > others:
            since = None
        elif since is None:
            since = at
        elif at - since >= ARRIVES_SECONDS:
            return since - left_at
    return None


async def _one(subject: Subject, world: SocketWorld, state: str, log: LogOfServer | None, cell: Cell) -> None:
    """One request staged, left and watched."""
    if log is not None:
        await log.idle(PATIENCE_SECONDS)
    else:
        await subject.idle()
    try:
        staged = await stage(world, subject.shape, state, subject.number())
    except StagingFailed as error:
        cell.failures.append(str(error))
        return
    others = len(staged.others)
    inside = None if log is None else await log.victims(others)
    if log is None and state != "before_first_byte":
        await _until_seen(subject, others)
    left_at = monotonic()
    await staged.victim.leave()
    if log is None or inside is None:
        seconds = await _until_few(subject, left_at, others)
    else:
        seconds = await log.until_gone(inside, left_at, PATIENCE_SECONDS)
    cell.milliseconds.append(None if seconds is None else seconds * 1000)
    if world is subject.through:
        closing = asyncio.ensure_future(subject.closed_book(subject.id_of(staged.victim)))
        await asyncio.wait({closing}, timeout=PATIENCE_SECONDS)
        await staged.release()
        grade = (await closing).evidence.label
        cell.evidence[grade] = cell.evidence.get(grade, 0) + 1
    await staged.release()


def _measure(
    table: Table, subject: Subject, ways: dict[str, SocketWorld], rounds: int, log: LogOfServer | None
) -> None:
    """The ways take turns within each round, so that a busy moment of the machine meets all of them."""
    for state in STATES:
        if state == "many_choices" and not subject.capabilities.many_choices:
            continue
        for _ in range(rounds):
            for way, world in ways.items():
                cell = table.cell(state, way)
                subject.run(lambda world=world, cell=cell, state=state: _one(subject, world, state, log, cell))  # type: ignore[misc]
        shown = ", ".join(f"{way} {table.cell(state, way).text}" for way in ways)
        click.echo(f"  {table.kind} {state}: {shown}", err=True)


def measure(kind: str, rounds: int, *, probe: bool) -> Table:
    """All figures of one engine."""
    options, shape = ENGINES.get(kind, ({}, {}))
    recipe = rig.recipe_of(kind)
    adapter = adapter_class(kind)
    table = Table(kind, recipe.version, "", rounds, {}, 0.0, 0.0)
    with tempfile.TemporaryDirectory(prefix="stopguard-bench-") as folder:
        log_file = Path(folder) / "server.log"
        with rig.start(recipe, options=options, log=log_file) as engine:
            with Subject(kind, engine.url, model=engine.model, settle_seconds=PATIENCE_SECONDS, **shape) as subject:
                log = LogOfServer(log_file) if kind == "llamacpp" else None
                seconds = subject.engine.gauge_seconds
                read = f"its gauges are read every {seconds * 1000:.0f} ms{STALE.get(kind, '')}"
                table.resolution = "by its log" if log else read
                _measure(table, subject, {ALONE: subject.direct, THROUGH: subject.through}, rounds, log)
                if log is not None:
                    log.close()
            table.started_seconds = engine.started_seconds
            engine.memory_bytes()
            table.memory_mebibytes = engine.memory_bytes_max / 2**20
        if probe and adapter.launch_needs.plugin:
            token, socket = secrets.token_hex(16), str(Path(folder) / "probe.sock")
            environment = {"STOPGUARD_COLLECTOR": socket, "STOPGUARD_COLLECTOR_TOKEN": token}
            with (
                rig.start(recipe, options=options, log=log_file, environment=environment) as engine,
                Subject(
                    kind,
                    engine.url,
                    model=engine.model,
                    settle_seconds=PATIENCE_SECONDS,
                    probes=ProbeSettings(listen=(socket,), token=token),
                    **shape,
                ) as subject,
            ):
                _measure(table, subject, {INSIDE: subject.through}, rounds, None)
    return table


@click.command()
@click.option("--engine", "kinds", multiple=True, help="Only this engine; may be repeated.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--no-probe", is_flag=True, help="Leave out the second start, with the plugin.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the tables here.")
def main(
    kinds: tuple[str, ...], rounds: int, no_probe: bool, json_file: Path | None, markdown_file: Path | None
) -> None:
    """Measure how long real engines work on for a client that has left."""
    chosen = kinds or tuple(sorted(point.name for point in entry_points(group=rig.GROUP)))
    tables = [measure(kind, rounds, probe=not no_probe) for kind in chosen]
    text = "\n".join(table.markdown() for table in tables)
    click.echo(text)
    if markdown_file is not None:
        markdown_file.write_text(text, encoding="utf-8")
    if json_file is not None:
        json_file.write_text(json.dumps([msgspec.to_builtins(table) for table in tables], indent=1), encoding="utf-8")
    failed = [
        line for table in tables for row in table.cells.values() for cell in row.values() for line in cell.failures
    ]
    for line in failed:
        click.echo(f"not staged: {line}", err=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
