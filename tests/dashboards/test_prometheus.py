"""A real Prometheus over seeded storms: every expression has data, every alert fires on its fault and only there."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from dashboards.generate import FOLDER
from dashboards.rules import ALERTS, recordings
from stopguard.ledger import Ledger
from tests.dashboards.lint import expressions, substitute
from tests.dashboards.world import FAULTS, HEALTHY

if TYPE_CHECKING:
    from tests.dashboards.conftest import Scraped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

BOARDS = sorted((FOLDER / "grafana").glob("*.json"))
GAP_FREE = {"__rate_interval": "10s", "__range": "30s"}


def query(scraped: Scraped, expr: str, **window: float) -> list[dict[str, Any]]:
    path = "query_range" if window else "query"
    answer = httpx.get(
        f"{scraped.address}/api/v1/{path}",
        params={"query": expr, **window},
        trust_env=False,
        timeout=20.0,
    ).json()
    assert answer["status"] == "success", f"{answer.get('error')}: {expr}"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def number(scraped: Scraped, expr: str) -> float:
    (series,) = query(scraped, expr)
    return float(series["value"][1])


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_expression_has_data(scraped: Scraped, path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    empty = []
    for title, expr in expressions(document):
        wanted = substitute(expr, {**GAP_FREE, "engine": ".*", "model": ".*"})
        found = query(scraped, wanted, start=scraped.ended_at - 30, end=scraped.ended_at, step=1)
        values = [float(value) for series in found for _, value in series["values"]]
        if not any(math.isfinite(value) for value in values):
            empty.append(f"{title}: {expr}")
    assert empty == []


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_variable_has_values(scraped: Scraped, path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert match is not None
            found = query(scraped, f"count by ({match[2]}) ({match[1]})")
            values = {series["metric"].get(match[2]) for series in found}
            assert {HEALTHY if match[2] == "engine" else "tiny"} <= values


@pytest.mark.parametrize("recording", recordings(), ids=lambda recording: recording.record)
def test_every_recording_has_data(scraped: Scraped, recording: Any) -> None:
    found = query(
        scraped,
        recording.record,
        start=scraped.ended_at - 20,
        end=scraped.ended_at,
        step=1,
    )
    assert {series["metric"]["job"] for series in found} >= {HEALTHY}


@pytest.mark.parametrize("job", FAULTS)
def test_each_alert_fires_on_its_fault(scraped: Scraped, job: str) -> None:
    alert, _ = FAULTS[job]
    assert alert in scraped.fired.get(job, set())


def test_no_alert_fires_on_a_healthy_storm(scraped: Scraped) -> None:
    assert scraped.fired.get(HEALTHY, set()) == set()
    assert (
        number(
            scraped,
            f'sum(stopguard_stops_total{{job="{HEALTHY}", semantics="cancel"}})',
        )
        > 100
    )


def test_every_alert_has_a_fault_that_it_is_tested_with() -> None:
    assert {alert for alert, _ in FAULTS.values()} == set(ALERTS)


@pytest.mark.parametrize("job", [HEALTHY, *FAULTS])
def test_the_numbers_equal_the_books(scraped: Scraped, job: str) -> None:
    storm = scraped.storms.storms[job]
    where = f'job="{job}"'
    counts = storm.book.statistics()
    assert number(scraped, f"sum(stopguard_requests{{{where}}})") == counts.open_requests
    assert number(scraped, f"sum(stopguard_leaks_total{{{where}}})") == counts.leaks_found
    ended = number(scraped, f'sum(stopguard_stops_total{{{where}, semantics!="preempt"}})')
    assert ended == counts.settled + counts.written_off > 0
    for ledger in Ledger:
        shown = number(scraped, f'sum(stopguard_ledger_open{{{where}, ledger="{ledger.label}"}})')
        assert shown == counts.open_ledgers[ledger]
    assert number(scraped, f"sum(stopguard_preemptions_total{{{where}}})") >= storm.report.preemptions
    assert (
        number(scraped, f"sum(stopguard_book_errors_total{{{where}}})") == storm.controller.anomalies.book_error_count
    )
