"""Verdicts, exit codes, reports for machines, and the matrix."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from stopguard.audit import SCENARIOS, Plan, chosen, exit_code
from stopguard.audit.checks import common, repeats
from stopguard.audit.matrix import print_matrix, render_html, render_markdown
from stopguard.audit.plan import Budget, Load, total_load
from stopguard.audit.report_files import render_github, render_json, render_junit
from stopguard.audit.report_text import print_report, verdict_line
from stopguard.audit.verdict import AuditReport, Cell, Outcome, ScenarioReport, StepTimes, TargetLine, percentile
from stopguard.errors import ConfigurationError, LimitReached
from stopguard.ledger import Evidence

PASS = Cell(ledger="queue", outcome=Outcome.PASS, evidence=Evidence.PROBE)
LEAK = Cell(
    ledger="kv",
    outcome=Outcome.LEAK,
    evidence=Evidence.GAUGE,
    amount=7,
    unit="blocks",
    age_seconds=7.5,
    detail="<held>, 100%",
)
SLOW = Cell(ledger="stream", outcome=Outcome.SLOW, measured_seconds=6.0, limit_seconds=5.0, detail="late")
UNPROVEN = Cell(ledger="link", outcome=Outcome.UNPROVEN, evidence=Evidence.SENT, detail="nothing shows it")


def report(*rows: Sequence[Cell], skipped: str = "", broken_off: str = "", unreachable: bool = False) -> AuditReport:
    scenarios = [
        ScenarioReport(
            name=f"s{number}",
            title="a scenario",
            cells=tuple(cells),
            stops=1,
            steps={"notify": StepTimes(count=1, p50_ms=12.5, p99_ms=20.0)},
        )
        for number, cells in enumerate(rows)
    ]
    if skipped:
        scenarios.append(ScenarioReport(name="skipped", title="skipped", skipped=skipped))
    return AuditReport(
        target=TargetLine(url="http://engine:8000", engine="x", model="m", best_evidence=Evidence.PROBE),
        scenarios=tuple(scenarios),
        broken_off=broken_off,
        unreachable=unreachable,
        requests_sent=3,
    )


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([report([PASS])], 0),
        ([report([PASS], skipped="it has none")], 0),
        ([report([PASS], [LEAK])], 1),
        ([report([SLOW, UNPROVEN])], 1),
        ([report([PASS, UNPROVEN])], 3),
        ([report([UNPROVEN], unreachable=True, broken_off="it went away")], 2),
        ([report([LEAK], unreachable=True)], 1),
        ([report([PASS], broken_off="too long")], 3),
        ([report(skipped="nothing could be staged")], 3),
        ([report([PASS]), report([LEAK])], 1),
        ([], 2),
    ],
)
def test_exit_codes(found: list[AuditReport], code: int) -> None:
    assert exit_code(found) == code


def test_what_a_cell_says() -> None:
    assert [cell.text for cell in (PASS, LEAK, SLOW, UNPROVEN)] == [
        "PASS",
        "LEAK(7 blocks, 7.5 s)",
        "SLOW(6.00 s, limit 5.00 s)",
        "UNPROVEN(sent)",
    ]


def test_json_has_a_version_and_every_cell() -> None:
    document = json.loads(render_json([report([PASS, LEAK], [SLOW], skipped="no LoRA")]))
    assert (document["schema_version"], document["exit_code"]) == (1, 1)
    audit = document["audits"][0]
    assert audit["blamed"] == ["kv", "stream"]
    leak = audit["scenarios"][0]["cells"][1]
    assert (leak["amount"], leak["unit"], leak["age_seconds"], leak["evidence"]) == (7, "blocks", 7.5, "gauge")
    assert audit["scenarios"][1]["cells"][0]["measured_seconds"] == 6.0
    assert audit["scenarios"][2] == {"name": "skipped", "title": "skipped", "verdict": "skipped", "reason": "no LoRA"}


def test_junit_counts_failures_errors_and_skips() -> None:
    suite = ET.fromstring(render_junit([report([PASS, LEAK, UNPROVEN], [SLOW], skipped="none")]))[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["5", "2", "1", "1"]
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "LEAK(7 blocks, 7.5 s): <held>, 100%"


def test_github_annotations_are_escaped() -> None:
    lines = render_github([report([LEAK], broken_off="gone\nnow")]).splitlines()
    assert lines[0] == "::error title=kv LEAK(7 blocks%2C 7.5 s)::http://engine:8000, s0: <held>, 100%25"
    assert lines[1] == "::error title=broken off::http://engine:8000: gone%0Anow"
    assert render_github([report([UNPROVEN])]).startswith(
        "::warning title=unproven::http://engine:8000: nothing proves link"
    )


def test_the_report_for_people_names_ledger_amount_and_reason() -> None:
    out = io.StringIO()
    print_report(Console(file=out, width=140), report([PASS, LEAK], [UNPROVEN], skipped="it has none"))
    shown = out.getvalue()
    assert "kv LEAK(7 blocks, 7.5 s) in s0: <held>, 100% (evidence: gauge)" in shown
    assert "UNPROVEN link: nothing shows it (s1)" in shown
    assert "SKIPPED skipped: it has none" in shown
    assert verdict_line(report([LEAK])).startswith("LEAK: 1 scenarios (1 leak); blamed: kv;")


def test_the_matrix_compares_targets() -> None:
    gone = Cell(ledger="stream", outcome=Outcome.LEAK, amount=1, unit="requests", detail="never <noticed>")
    both = [report([PASS]), report([gone])]
    markdown = render_markdown(both, ["direct", "proxy"])
    assert markdown.splitlines()[:3] == [
        "| scenario | direct | proxy |",
        "|---|---|---|",
        "| s0 | ok 12.5 ms | never (stream) |",
    ]
    page = render_html(both, ["direct", "proxy"])
    assert "never &lt;noticed&gt;" in page
    assert "<svg" in page
    out = io.StringIO()
    print_matrix(Console(file=out, width=100), both, ["direct", "proxy"])
    assert "never (stream)" in out.getvalue()


def test_percentiles_by_nearest_rank() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 4.0, 4.0]
    assert percentile([], 0.5) == 0.0


def test_a_passage_said_twice_is_told_from_other_words() -> None:
    cold = "the river and the stone"
    assert repeats(cold, "the river river and the stone")
    assert repeats(cold, cold + cold[-5:])
    assert not repeats(cold, cold)
    assert not repeats(cold, "the river and the bones")
    assert not repeats(cold, "the river and another stone")
    assert common(cold, "the rivet") == 8


# Plan -----------------------------------------------------------------------------------------------


def test_a_plan_is_checked_and_its_load_is_known() -> None:
    assert [scenario.name for scenario in chosen(Plan(scenarios=("storm", "mid-stream")))] == ["mid-stream", "storm"]
    with pytest.raises(ConfigurationError, match="no scenario 'no'"):
        chosen(Plan(scenarios=("no",)))
    with pytest.raises(ConfigurationError, match="--deadline"):
        chosen(Plan(deadline_seconds=0.001))
    total = total_load([Load(requests=3, at_once=3, long=1), Load(requests=2, at_once=1)])
    assert total == Load(requests=7, at_once=3, long=1)


def test_every_scenario_says_what_it_stages() -> None:
    for scenario in SCENARIOS.values():
        assert scenario.stages.endswith("."), scenario.name
        load = scenario.load(Plan())
        assert 0 < load.at_once <= load.requests <= 60, scenario.name


def test_a_budget_is_kept() -> None:
    budget = Budget(Plan(requests_max=2, seconds_max=10.0), started_at=5.0)
    budget.spend(10)
    budget.spend(5)
    assert (budget.requests, budget.tokens) == (2, 15)
    with pytest.raises(LimitReached):
        budget.spend(1)
    assert (budget.overdue(14.9), budget.overdue(15.1)) == (False, True)
