"""The journal hears of a request from its beginning to its end; the log hears of leaks, and names no secret."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stopguard.cli.recording import JournaledBook, journal_observer, log_observer
from stopguard.ledger import Book, BookLimits, Evidence
from stopguard.ledger.journal import Journal
from stopguard.ledger.journal_reader import JournalReader
from stopguard.stops import CLOSE_CONNECTION, Controller, EngineProfile, StopConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from stopguard.stops import Effect

PROVES = EngineProfile(name="gpu0", doors=(CLOSE_CONNECTION,), best_evidence=Evidence.GAUGE)


def test_the_journal_has_what_the_books_had(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    with Journal.open(path, policy="all", monotonic_clock=lambda: 0.0) as journal:
        controller = Controller(JournaledBook(BookLimits(), journal), StopConfig())
        observe = journal_observer(journal)

        def carry_out(wanted: Sequence[Effect], at: float) -> None:
            for effect in wanted:
                observe(effect, at)

        left_open = controller.admit("sg-open", 0.0, model="base")
        controller.dispatch(left_open, 0.0, PROVES)
        stopped = controller.admit("sg-stopped", 0.0, model="base")
        controller.dispatch(stopped, 0.0, PROVES)
        carry_out(controller.client_left(stopped, 1.0, "eof"), 1.0)
        carry_out(controller.acknowledged(stopped, 2.0, Evidence.GAUGE), 2.0)
        leaking = controller.admit("sg-leaking", 0.0, model="base")
        controller.dispatch(leaking, 0.0, PROVES)
        carry_out(controller.client_left(leaking, 1.0, "eof"), 1.0)
        carry_out(controller.advance(30.0), 30.0)
        assert journal.flush()
        with JournalReader(path) as reader:
            assert {stored.record.request_id for stored in reader.open_books()} == {"sg-open", "sg-leaking"}
            assert reader.find("sg-stopped").state == "settled"
            assert {leak.leak.request_id for leak in reader.leaks()} == {"sg-leaking"}


def test_a_leak_is_said_once_and_a_clean_stop_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stopguard")
    controller = Controller(Book(), StopConfig())
    clean = controller.admit("sg-clean", 0.0, model="base")
    controller.dispatch(clean, 0.0, PROVES)
    leaking = controller.admit("sg-leaking", 0.0, model="base")
    controller.dispatch(leaking, 0.0, PROVES)
    wanted = [
        *controller.client_left(clean, 1.0, "eof"),
        *controller.acknowledged(clean, 2.0, Evidence.GAUGE),
        *controller.client_left(leaking, 1.0, "eof"),
        *controller.advance(30.0),
    ]
    for effect in wanted:
        log_observer(effect, 30.0)
    said = [(record.levelname, getattr(record, "event", ""), record.getMessage()) for record in caplog.records]
    assert {event for _, event, _ in said} == {"leak"}
    assert all(level == "WARNING" and "sg-leaking" in text for level, _, text in said)
    caplog.clear()
    caplog.set_level(logging.DEBUG, "stopguard")
    for effect in wanted:
        log_observer(effect, 30.0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"] == [
        "sg-clean settled: cancel by client is confirmed (gauge)"
    ]
