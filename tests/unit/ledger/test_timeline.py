"""A record as a story: rows in order, steps with their durations, and a verdict that never says more than is known."""

from __future__ import annotations

import pytest

from stopguard.ledger import Account, Book, Evidence, Ledger, RequestRecord, StopSummary
from stopguard.ledger.timeline import describe_open, duration, open_ledgers, stop_steps, timeline, verdict
from tests.unit.ledger.journal_scenarios import begin, cancelled, finish, finished, leaking, stop


def record_of_cancel() -> RequestRecord:
    return cancelled(Book(), "sg-a").record()


def test_every_entry_and_every_mark_is_one_row_in_the_order_of_time() -> None:
    record = record_of_cancel()
    rows = timeline(record)
    assert len(rows) == len(record.entries) + len(record.marks)
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert [row.sequence for row in rows if row.sequence is not None] == list(range(len(record.entries)))
    assert {row.ledger for row in rows if row.kind != "mark"} == {ledger.label for ledger in Ledger}
    assert all(row.since_open_seconds == row.at - record.opened_at for row in rows)


def test_a_mark_stands_before_the_entries_of_its_instant() -> None:
    rows = timeline(record_of_cancel())
    mark = next(number for number, row in enumerate(rows) if row.kind == "mark")
    assert rows[mark].at == rows[mark + 1].at
    assert rows[mark - 1].at < rows[mark].at
    assert (rows[mark].ledger, rows[mark].amount, rows[mark].sequence) == ("", None, None)


def test_a_row_says_what_moved_how_much_and_how_we_know() -> None:
    record = record_of_cancel()
    rows = {(row.ledger, row.what): row for row in timeline(record)}
    due = rows["kv", "held → pool, due within 5.00 s"]
    assert (due.amount, due.unit, due.evidence, due.kind, due.note) == (
        13,
        "blocks",
        "",
        "pending",
        "blocks to come back",
    )
    came = rows["kv", f"held → pool, as due #{due.sequence}"]
    assert (came.kind, came.evidence) == ("resolved", "probe")
    assert came.late_seconds == pytest.approx(0.0015)
    assert rows["output", "in_flight → discarded"].amount == 3


def test_every_kind_of_entry_has_its_words() -> None:
    book = Book()
    request = begin(book, "sg-a", 0.0)
    request.post(Account.LINK_STOPS, Account.LINK_AWAITING, 4, 1.0)
    voided = request.pend(Account.LINK_AWAITING, Account.LINK_ACKNOWLEDGED, 1, 1.0, 2.0)
    request.void(voided.sequence, 1.5)
    overdue = request.pend(Account.LINK_AWAITING, Account.LINK_ACKNOWLEDGED, 2, 1.5, 2.0)
    book.expire(request, 3.0)
    late = request.resolve(overdue.sequence, 4.0, 1)
    wrong = request.post(Account.KV_POOL, Account.KV_HELD, 1, 4.0)
    request.correct(wrong.sequence, 4.0, "never was")
    book.write_off(request, 5.0, "enough")
    words = [row.what for row in timeline(request.record())]
    assert f"awaiting → acknowledged, no longer due #{voided.sequence}" in words
    assert f"awaiting → acknowledged, OVERDUE #{overdue.sequence}" in words
    assert f"awaiting → acknowledged, LATE #{late.refers_to}" in words
    assert f"held → pool, corrects #{wrong.sequence}" in words
    assert "awaiting → written_off, given up" in words


def test_the_four_steps_and_the_ack_have_durations_since_the_stop_and_since_each_other() -> None:
    record = record_of_cancel()
    assert record.stop is not None
    steps = stop_steps(record.stop)
    assert [step.name for step in steps] == ["notify", "ack", "in-flight output", "release", "settle"]
    assert [round((step.after_seconds or 0) * 1e6) for step in steps] == [200, 12_000, 13_000, 20_000, 21_000]
    assert [round((step.took_seconds or 0) * 1e6) for step in steps] == [200, 11_800, 1000, 7000, 1000]


