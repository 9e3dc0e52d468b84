"""The passive audit: a journal and a running gateway's books are judged, and nothing is sent to any engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from stopguard.audit import Outcome, exit_code
from stopguard.audit.errors import CredentialsRefused, TargetUnreachable
from stopguard.audit.passive import audit_gateway, audit_journal
from stopguard.cli import main
from stopguard.errors import StorageError
from stopguard.ledger import Book, Evidence
from stopguard.ledger.journal import Journal
from tests.unit.ledger.journal_scenarios import Clock, begin, cancelled, finished, leaking, stop

WALL, MONOTONIC = 1_700_000_000.0, 1000.0


def write(path: Path, *, leak: bool = False, abandoned: bool = False) -> Path:
    book = Book()
    with Journal.open(
        path, policy="all", flush_seconds=3600.0, wall_clock=Clock(WALL), monotonic_clock=Clock(MONOTONIC)
    ) as journal:
        journal.settled(finished(book, "sg-finished"))
        journal.settled(cancelled(book, "sg-cancelled"))
        if leak:
            request, leaks = leaking(book, "sg-leaking")
            for one in leaks:
                journal.leaked(one)
            book.write_off(request, MONOTONIC + 9, "given up")
            journal.settled(request)
        if abandoned:
            journal.opened(stop(begin(book, "sg-open", MONOTONIC), MONOTONIC + 1))
    return path


def test_a_clean_journal_passes_with_its_steps(tmp_path: Path) -> None:
    report = audit_journal(write(tmp_path / "clean.journal"), 5.0)
    (engine,) = report.scenarios
    assert (engine.name, engine.stops, engine.outcome) == ("local", 1, Outcome.PASS)
    assert engine.steps["stop"].p50_ms == pytest.approx(12.0)
    assert engine.steps["release"].p50_ms == pytest.approx(20.0)
    assert engine.tokens_wasted == 3
    cell = engine.cell("link")
    assert cell is not None
    assert cell.evidence is Evidence.PROBE
    assert exit_code([report]) == 0


def test_a_limit_makes_it_slow(tmp_path: Path) -> None:
    report = audit_journal(write(tmp_path / "clean.journal"), 0.015)
    assert {cell.ledger for _, cell in report.accusations()} == {"kv", "stream"}
    assert all(cell.outcome is Outcome.SLOW for _, cell in report.accusations())


def test_a_leak_in_the_journal_is_named(tmp_path: Path) -> None:
    report = audit_journal(write(tmp_path / "leaky.journal", leak=True), 5.0)
    ((name, cell),) = report.accusations()
    assert (name, cell.ledger, cell.amount, cell.unit) == ("local", "kv", 13, "blocks")
    assert "sg-leaking" in cell.detail
    assert exit_code([report]) == 1


def test_books_that_were_left_open_prove_nothing(tmp_path: Path) -> None:
    report = audit_journal(write(tmp_path / "left.journal", abandoned=True), 5.0)
    assert report.outcome is Outcome.UNPROVEN
    queue = report.scenarios[0].cell("queue")
    assert queue is not None
    assert "sg-open was open when the gateway ended" in queue.detail


def test_the_command_line_judges_a_journal(tmp_path: Path) -> None:
    path = write(tmp_path / "leaky.journal", leak=True)
    result = CliRunner().invoke(main, ["audit", "--journal", str(path)])
    assert result.exit_code == 1, result.output
    assert "kv LEAK(13 blocks" in result.output
    missing = CliRunner().invoke(main, ["audit", "--journal", str(tmp_path / "none")])
    assert missing.exit_code == 2
    assert "no journal at" in missing.output
    with pytest.raises(StorageError):
        audit_journal(tmp_path / "none", 5.0)


# A running gateway ----------------------------------------------------------------------------------


def pages(**engine: Any) -> dict[str, dict[str, Any]]:
    line = {"name": "gpu0", "best_evidence": "probe", "unconfirmed": 0, "differences": [], **engine}
    stop_line = {"evidence": "probe", "age_seconds": 0.02}
    books = {"opened": 5, "settled": 5, "written_off": 0, "open_requests": 0, "overdue_requests": 0, "closed_late": 0}
    return {
        "/books": {**books, "book_errors": 0},
        "/leaks": {"leaks": []},
        "/engines": {"engines": [line]},
        "/stops": {"ended": [{"engine": "gpu0", "stop": stop_line}]},
    }


def judge(answers: dict[str, dict[str, Any]], status: int = 200) -> Any:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        return httpx.Response(status, json=answers[request.url.path])

    report = audit_gateway("http://127.0.0.1:9090", 5.0, "token", httpx.MockTransport(answer))
    assert set(asked) == {"GET"}
    return report


def test_a_gateway_with_closed_books_passes() -> None:
    assert judge(pages()).outcome is Outcome.PASS


def test_a_gateway_with_a_leak_or_a_lasting_difference_is_accused() -> None:
    leaky = pages()
    row = {"id": "sg-1", "engine": "gpu0", "ledger": "kv", "account": "held", "amount": 4, "unit": "blocks"}
    leaky["/leaks"]["leaks"] = [{**row, "overdue_seconds": 12.0, "open": True}]
    assert [(cell.ledger, cell.amount) for _, cell in judge(leaky).accusations()] == [("kv", 4)]
    difference = {"ledger": "queue", "unit": "places", "orphans": 2, "phantoms": 0, "persistent": True}
    assert judge(pages(differences=[difference])).accused_ledgers() == {"queue"}
    assert judge(pages(differences=[{**difference, "persistent": False}])).outcome is Outcome.PASS


def test_a_gateway_whose_engine_proves_nothing_is_unproven() -> None:
    report = judge(pages(best_evidence="sent", unconfirmed=1))
    assert report.outcome is Outcome.UNPROVEN
    assert exit_code([report]) == 3


def test_a_gateway_that_is_none_or_wants_a_token() -> None:
    with pytest.raises(CredentialsRefused, match="--key"):
        judge(pages(), status=401)
    with pytest.raises(TargetUnreachable, match="is no StopGuard admin API"):
        judge(pages(), status=404)
    with pytest.raises(TargetUnreachable, match="not the address"):
        audit_gateway("nowhere", 5.0)
