"""How a run is shown: tables on a terminal, in Markdown and as JSON, all from the same summaries."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.relay_bench.measures import MEASURES, REQUEST_MEASURES, STREAM_MEASURES, Measure
from benchmarks.relay_bench.peers import BASELINE
from benchmarks.relay_bench.rounds import PeerResult, Plan
from benchmarks.relay_bench.summary import PeerSummary, Spread, Verdict
from benchmarks.relay_bench.windows import DETECTED, WINDOWS, Window

_RATIOS_SHOWN = {
    "added_p50_ms",
    "requests_32_processor_us",
    "paced_processor_us",
}
_REACHED = {True: "reached", False: "missed", None: "not known"}


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a note on how to read it, column heads and rows of text."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def machine_line(plan: Plan) -> str:
    """What it ran on, in one line."""
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    parts = (
        f"{os.cpu_count()} × {processor}, {platform.system()} {platform.release()}, Python {platform.python_version()}",
        plan.processors.describe(),
        f"rounds: {plan.rounds}, {plan.seconds:g} s a load, up to {plan.window_samples} closes a window and round",
    )
    return "; ".join(parts)


def tables(summaries: Mapping[str, PeerSummary], verdicts: Sequence[Verdict]) -> list[Table]:
    """The report's tables."""
    found = [
        _measure_table(
            "Small non-streaming requests",
            "Medians over rounds. × is the ratio to nginx in the same round: median (lowest–highest).",
            REQUEST_MEASURES,
            summaries,
        ),
        _measure_table(
            "Streams",
            "CPU of the proxy's processes by the operating system's accounting. "
            "Where less than 1 was delivered the proxy did not keep up.",
            STREAM_MEASURES,
            summaries,
        ),
        _window_table(summaries),
    ]
    if verdicts:
        rows: list[tuple[str, ...]] = [(one.figure, one.target, one.seen, _REACHED[one.reached]) for one in verdicts]
        note = "Ratios are medians over rounds (lowest–highest)."
        found.append(Table("StopGuard's targets", note, ("figure", "target", "seen", ""), rows))
    return found


def spread_table(summaries: Mapping[str, PeerSummary]) -> Table:
    """Every figure of every peer with its spread, one row a figure."""
    peers = [summary for summary in summaries.values() if summary.values]
    rows = []
    for key, measure in MEASURES.items():
        cells = [_spread(summary.values.get(key), measure.digits) for summary in peers]
        rows.append((f"{measure.title} ({measure.unit})", *cells))
    columns = ("figure", *(summary.title for summary in peers))
    return Table("Every figure", "Median (lowest–highest) over the rounds.", columns, rows)


def _measure_table(title: str, note: str, measures: Sequence[Measure], summaries: Mapping[str, PeerSummary]) -> Table:
    columns = ["peer"]
    for measure in measures:
        columns.append(f"{measure.title} ({measure.unit})")
        if measure.key in _RATIOS_SHOWN:
            columns.append(f"× {BASELINE}")
    rows = []
    for summary in summaries.values():
        cells = [_name(summary)]
        for measure in measures:
            value = summary.values.get(measure.key)
            cells.append("–" if value is None else f"{value.median:,.{measure.digits}f}")
            if measure.key in _RATIOS_SHOWN:
                cells.append(_spread(summary.ratios.get(measure.key), 2))
        rows.append(tuple(cells) if not summary.reason else _reason_row(summary, len(columns)))
    return Table(title, note, tuple(columns), rows)


def _window_table(summaries: Mapping[str, PeerSummary]) -> Table:
    columns = ("peer", *(window.title for window in WINDOWS))
    rows = []
    for summary in summaries.values():
        if summary.reason:
            rows.append(_reason_row(summary, len(columns)))
        else:
            rows.append((_name(summary), *(_window_cell(summary, window) for window in WINDOWS)))
    note = (
        "p50 / p99 in ms and the p50's ratio to nginx, with 64 other streams busy. "
        "Not every close was seen where counts stand. "
        "late: only when the upstream's own next bytes came; never: the upstream ran to its end; "
        "never reached: the proxy had not passed the request on, so there was nothing to stop."
    )
    return Table("Client close → upstream close", note, columns, rows)


def _window_cell(summary: PeerSummary, window: Window) -> str:
    counts = summary.outcomes.get(window.name, {})
    total = sum(counts.values())
    if not total:
        return "–"
    parts = []
    p50 = summary.values.get(f"{window.name}_p50_ms")
    p99 = summary.values.get(f"{window.name}_p99_ms")
    if p50 is not None and p99 is not None:
        parts.append(f"{p50.median:.2f} / {p99.median:.2f}")
        ratio = summary.ratios.get(f"{window.name}_p50_ms")
        if ratio is not None:
            parts.append(f"{ratio.median:.2f} ×")
    parts += [f"{outcome} {count}/{total}" for outcome, count in sorted(counts.items()) if outcome != DETECTED]
    return ", ".join(parts)


def _name(summary: PeerSummary) -> str:
    return f"{summary.title} {summary.version}".strip()


def _reason_row(summary: PeerSummary, columns: int) -> tuple[str, ...]:
    return (_name(summary), f"not measured: {summary.reason}", *[""] * (columns - 2))


def _spread(value: Spread | None, digits: int) -> str:
    return "–" if value is None else value.text(digits)


def notes(summaries: Mapping[str, PeerSummary]) -> list[str]:
    """What went wrong where, one line each."""
    return [f"{summary.title}, {note}" for summary in summaries.values() for note in summary.notes]


def show(machine: str, found: Sequence[Table], remarks: Sequence[str], output: TextIO = sys.stdout) -> None:
    """Prints the report: drawn tables on a terminal, aligned text elsewhere."""
    print(f"\n{machine}", file=output)
    if output.isatty():
        console = Console(file=output)
        for table in found:
            drawn = RichTable(*table.columns, title=table.title, caption=table.note, title_justify="left")
            for row in table.rows:
                drawn.add_row(*row)
            console.print(drawn)
    else:
        for table in found:
            print(f"\n{table.title}\n{table.note}\n", file=output)
            print("\n".join(_aligned(table)), file=output)
    if remarks:
        print("\nNotes", *remarks, sep="\n- ", file=output)


def _aligned(table: Table) -> list[str]:
    # A reason for having no figures may be long; it must not widen the column that it happens to stand in.
    rows = [table.columns, *table.rows]
    widths = [
        max(len(row[column]) for row in rows if not row[column].startswith("not measured"))
        for column in range(len(table.columns))
    ]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown(machine: str, found: Sequence[Table], spread: Table, remarks: Sequence[str]) -> str:
    """The report as a Markdown page."""
    parts = ["# Relay comparison", machine]
    for table in found:
        parts += [f"## {table.title}", table.note, _markdown_table(table)]
    parts += [f"<details><summary>{spread.title}</summary>\n", spread.note, _markdown_table(spread), "</details>"]
    if remarks:
        parts += ["## Notes", "\n".join(f"- {remark}" for remark in remarks)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_json(
    machine: str,
    results: Mapping[str, PeerResult],
    summaries: Mapping[str, PeerSummary],
    verdicts: Sequence[Verdict],
) -> str:
    """Everything, raw rounds included."""
    document = {
        "machine": machine,
        "measures": {key: asdict(measure) for key, measure in MEASURES.items()},
        "rounds": {name: asdict(result) for name, result in results.items()},
        "summary": {name: asdict(summary) for name, summary in summaries.items()},
        "targets": [asdict(verdict) for verdict in verdicts],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
