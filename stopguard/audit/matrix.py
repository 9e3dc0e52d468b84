"""One table over several engines or gateways: this is how one is chosen. Text, Markdown, or HTML with small plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stopguard.audit.report_text import STYLES, verdict_line
from stopguard.audit.verdict import AuditReport, Outcome, ScenarioReport

__all__ = ["print_matrix", "render_html", "render_markdown"]

_COLOURS = {
    Outcome.PASS: "#1a7f37",
    Outcome.LEAK: "#cf222e",
    Outcome.SLOW: "#bf8700",
    Outcome.UNPROVEN: "#8250df",
    Outcome.SKIPPED: "#6e7781",
}


def _rows(reports: Sequence[AuditReport]) -> list[str]:
    names: dict[str, None] = {}
    for report in reports:
        names |= dict.fromkeys(scenario.name for scenario in report.scenarios)
    return list(names)


def _find(report: AuditReport, name: str) -> ScenarioReport | None:
    return next((scenario for scenario in report.scenarios if scenario.name == name), None)


def _span_ms(scenario: ScenarioReport) -> float | None:
    """How long until the stop was there: noticed where that is known, else stopped."""
    times = scenario.steps.get("notify") or scenario.steps.get("stop") or scenario.steps.get("settle")
    return times.p50_ms if times else None


def cell_text(scenario: ScenarioReport | None) -> str:
    """One field of the table in a few words."""
    if scenario is None:
        return "·"
    match scenario.outcome:
        case Outcome.SKIPPED:
            return "skipped"
        case Outcome.LEAK | Outcome.SLOW:
            ledgers = ", ".join(sorted({cell.ledger for cell in scenario.accusations}))
            word = "never" if ledgers == "stream" and scenario.outcome is Outcome.LEAK else scenario.outcome.name
            return f"{word} ({ledgers})"
        case outcome:
            span = _span_ms(scenario)
            figure = "" if span is None else f" {span:.1f} ms"
            return f"{'ok' if outcome is Outcome.PASS else 'unproven'}{figure}"


def _title(report: AuditReport, number: int, names: Sequence[str]) -> str:
    return names[number] if number < len(names) and names[number] else report.target.via or report.target.url


def print_matrix(console: Console, reports: Sequence[AuditReport], names: Sequence[str] = ()) -> None:
    """The table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, title="Stops, scenario by scenario", title_justify="left")
    table.add_column("scenario", no_wrap=True)
    for number, report in enumerate(reports):
        table.add_column(_title(report, number, names))
    for name in _rows(reports):
        found = [_find(report, name) for report in reports]
        cells = [Text(cell_text(one), style=STYLES[one.outcome] if one else "") for one in found]
        table.add_row(name, *cells)
    console.print(table)
    for number, report in enumerate(reports):
        console.print(f"{_title(report, number, names)}: {verdict_line(report)}")


def render_markdown(reports: Sequence[AuditReport], names: Sequence[str] = ()) -> str:
    """The table for a README."""
    titles = [_title(report, number, names) for number, report in enumerate(reports)]
    lines = ["| scenario | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name in _rows(reports):
        cells = [cell_text(_find(report, name)) for report in reports]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- {title}: {verdict_line(report)}" for title, report in zip(titles, reports, strict=True)]
    return "\n".join(lines) + "\n"


def render_html(reports: Sequence[AuditReport], names: Sequence[str] = ()) -> str:
    """A page of its own: the table, and in each field a bar as long as the time took (log scale)."""
    titles = [_title(report, number, names) for number, report in enumerate(reports)]
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = []
    for name in _rows(reports):
        fields = "".join(_field(_find(report, name)) for report in reports)
        body.append(f"<tr><th>{escape(name)}</th>{fields}</tr>")
    verdicts = "".join(
        f"<li><b>{escape(title)}</b>: {escape(verdict_line(report))}</li>"
        for title, report in zip(titles, reports, strict=True)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>stopguard audit</title><style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #1f2328 }}
table {{ border-collapse: collapse }} th, td {{ border: 1px solid #d0d7de; padding: .3em .6em; text-align: left }}
svg {{ display: block; margin-top: .2em }}
</style></head><body><h1>Stops, scenario by scenario</h1>
<table><thead><tr><th>scenario</th>{head}</tr></thead><tbody>
{chr(10).join(body)}
</tbody></table>
<p>A bar is the time until the stop was noticed, 1 ms to 10 s on a logarithmic scale.</p>
<ul>{verdicts}</ul></body></html>
"""


def _field(scenario: ScenarioReport | None) -> str:
    if scenario is None:
        return "<td></td>"
    colour = _COLOURS[scenario.outcome]
    why = scenario.skipped or "; ".join(f"{cell.ledger}: {cell.detail}" for cell in scenario.accusations)
    span = _span_ms(scenario)
    bar = "" if span is None else _bar(span, colour)
    return f'<td title="{escape(why)}" style="color:{colour}">{escape(cell_text(scenario))}{bar}</td>'


def _bar(span_ms: float, colour: str) -> str:
    width = _log_share(span_ms) * 120
    return f'<svg width="120" height="6"><rect width="{width:.0f}" height="6" fill="{colour}"/></svg>'


def _log_share(span_ms: float) -> float:
    """1 ms is 0, 10 s is 1."""
    return max(0.02, min(1.0, log10(max(1.0, span_ms)) / 4))
