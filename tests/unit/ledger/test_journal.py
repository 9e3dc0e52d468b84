"""The journal's near side: what is handed over is found, at every policy; nothing is raised or lost in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stopguard.errors import ConfigurationError
from stopguard.ledger import Account, Book, Evidence, RequestLedgers, StopSummary, decode_record, encode_record
from stopguard.ledger.journal import Journal, JournalLimits, JournalPolicy
from stopguard.ledger.journal_errors import AmbiguousId, NotInJournal
from stopguard.ledger.journal_reader import JournalReader
from tests.unit.ledger.journal_scenarios import Clock, begin, cancelled, finish, finished, leaking, stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WALL, MONOTONIC = 1_700_000_000.0, 1000.0
NEVER = 3600.0


def open_journal(path: Path, policy: str | float = "all", **limits: float) -> Journal:
    """A journal that flushes only when it is told to, and whose clocks stand still."""
    return Journal.open(
        path,
        policy=policy,
        limits=JournalLimits(**limits),  # type: ignore[arg-type]
        flush_seconds=NEVER,
        wall_clock=Clock(WALL),
        monotonic_clock=Clock(MONOTONIC),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stopguard.journal"


@pytest.fixture
def book() -> Book:
    return Book()


def test_a_settled_request_is_read_back_as_it_was(path: Path, book: Book) -> None:
    request = cancelled(book, "sg-a")
    with open_journal(path) as journal:
        journal.opened(request)
        journal.settled(request)
    with JournalReader(path) as reader:
        found = reader.find("sg-a")
    assert found.record == request.record()
    assert (found.state, found.kind) == ("settled", "cancel")
    assert found.run.wall(request.opened_at) == WALL


@pytest.mark.parametrize(("policy", "kept"), [("all", 40), ("stops", 0), ("0.5", 24), (0.0, 0), (1, 40)])
def test_the_policy_says_which_normal_finishes_are_kept_and_stops_always_are(
    path: Path, book: Book, policy: str | float, kept: int
) -> None:
    with open_journal(path, policy) as journal:
        for number in range(40):
            journal.settled(finished(book, f"sg-{number:04}"))
        journal.settled(cancelled(book, "sg-stop"))
        journal.settled(preempted(book, "sg-preempted"))
        assert journal.flush()
        assert journal.statistics().written == kept + 2
    with JournalReader(path) as reader:
        requests = reader.recent(100)
        assert sum(found.kind == "" for found in requests) == kept
        assert {found.record.request_id: found.kind for found in requests if found.kind} == {
            "sg-stop": "cancel",
            "sg-preempted": "preempt",
        }
        assert [found.record.request_id for found in reader.recent(100, stops=True)] == ["sg-preempted", "sg-stop"]
        assert sum(row.requests for row in reader.sums()) == 40


def preempted(book: Book, request_id: str) -> RequestLedgers:
    request = begin(book, request_id, 1000.0)
    request.post(Account.QUEUE_RUNNING, Account.QUEUE_PREEMPTED, 1, 1000.1)
    request.post(Account.QUEUE_PREEMPTED, Account.QUEUE_RUNNING, 1, 1000.2)
    return finish(book, request, 1001.0)


def test_the_sample_depends_on_the_id_alone_and_has_the_size_that_was_asked_for() -> None:
    ids = [f"sg-{number * 7919:024x}" for number in range(20_000)]
    for rate in (0.01, 0.3):
        first = [request_id for request_id in ids if JournalPolicy.parse(rate).samples(request_id)]
        assert first == [request_id for request_id in ids if JournalPolicy.parse(str(rate)).samples(request_id)]
        assert len(first) == pytest.approx(rate * len(ids), rel=0.15)
    one_percent = {i for i in ids if JournalPolicy(0.01).samples(i)}
    assert one_percent < {i for i in ids if JournalPolicy(0.3).samples(i)}


@pytest.mark.parametrize("value", ["some", "-0.1", 1.5, "nan", ""])
def test_a_policy_that_means_nothing_is_refused(value: str | float) -> None:
    with pytest.raises(ConfigurationError, match="journal must be"):
        JournalPolicy.parse(value)


def test_impossible_settings_are_refused_and_leave_nothing_behind(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="file_bytes"):
        JournalLimits(file_bytes=0)
    with pytest.raises(ConfigurationError, match="interval"):
        Journal.open(path, flush_seconds=0)
    with pytest.raises(ConfigurationError):
        Journal.open(path, policy="x")
    assert list(path.parent.iterdir()) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["m", "n"]), st.integers(1, 500), st.integers(0, 300)),
        max_size=30,
    ),
    flush_every=st.integers(1, 7),
)
def test_sums_equal_what_was_handed_over(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[str, str, int, int]], flush_every: int
) -> None:
    book, path = Book(), tmp_path_factory.mktemp("sums") / "j"
    expected: dict[tuple[int, str, str], list[int]] = {}
    with open_journal(path, "stops") as journal:
        for number, (engine, model, tokens, second) in enumerate(requests):
            opened_at = MONOTONIC + second
            request = begin(book, f"sg-{number}", opened_at, engine=engine, model=model)
            finish(book, request, opened_at + 2.0, tokens=tokens)
            journal.settled(request)
            row = expected.setdefault((int((WALL + second + 2.0) // 60), engine, model), [0, 0])
            row[0] += 1
            row[1] += tokens
            if number % flush_every == 0:
                assert journal.flush()
    with JournalReader(path) as reader:
        rows = reader.sums()
    found = {(row.minute, row.engine, row.model): [row.requests, row.tokens_delivered] for row in rows}
    assert found == expected
    assert sum(row.tokens_computed for row in rows) == sum(tokens for _, _, tokens, _ in requests)
    assert sum(row.open_seconds for row in rows) == pytest.approx(2.0 * len(requests))


# ---- open books ------------------------------------------------------------------------------------


def test_what_opens_and_settles_between_two_flushes_never_touches_the_open_books(path: Path, book: Book) -> None:
    with open_journal(path, "stops") as journal:
        request = finished(book, "sg-a")
        journal.opened(request)
        journal.settled(request)
        assert journal.flush()
        with JournalReader(path) as reader:
            assert reader.runs()[0].written == 0  # neither a request nor an open book, only a sum
            assert len(reader.sums()) == 1


def test_open_books_are_written_once_updated_when_they_move_and_removed_when_they_settle(
    path: Path, book: Book
) -> None:
    with open_journal(path) as journal, JournalReader(path) as reader:
        request = begin(book, "sg-a", MONOTONIC)
        journal.opened(request)
        assert journal.flush()
        assert [found.record for found in reader.open_books()] == [request.record()]
        assert reader.runs()[0].written == 1
        assert journal.flush()
        assert reader.runs()[0].written == 1  # nothing moved: nothing written

        stop(request, MONOTONIC + 1)  # entries are found without a word from the caller
        assert journal.flush()
        assert [found.record for found in reader.open_books()] == [request.record()]
        assert reader.find("sg-a").state == "open"
        assert reader.find("sg-a").kind == "cancel"

        assert request.stop is not None
        request.stop.attempts = 2  # no entry, no mark: this is what `progressed` is for
        assert journal.flush()
        assert reader.open_books()[0].record != request.record()
        journal.progressed(request)
        assert journal.flush()
        assert reader.open_books()[0].record == request.record()

        request.mark(MONOTONIC + 2, "waiting for the ack")
        assert journal.flush()
        assert reader.open_books()[0].record == request.record()

        book.write_off(request, MONOTONIC + 9, "enough")
        journal.settled(request)
        assert journal.flush()
        assert reader.open_books() == []
        assert reader.find("sg-a").state == "written_off"
        assert journal.statistics().open_books == 0


def test_a_leak_is_on_the_disk_when_it_is_found(path: Path, book: Book) -> None:
    with open_journal(path, "stops") as journal, JournalReader(path) as reader:
        request, leaks = leaking(book, "sg-leak", MONOTONIC)
        journal.opened(request)
        for leak in leaks:
            journal.leaked(leak)
        assert journal.flush()
        assert [found.leak for found in reader.leaks()] == leaks
        assert reader.leaks()[0].found_at == WALL + 6.3
        assert reader.find("sg-leak").record.leaks == leaks
        assert journal.statistics().leaks_written == 1


def test_books_left_open_are_found_by_the_next_run_and_stay_found(path: Path, book: Book) -> None:
    with open_journal(path, "stops") as journal:
        journal.opened(begin(book, "sg-a", MONOTONIC))
        journal.opened(stop(begin(book, "sg-b", MONOTONIC), MONOTONIC + 1))
    for expected in (["sg-a", "sg-b"], []):
        with open_journal(path, "stops") as journal, JournalReader(path) as reader:
            assert [found.request_id for found in journal.recovered] == expected
            assert journal.unclean_run is None  # it was closed, with open books
            assert [found.record.request_id for found in reader.abandoned()] == ["sg-b", "sg-a"]
            assert reader.open_books() == []


# ---- limits ------------------------------------------------------------------------------------------


def test_a_full_queue_drops_and_counts_and_never_raises(path: Path, book: Book) -> None:
    requests = [cancelled(book, f"sg-{number}") for number in range(8)]
    leak = leaking(book, "sg-leak")[1][0]
    with open_journal(path, queued=5) as journal:
        journal._writer.wake = lambda: None  # type: ignore[method-assign]  # the writer is slow
        for request in requests:
            journal.settled(request)
        journal.leaked(leak)
        journal.opened(begin(book, "sg-open", MONOTONIC))
        assert journal.statistics().queued == 5
        assert journal.statistics().dropped == {"queue full": 4, "open book not noted": 1}
        assert journal.flush()
        assert journal.statistics().written == 5
    with JournalReader(path) as reader:
        assert reader.runs()[0].dropped == 4
        assert len(reader.recent(100)) == 5


def test_a_settling_that_found_the_queue_full_is_not_lost_when_its_books_are_known(path: Path, book: Book) -> None:
    with open_journal(path, queued=1) as journal, JournalReader(path) as reader:
        request = begin(book, "sg-a", MONOTONIC)
        journal.opened(request)
        assert journal.flush()
        journal.opened(begin(book, "sg-b", MONOTONIC))
        finish(book, request, MONOTONIC + 1)
        journal.settled(request)  # refused
        assert journal.statistics().dropped == {"queue full": 1}
        for _ in range(3):
            assert journal.flush()
        assert journal.statistics().dropped == {}
        assert reader.find("sg-a").record == request.record()
        assert [found.record.request_id for found in reader.open_books()] == ["sg-b"]


def test_more_open_books_than_the_limit_are_counted_and_still_written_when_they_settle(path: Path, book: Book) -> None:
    with open_journal(path, open_books=1) as journal, JournalReader(path) as reader:
        first, second = begin(book, "sg-a", MONOTONIC), begin(book, "sg-b", MONOTONIC)
        journal.opened(first)
        journal.opened(second)
        assert journal.flush()
        assert journal.statistics().dropped == {"open book not noted": 1}
        journal.settled(finish(book, second, MONOTONIC + 1))
        journal.settled(finish(book, first, MONOTONIC + 1))
        assert journal.flush()
        assert len(reader.recent()) == 2


def test_a_request_whose_opening_was_not_noted_is_noted_when_it_progresses(path: Path, book: Book) -> None:
    with open_journal(path) as journal, JournalReader(path) as reader:
        request = begin(book, "sg-a", MONOTONIC)
        journal.progressed(request)
        assert journal.flush()
        assert len(reader.open_books()) == 1
        journal.settled(finish(book, request, MONOTONIC + 1))
        journal.progressed(request)
        assert journal.flush()
        assert reader.open_books() == []
        assert journal.statistics().open_books == 0


def test_what_cannot_be_encoded_is_counted_and_stops_nothing_else(path: Path, book: Book) -> None:
    odd, huge, large, good = (begin(book, f"sg-{name}", MONOTONIC) for name in ("odd", "huge", "large", "good"))
    odd.labels = {"tenant": "half a character \ud800"}
    huge.tokens_recomputed = 1 << 70
    large.mark(MONOTONIC + 1, "x" * 3000)
    with open_journal(path, record_bytes=2000) as journal, JournalReader(path) as reader:
        for request in (odd, huge, large, good):
            journal.opened(request)
        assert journal.flush()
        assert [found.record.request_id for found in reader.open_books()] == ["sg-good"]
        for request in (odd, huge, large, good):
            journal.settled(finish(book, request, MONOTONIC + 2))
        assert journal.flush()
        assert [found.record.request_id for found in reader.recent()] == ["sg-good"]
        # Each once as open books and once as closed ones; what is too large for a sum is counted for that too.
        assert journal.statistics().dropped == {"cannot be encoded": 5, "record too large": 2}
        assert sum(row.requests for row in reader.sums()) == 3


def test_the_sums_have_a_limit(path: Path, book: Book) -> None:
    with open_journal(path, "stops", sums=2) as journal, JournalReader(path) as reader:
        for model in ("a", "b", "c"):
            journal.settled(finished(book, f"sg-{model}", model=model))
        assert journal.flush()
        assert journal.statistics().dropped == {"too many sums": 1}
        assert len(reader.sums()) == 2


def test_closing_twice_is_once_and_what_comes_after_is_counted(path: Path, book: Book) -> None:
    journal = open_journal(path)
    journal.settled(cancelled(book, "sg-a"))
    assert "queued 1" in repr(journal)
    assert journal.close()
    assert journal.close()
    assert not journal.flush()
    journal.settled(cancelled(book, "sg-b"))
    counts = journal.statistics()
    assert counts.dropped == {"handed over after close": 1}
    assert (counts.written, counts.failing, counts.queued, counts.last_flush_at) == (1, None, 0, WALL)
    assert counts.file_bytes > 0
    with JournalReader(path) as reader:
        assert reader.runs()[0].closed_at == WALL
        assert reader.blind_window() == ""
        assert len(reader.recent()) == 1


def test_the_writer_flushes_by_itself(path: Path, book: Book) -> None:
    with Journal.open(path, policy="all", flush_seconds=0.001) as journal:
        journal.settled(cancelled(book, "sg-a"))
        with journal._writer._condition:
            journal._writer._condition.wait_for(lambda: journal._writer.written == 1, 5.0)
        assert journal.statistics().written == 1


def test_a_queue_half_full_wakes_the_writer(path: Path, book: Book) -> None:
    with open_journal(path, queued=4) as journal:
        for number in range(2):
            journal.settled(cancelled(book, f"sg-{number}"))
        with journal._writer._condition:
            journal._writer._condition.wait_for(lambda: journal._writer.written == 2, 5.0)
        assert journal.statistics().written == 2


# ---- finding -----------------------------------------------------------------------------------------


def test_an_id_is_found_by_its_beginning_when_only_one_begins_so(path: Path, book: Book) -> None:
    with open_journal(path) as journal, JournalReader(path) as reader:
        for request_id in ("sg-aa1", "sg-aa2", "sg-ab", "sg-%_"):
            journal.settled(finished(book, request_id))
        journal.opened(begin(book, "sg-ac", MONOTONIC))
        journal.opened(begin(book, "sg-a", MONOTONIC))
        assert journal.flush()
        assert reader.find("sg-ab").record.request_id == "sg-ab"
        assert reader.find("sg-ac").state == "open"
        assert reader.find("sg-a").record.request_id == "sg-a"  # exact beats the beginning of others
        with pytest.raises(AmbiguousId, match="sg-aa1, sg-aa2;"):
            reader.find("sg-aa")
        with pytest.raises(AmbiguousId, match="…"):
            reader.find("sg-")
        with pytest.raises(NotInJournal, match=r"begins with sg-z$"):
            reader.find("sg-z")
        with pytest.raises(NotInJournal):
            reader.find("sg-_")


@pytest.mark.parametrize(("policy", "words"), [("stops", "only sums"), ("0.25", "a share of 0.25")])
def test_an_unknown_id_is_told_what_the_journal_keeps(path: Path, policy: str, words: str) -> None:
    with open_journal(path, policy), JournalReader(path) as reader, pytest.raises(NotInJournal, match=words):
        reader.find("sg-z")


# ---- round trip ----------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
instants = st.floats(1000.0, 2000.0)


@st.composite
def books(draw: st.DrawFn) -> RequestLedgers:
    """A request to which anything legal may have happened, settled or written off in the end."""
    book = Book()
    at = 1000.0
    request = book.open(draw(st.text("0123456789abcdef", min_size=1, max_size=8)), at, engine="e", model=draw(texts))
    for step in draw(st.lists(st.integers(0, 5), max_size=12)):
        at += draw(st.floats(0.0, 1.0))
        note, evidence = draw(texts), draw(st.sampled_from(Evidence))
        match step:
            case 0:
                request.post(Account.KV_POOL, Account.KV_HELD, draw(st.integers(1, 2**40)), at, evidence, note)
            case 1 if request.balances[Account.KV_HELD]:
                request.leave(Account.KV_HELD, Account.KV_POOL, 1, at, evidence, note, draw(instants))
            case 2:
                request.post(Account.LINK_STOPS, Account.LINK_AWAITING, 1, at, evidence)
                request.pend(
                    Account.LINK_AWAITING, Account.LINK_ACKNOWLEDGED, 1, at, at + draw(st.floats(0, 1)), note=note
                )
            case 3:
                request.tokens_computed += 5
                request.tokens_delivered += 3
                request.fold(at)
            case 4:
                book.expire(request, at)
            case _:
                request.mark(at, note)
    if draw(st.booleans()):
        request.labels = draw(st.dictionaries(texts, texts, max_size=3))
    if draw(st.booleans()):
        request.stop = StopSummary(
            semantics=draw(st.sampled_from(["cancel", "preempt", "finish", "fail"])),
            source=draw(texts),
            reason=draw(texts),
            observed_at=draw(instants),
            outcome=draw(st.sampled_from(["pending", "confirmed", "unconfirmed", "raced_finish", "failed"])),
            evidence=draw(st.sampled_from(Evidence)),
            acked_at=draw(st.none() | instants),
        )
    if not book.settle(request, at + 1):
        book.write_off(request, at + 1, draw(texts))
    return request


@pytest.fixture(scope="module")
def round_trip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Journal, JournalReader]]:
    path = tmp_path_factory.mktemp("round-trip") / "j"
    with open_journal(path) as journal, JournalReader(path) as reader:
        yield journal, reader


@given(request=books())
def test_every_record_survives_the_journal(round_trip: tuple[Journal, JournalReader], request: RequestLedgers) -> None:
    journal, reader = round_trip
    expected = request.record()
    request.verify()
    assert decode_record(encode_record(expected)) == expected
    journal.settled(request)
    assert journal.flush()
    found = reader.recent(1)[0]
    assert found.record == expected
    assert reader.find(request.request_id).record == expected
    assert found.record.balances() == {
        account: amount for account, amount in zip(Account, request.balances, strict=True) if amount
    }
