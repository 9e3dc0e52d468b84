"""The report for machines: JSON with a version, JUnit for CI systems, annotations for GitHub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

import msgspec

from stopguard.audit.report_text import verdict_line
from stopguard.audit.verdict import SCHEMA_VERSION, AuditReport, Cell, Outcome, ScenarioReport, exit_code

__all__ = ["as_document", "render_github", "render_json", "render_junit"]


def as_document(report: AuditReport) -> dict[str, Any]:
    """One report as plain values; amounts and units as in `verdict`, evidence by its name."""
    target = msgspec.to_builtins(report.target)
    target["best_evidence"] = report.target.best_evidence.label
    return {
        "target": target,
        "verdict": report.outcome.value,
        "blamed": sorted(report.accused_ledgers()),
        "started": report.started,
        "seconds": round(report.seconds, 3),
        "seed": report.seed,
        "deadline_seconds": report.deadline_seconds,
        "requests_sent": report.requests_sent,
        "tokens_asked": report.tokens_asked,
        "broken_off": report.broken_off,
        "scenarios": [_scenario(scenario) for scenario in report.scenarios],
    }


def _scenario(report: ScenarioReport) -> dict[str, Any]:
    document: dict[str, Any] = {"name": report.name, "title": report.title, "verdict": report.outcome.value}
    if report.skipped:
        return document | {"reason": report.skipped}
    return document | {
        "cells": [_cell(cell) for cell in report.cells],
        "stops": report.stops,
        "steps_ms": {
            name: {"count": times.count, "p50": round(times.p50_ms, 3), "p99": round(times.p99_ms, 3)}
            for name, times in report.steps.items()
        },
        "tokens_wasted": report.tokens_wasted,
        "notes": list(report.notes),
        "seconds": round(report.seconds, 3),
    }


def _cell(cell: Cell) -> dict[str, Any]:
    document: dict[str, Any] = {
        "ledger": cell.ledger,
        "verdict": cell.outcome.value,
        "evidence": cell.evidence.label,
        "detail": cell.detail,
    }
    if cell.outcome is Outcome.LEAK:
        document |= {"amount": cell.amount, "unit": cell.unit, "age_seconds": round(cell.age_seconds, 3)}
    if cell.outcome is Outcome.SLOW:
        document |= {
            "measured_seconds": round(cell.measured_seconds, 3),
            "limit_seconds": round(cell.limit_seconds, 3),
        }
    return document


def render_json(reports: Sequence[AuditReport]) -> str:
    """All reports in one document."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "exit_code": exit_code(reports),
        "audits": [as_document(report) for report in reports],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def render_junit(reports: Sequence[AuditReport]) -> str:
    """JUnit XML: a suite a target, a case for each scenario and ledger. Unproven cells are errors, not passes."""
    root = ET.Element("testsuites", name="stopguard audit")
    for report in reports:
        suite = ET.SubElement(root, "testsuite", name=report.target.via or report.target.url, timestamp=report.started)
        totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for scenario in report.scenarios:
            cells = scenario.cells or (Cell(ledger="all", outcome=Outcome.SKIPPED, detail=scenario.skipped),)
            for cell in cells:
                totals["tests"] += 1
                _case(suite, scenario, cell, scenario.seconds / len(cells), totals)
        for name, count in totals.items():
            suite.set(name, str(count))
        suite.set("time", f"{report.seconds:.3f}")
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, scenario: ScenarioReport, cell: Cell, seconds: float, totals: dict[str, int]) -> None:
    case = ET.SubElement(suite, "testcase", classname=f"audit.{scenario.name}", name=cell.ledger, time=f"{seconds:.3f}")
    match cell.outcome:
        case Outcome.LEAK | Outcome.SLOW:
            totals["failures"] += 1
            ET.SubElement(case, "failure", type=cell.outcome.value, message=f"{cell.text}: {cell.detail}")
        case Outcome.UNPROVEN:
            totals["errors"] += 1
            ET.SubElement(case, "error", type="unproven", message=f"{cell.text}: {cell.detail}")
        case Outcome.SKIPPED:
            totals["skipped"] += 1
            ET.SubElement(case, "skipped", message=cell.detail)
        case Outcome.PASS:
            pass


def render_github(reports: Sequence[AuditReport]) -> str:
    """Workflow commands that GitHub shows as annotations."""
    lines: list[str] = []
    for report in reports:
        where = report.target.via or report.target.url
        for name, cell in report.accusations():
            title = f"{cell.ledger} {cell.text}"
            lines.append(f"::error title={_property(title)}::{_text(f'{where}, {name}: {cell.detail}')}")
        unproven = sorted(
            {
                cell.ledger
                for scenario in report.scenarios
                for cell in scenario.cells
                if cell.outcome is Outcome.UNPROVEN
            }
        )
        if unproven and not report.accusations():
            lines.append(f"::warning title=unproven::{_text(where + ': nothing proves ' + ', '.join(unproven))}")
        if report.broken_off:
            lines.append(f"::error title=broken off::{_text(f'{where}: {report.broken_off}')}")
        lines.append(f"::notice title=stopguard audit::{_text(f'{where}: {verdict_line(report)}')}")
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _text(value).replace(":", "%3A").replace(",", "%2C")