def test_a_step_that_has_not_happened_has_no_numbers_and_one_out_of_order_took_nothing() -> None:
    summary = StopSummary(
        semantics="cancel", source="client", reason="", observed_at=10.0, notified_at=10.5, output_settled_at=10.2
    )
    steps = stop_steps(summary)
    assert [step.name for step in steps] == ["notify", "in-flight output", "release", "settle"]
    assert [step.took_seconds for step in steps] == [0.5, 0.0, None, None]
    assert [step.at for step in steps] == [10.5, 10.2, None, None]


def test_the_verdict_of_a_normal_finish() -> None:
    ending = verdict(finished(Book(), "sg-a").record())
    assert ending.good
    assert (ending.word, ending.text) == (
        "SETTLED",
        "finished and settled in 1.50 s, 32 tokens delivered, all five ledgers closed",
    )


def test_the_verdict_of_a_confirmed_cancel() -> None:
    ending = verdict(record_of_cancel())
    assert ending.good
    assert ending.text == (
        "cancel confirmed (evidence: probe), settled 21.0 ms after it was observed; 3 tokens computed for nobody; "
        "safe to retry: yes"
    )


def test_a_stop_that_came_after_the_end_changed_nothing() -> None:
    request = begin(Book(), "sg-a", 0.0)
    request.stop = StopSummary(semantics="finish", source="", reason="", observed_at=1.0, outcome="raced_finish")
    request.closed_at = 2.0
    assert verdict(request.record()).text.endswith("a stop came after its end and changed nothing")


@pytest.mark.parametrize(("outcome", "word"), [("unconfirmed", "UNCONFIRMED"), ("failed", "FAILED")])
def test_a_stop_without_evidence_is_not_called_good(outcome: str, word: str) -> None:
    book = Book()
    request = begin(book, "sg-a", 0.0)
    request.stop = StopSummary(semantics="cancel", source="", reason="", observed_at=1.0, outcome=outcome)
    ending = verdict(finish(book, request, 2.0).record())
    assert (ending.word, ending.good) == (word, False)
    assert "without evidence" in ending.text


def test_a_leak_is_a_leak_while_it_is_open_when_it_came_late_and_when_it_was_given_up() -> None:
    book = Book()
    request, _ = leaking(book, "sg-a", 0.0)
    assert verdict(request.record()).word == "LEAK"
    assert verdict(request.record()).text == "overdue and not come back: kv.held 13 blocks"
    request.leave(Account.KV_HELD, Account.KV_POOL, 13, 8.0, Evidence.PROBE)
    assert book.settle(request, 8.0)
    late = verdict(request.record())
    assert (late.word, late.good) == ("SETTLED LATE", False)

    given_up, _ = leaking(book, "sg-b", 0.0)
    book.write_off(given_up, 9.0, "enough")
    assert verdict(given_up.record()).text == "never settled; given up on: kv.held 13 blocks"
    never_due = begin(book, "sg-c", 0.0)
    book.write_off(never_due, 9.0, "enough")
    assert "queue.running 1 place" in verdict(never_due.record()).text
    assert not verdict(never_due.record()).good


def test_open_books_say_what_is_open_and_abandoned_ones_are_not_good() -> None:
    book = Book()
    request = begin(book, "sg-a", 0.0)
    assert verdict(request.record()).text.startswith("running; open: queue (running 1 place)")
    stop(request, 1.0)
    record = request.record()
    assert set(open_ledgers(record)) == {Ledger.QUEUE, Ledger.KV, Ledger.OUTPUT, Ledger.LINK}
    assert describe_open(record) == (
        "queue (running 1 place), kv (claimed 1 claim, held 13 blocks), output (in_flight 3 tokens), "
        "link (awaiting 1 notice)"
    )
    assert verdict(record).text.startswith("cancel in progress; open: queue")
    abandoned = verdict(record, abandoned=True)
    assert (abandoned.word, abandoned.good) == ("ABANDONED", False)
    empty = book.open("sg-b", 0.0, engine="e", model="m").record()
    assert "all five ledgers were closed" in verdict(empty, abandoned=True).text
    assert "nothing, about to settle" in verdict(empty).text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0000849, "84.9 µs"),
        (0.00099949, "999 µs"),
        (0.00099951, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (-0.0123, "-12.3 ms"),
        (0.99951, "1.00 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3661.0, "1 h 1 min"),
    ],
)
def test_durations_have_three_digits_and_a_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
