"""The journal's far side: who may open the file, what a bad disk does, what is deleted, what a reader may not do."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from stopguard.errors import StorageError
from stopguard.ledger import Book
from stopguard.ledger.journal import Journal, JournalLimits
from stopguard.ledger.journal_errors import JournalBusy, JournalCorrupt, JournalFull, JournalMissing, JournalTooNew
from stopguard.ledger.journal_lock import JournalLock, LockNote, lock_path, read_note, writer_of
from stopguard.ledger.journal_reader import JournalReader
from stopguard.ledger.journal_schema import PAGE_BYTES, STEPS, VERSION, connect_for_writing, migrate
from tests.unit.ledger.journal_scenarios import Clock, begin, cancelled, finish, finished, stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEVER = 3600.0


def open_journal(path: Path, **options: Any) -> Journal:
    return Journal.open(path, **{"policy": "all", "flush_seconds": NEVER, **options})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stopguard.journal"


@pytest.fixture
def book() -> Book:
    return Book()


def fill(journal: Journal, book: Book, count: int, prefix: str = "sg-") -> None:
    for number in range(count):
        journal.settled(cancelled(book, f"{prefix}{number:05}"))
        if number % 1000 == 999:
            assert journal.flush()
    assert journal.flush()


def damage(path: Path, offset: int, length: int = 64) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        data = file.read(length)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in data))


# ---- one writer ---------------------------------------------------------------------------------------


def test_a_second_writer_is_told_the_pid_of_the_first(path: Path) -> None:
    with open_journal(path), pytest.raises(JournalBusy, match=f"in use by process {os.getpid()}") as caught:
        open_journal(path)
    assert caught.value.pid == os.getpid()
    with open_journal(path) as journal:  # let go at close
        assert writer_of(journal.path) == os.getpid()
    assert writer_of(path) is None


def test_a_writer_in_another_process_is_named_and_its_death_frees_the_file(path: Path) -> None:
    script = (
        "import sys; from stopguard.ledger.journal import Journal; journal = Journal.open(sys.argv[1]); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with JournalReader(path) as reader:
            assert reader.writer_pid() == child.pid
        with pytest.raises(JournalBusy, match=f"by process {child.pid}: one journal has one writer"):
            open_journal(path)
        child.kill()
    with open_journal(path) as journal:
        assert journal.unclean_run is not None
        assert journal.unclean_run.pid == child.pid


def test_a_reader_that_looks_for_a_writer_does_not_keep_one_out(path: Path) -> None:
    open_journal(path).close()
    with JournalReader(path) as reader:
        for _ in range(20):
            assert reader.writer_pid() is None
            open_journal(path, check=False).close()


def test_a_forked_child_does_not_hold_its_parents_lock(path: Path) -> None:
    lock = JournalLock(path)
    (from_child, to_parent), (from_parent, to_child) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:  # the child, as a worker would be
        os.close(to_child)
        os.write(to_parent, b"x")
        os.read(from_parent, 1)
        os._exit(0)
    os.read(from_child, 1)
    lock.release()
    assert writer_of(path) is None  # though the child is still there
    for descriptor in (from_child, to_parent, from_parent, to_child):
        os.close(descriptor)
    assert os.waitpid(child, 0) == (child, 0)


def test_a_lock_without_a_readable_note_still_locks(path: Path) -> None:
    assert read_note(path) is None
    lock = JournalLock(path)
    assert lock.previous is None
    lock_path(path).write_bytes(b"?" * 300)
    assert writer_of(path) == 0
    with pytest.raises(JournalBusy, match="in use by another program"):
        JournalLock(path)
    lock.release()
    lock.release()


@pytest.mark.slow
def test_another_program_that_holds_the_file_locked_is_busy(path: Path) -> None:
    open_journal(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(JournalBusy, match="something holds it locked"):
            open_journal(path)
        other.execute("ROLLBACK")
    open_journal(path).close()  # and the failed opening left neither lock nor thread


# ---- what is not a journal --------------------------------------------------------------------------------


def test_a_newer_schema_is_refused_by_writer_and_reader(path: Path) -> None:
    open_journal(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(JournalTooNew, match=f"schema {VERSION + 1}, this one knows {VERSION}"):
        open_journal(path)
    with pytest.raises(JournalTooNew):
        JournalReader(path)


def test_another_database_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE precious (x)")
    before = path.read_bytes()
    with pytest.raises(JournalCorrupt, match="not a journal of StopGuard"):
        open_journal(path)
    with pytest.raises(JournalCorrupt, match="not a journal"):
        JournalReader(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_text("notes, not a journal\n" * 300)
    with pytest.raises(JournalCorrupt, match="file is not a database"):
        open_journal(path)
    with pytest.raises(JournalCorrupt, match="file is not a database"):
        JournalReader(path)


def test_no_journal_no_folder_no_permission(path: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalMissing, match="there is no journal at"):
        JournalReader(path)
    with pytest.raises(StorageError, match="make the folder first"):
        open_journal(tmp_path / "absent" / "j")
    with pytest.raises(StorageError, match="Is a directory"):
        open_journal(tmp_path)
    path.touch()
    with pytest.raises(StorageError, match="is empty"):
        JournalReader(path)
    open_journal(path).close()  # an empty file is what a crash at the first start leaves
    assert path.stat().st_mode & 0o777 == 0o644 & path.stat().st_mode


def test_only_the_owner_reads_a_new_journal(path: Path, book: Book) -> None:
    with open_journal(path) as journal:
        fill(journal, book, 1)
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


def test_migration_goes_step_by_step_and_a_failing_step_changes_nothing(path: Path) -> None:
    with closing(connect_for_writing(path)) as connection:
        steps = (*STEPS, ("ALTER TABLE runs ADD COLUMN host TEXT",), ("CREATE TABLE hosts (host TEXT)", "not SQL"))
        with pytest.raises(sqlite3.OperationalError):
            migrate(connection, steps)
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION + 1,)
        assert connection.execute("SELECT host FROM runs").fetchall() == []
        assert connection.execute("SELECT * FROM sqlite_master WHERE name = 'hosts'").fetchall() == []
        assert migrate(connection, (*steps[:-1], ("CREATE TABLE hosts (host TEXT)",))) == VERSION + 1
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION + 2,)


def test_an_older_schema_is_for_the_writer_to_mend(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_journal(path).close()
    monkeypatch.setattr("stopguard.ledger.journal_schema.VERSION", VERSION + 1)
    with pytest.raises(StorageError, match=f"older StopGuard .schema {VERSION}"):
        JournalReader(path)


# ---- damage ---------------------------------------------------------------------------------------------


def test_a_corrupt_page_is_found_at_opening_and_by_a_reader(path: Path, book: Book) -> None:
    with open_journal(path) as journal:
        fill(journal, book, 400)
    pages = path.stat().st_size // PAGE_BYTES
    assert pages > 50
    for page in range(pages // 4, pages * 3 // 4):
        damage(path, page * PAGE_BYTES)
    with pytest.raises(JournalCorrupt, match=r"is damaged .*move it away"):
        open_journal(path)
    with JournalReader(path) as reader, pytest.raises(JournalCorrupt, match="damaged"):
        reader.recent(1000)
    shutil.move(path, path.with_suffix(".damaged"))
    open_journal(path).close()  # as the message says


def test_a_flipped_bit_in_a_record_is_not_a_fact(path: Path, book: Book) -> None:
    with open_journal(path) as journal:
        fill(journal, book, 3)
    where = path.read_bytes().index(b"client closed the connection")
    damage(path, where, 1)
    open_journal(path).close()  # SQLite has no checksums: to it the file is sound
    with JournalReader(path) as reader, pytest.raises(JournalCorrupt, match=r"sg-0000\d does not match its checksum"):
        reader.recent()


@pytest.mark.parametrize("with_log", [True, False])
def test_damage_met_while_running_is_reported_and_moving_the_file_away_mends_it(
    path: Path, book: Book, with_log: bool
) -> None:
    with open_journal(path) as journal:
        fill(journal, book, 300)
    with open_journal(path, check=False) as journal:
        for page in range(15, path.stat().st_size // PAGE_BYTES):  # behind the roots of the tables
            damage(path, page * PAGE_BYTES)
        waiting = begin(book, "sg-open", 1000.0)
        journal.opened(waiting)
        before = book.statistics()
        journal.settled(cancelled(book, "sg-zz"))
        assert not journal.flush()
        failing = journal.statistics().failing
        assert failing is not None
        assert "is damaged" in failing
        assert journal.statistics().backlog == 1
        assert book.statistics().settled == before.settled + 1
        book.verify()

        for file in (path, path.with_name(path.name + "-wal"))[: 1 + with_log]:
            file.rename(file.with_name(file.name + ".damaged"))
        assert journal.flush()
        assert journal.statistics().failing is None
        with JournalReader(path) as reader:
            assert reader.find("sg-zz").record.request_id == "sg-zz"
            assert [found.record.request_id for found in reader.open_books()] == ["sg-open"]


# ---- a full disk ------------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_survived_and_made_good(path: Path, book: Book) -> None:
    """The limit is SQLite's own, which answers as a full disk does."""
    wall, monotonic = Clock(1_700_000_000.0), Clock(1000.0)
    with open_journal(path, wall_clock=wall, monotonic_clock=monotonic) as journal:
        connection = journal._writer._connection
        assert connection is not None
        fill(journal, book, 10)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        requests = [cancelled(book, f"sg-more-{number:05}") for number in range(500)]
        for request in requests:
            journal.settled(request)
        totals = book.totals()
        wall.now += 60
        assert not journal.flush()
        counts = journal.statistics()
        assert counts.failing == str(JournalFull(path))
        assert (counts.failing_since, counts.backlog, counts.dropped) == (1_700_000_000.0, 500, {})
        assert read_note(path) == LockNote(os.getpid(), 1_700_000_000.0)
        assert book.totals() == totals
        book.verify()

        connection.execute("PRAGMA max_page_count = 1000000")
        assert journal.flush()
        counts = journal.statistics()
        assert (counts.failing, counts.failing_since, counts.backlog, counts.written) == (None, None, 0, 510)
        assert read_note(path) == LockNote(os.getpid(), None)
    with JournalReader(path) as reader:
        assert len(reader.recent(1000)) == 510
        assert reader.find("sg-more-00499").record == requests[-1].record()


def test_what_moved_while_the_disk_was_full_is_written_when_it_is_not(path: Path, book: Book) -> None:
    with open_journal(path) as journal, JournalReader(path) as reader:
        connection = journal._writer._connection
        assert connection is not None
        request = stop(begin(book, "sg-open", 1000.0), 1001.0)
        journal.opened(request)
        assert journal.flush()
        connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
        assert request.stop is not None
        request.stop.attempts = 7
        journal.progressed(request)
        fill_queue(journal, book, 100)
        assert not journal.flush()
        connection.execute("PRAGMA max_page_count = 100000")
        assert journal.flush()
        assert reader.open_books()[0].record == request.record()


def test_a_file_that_is_gone_is_begun_anew_with_what_is_open(path: Path, book: Book) -> None:
    with open_journal(path) as journal:
        request = begin(book, "sg-open", 1000.0)
        journal.opened(request)
        assert journal.flush()
        for file in path.parent.glob("stopguard.journal*"):
            if not file.name.endswith("-lock"):
                file.unlink()
        journal.settled(cancelled(book, "sg-after"))
        assert journal.flush()
        with JournalReader(path) as reader:
            assert [found.record for found in reader.open_books()] == [request.record()]
            assert [found.record.request_id for found in reader.recent()] == ["sg-after"]
            journal.settled(finish(book, request, 1002.0))
            assert journal.flush()
            assert reader.open_books() == []


def test_a_failing_disk_is_tried_again_with_growing_pauses(path: Path, book: Book) -> None:
    monotonic = Clock(1000.0)
    with open_journal(path, flush_seconds=0.25, monotonic_clock=monotonic) as journal:
        writer = journal._writer
        assert journal.flush()
        connection = writer._connection
        assert connection is not None
        connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
        fill_queue(journal, book, 200)
        assert not journal.flush()
        pauses = []
        for _ in range(7):
            pauses.append(writer._retry_at - monotonic.now)
            monotonic.now = writer._retry_at
            assert not journal.flush()
        assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
        connection.execute("PRAGMA max_page_count = 100000")
        assert journal.flush()


def fill_queue(journal: Journal, book: Book, count: int) -> None:
    for number in range(count):
        journal.settled(cancelled(book, f"sg-q-{number:05}"))


def test_the_backlog_is_bounded_and_lets_normal_finishes_go_before_stops(path: Path, book: Book) -> None:
    limits = JournalLimits(backlog_bytes=60_000)
    with open_journal(path, limits=limits) as journal:
        connection = journal._writer._connection
        assert connection is not None
        connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
        for number in range(40):
            journal.settled(cancelled(book, f"sg-stop-{number:03}"))
        for number in range(200):
            journal.settled(finished(book, f"sg-normal-{number:03}"))
        assert not journal.flush()
        counts = journal.statistics()
        assert counts.dropped == {"backlog full": 240 - counts.backlog}
        assert journal._writer.batch.row_bytes <= limits.backlog_bytes
        connection.execute("PRAGMA max_page_count = 100000")
        assert journal.flush()
        with JournalReader(path) as reader:
            assert len(reader.recent(1000, stops=True)) == 40
            assert sum(row.requests for row in reader.sums()) == 200  # sums take no room
            assert reader.runs()[0].dropped == counts.dropped["backlog full"]

        connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
        fill_queue(journal, book, 300)  # when only stops are left, the oldest of them go
        assert not journal.flush()
        assert journal._writer.batch.row_bytes <= limits.backlog_bytes
        assert journal._writer.batch.kept[-1][0] == "sg-q-00299"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for half a MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs; the limit of SQLite stands in for it above")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_really_full_disk(small_disk: Path, book: Book) -> None:
    path, filler = small_disk / "j", small_disk / "filler"
    requests = [cancelled(book, f"sg-{number:05}") for number in range(600)]
    with open_journal(path) as journal:
        for request in requests:
            journal.settled(request)
        assert not journal.flush()
        assert journal.statistics().failing == str(JournalFull(path))
        note = read_note(path)
        assert note is not None
        assert note.failing_since is not None
        assert journal.statistics().backlog == 600
        book.verify()
        subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
        assert journal.flush()
        assert journal.statistics().failing is None

        filler.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 8192))
        fill_queue(journal, book, 400)
        assert not journal.flush()
        filler.unlink()
        assert journal.flush()
    with JournalReader(path) as reader:
        assert len(reader.recent(10_000)) == 1000
        assert reader.find("sg-00599").record == requests[-1].record()


def test_opening_on_a_full_disk_says_so(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 4096))
    with pytest.raises(JournalFull, match="the disk is full; free some space"):
        open_journal(small_disk / "j")


# ---- retention --------------------------------------------------------------------------------------------


def test_what_is_too_old_is_deleted(path: Path, book: Book) -> None:
    wall = Clock(1_700_000_000.0)
    limits = JournalLimits(age_seconds=600.0)
    with open_journal(path, limits=limits, wall_clock=wall, monotonic_clock=Clock(1000.0)) as journal:
        fill(journal, book, 600)
        journal.settled(finished(book, "sg-normal"))
        wall.now += 300
        journal.settled(cancelled(book, "sg-newer", 1300.0))
        assert journal.flush()
        with JournalReader(path) as reader:
            assert len(reader.recent(1000)) == 602
            wall.now += 303.0
            journal.opened(begin(book, "sg-open", 1000.0))
            assert journal.flush()
            assert [found.record.request_id for found in reader.recent(1000)] == ["sg-newer"]
            wall.now += 60
            journal.opened(begin(book, "sg-other", 1000.0))
            assert journal.flush()
            assert reader.sums() == []
            assert len(reader.open_books()) == 2


def test_the_file_stays_below_its_size_and_the_oldest_go(path: Path, book: Book) -> None:
    limits = JournalLimits(file_bytes=400_000)
    with open_journal(path, limits=limits) as journal:
        sizes = []
        for turn in range(8):
            fill(journal, book, 500, f"sg-{turn}-")
            with closing(sqlite3.connect(path)) as other:
                used = "SELECT (SELECT * FROM pragma_page_count) - (SELECT * FROM pragma_freelist_count)"
                sizes.append(other.execute(used).fetchone()[0] * PAGE_BYTES)
        journal.opened(begin(book, "sg-open", 1000.0))
        assert journal.flush()
        # Deleting comes before inserting, so one flush's rows may stand above the limit until the next.
        one_flush = 500 * 1500
        assert max(sizes) <= limits.file_bytes + one_flush
        with JournalReader(path) as reader:
            kept = [found.record.request_id for found in reader.recent(10_000)]
        assert kept
        assert kept == [f"sg-7-{number:05}" for number in range(499, 499 - len(kept), -1)]
    assert path.stat().st_size <= limits.file_bytes + one_flush


def test_pages_that_are_not_needed_go_back_to_the_file_system(path: Path, book: Book) -> None:
    wall = Clock(1_700_000_000.0)
    limits = JournalLimits(age_seconds=10.0, file_bytes=8 * 2**20)
    with open_journal(path, limits=limits, wall_clock=wall) as journal:
        fill(journal, book, 3000)
        before = journal.statistics().file_bytes
        request = begin(book, "sg-open", 1000.0)
        journal.opened(request)
        for turn in range(12):
            wall.now += 20
            request.mark(1001.0 + turn, "still there")
            assert journal.flush()
    assert before > 800 * PAGE_BYTES
    assert path.stat().st_size < 320 * PAGE_BYTES


def test_only_leaks_and_sums_are_left_and_go_too(path: Path, book: Book) -> None:
    limits = JournalLimits(file_bytes=1)
    with open_journal(path, limits=limits, policy="stops") as journal:
        for number in range(3):
            journal.settled(finished(book, f"sg-{number}"))
            assert journal.flush()
        with JournalReader(path) as reader:
            assert sum(row.requests for row in reader.sums()) == 1


def test_runs_of_which_nothing_is_left_are_forgotten(path: Path, book: Book) -> None:
    for _ in range(5):
        open_journal(path).close()
    with open_journal(path) as journal, JournalReader(path) as reader:
        assert len(reader.runs()) == 2
        fill(journal, book, 1)
    for _ in range(5):
        open_journal(path).close()
    with JournalReader(path) as reader:
        assert len(reader.runs()) == 3
        assert reader.find("sg-00000").run.written == 1


def test_runs_that_died_are_remembered_a_while_and_a_crash_loop_does_not_fill_the_file(path: Path) -> None:
    def count(run_ends: str) -> int:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute(f"UPDATE runs SET closed_at = {run_ends}")
            counted: int = other.execute("SELECT count(*) FROM runs").fetchone()[0]
            return counted

    counts = []
    for _ in range(110):
        open_journal(path, check=False).close()
        counts.append(count("NULL"))
    assert counts[:3] == [1, 2, 3]
    assert max(counts) == counts[-1] == 102
    count("1.0")
    open_journal(path).close()
    assert count("1.0") == 2


def test_a_reader_that_holds_on_to_an_old_state_stops_the_log_from_growing_without_end(path: Path, book: Book) -> None:
    limits = JournalLimits(wal_bytes=200_000)
    with open_journal(path, limits=limits) as journal:
        fill(journal, book, 1)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM requests").fetchone()
            connection = journal._writer._connection
            assert connection is not None
            connection.execute("PRAGMA busy_timeout = 0")
            for turn in range(40):
                fill_queue_of(journal, book, turn)
                if not journal.flush():
                    break
            assert "held on to an old state" in (journal.statistics().failing or "")
            assert path.with_name(path.name + "-wal").stat().st_size < 2 * limits.wal_bytes
            other.execute("ROLLBACK")
        assert journal.flush()
        assert journal.statistics().dropped == {}


def fill_queue_of(journal: Journal, book: Book, turn: int) -> None:
    for number in range(20):
        journal.settled(cancelled(book, f"sg-{turn}-{number}"))


def test_a_bug_in_the_writer_is_said_and_the_thread_lives_on(path: Path, book: Book) -> None:
    with open_journal(path) as journal:
        journal._queue.append((2, None))  # type: ignore[arg-type]
        assert not journal.flush()
        assert "bug in the journal: AttributeError" in (journal.statistics().failing or "")
        journal.settled(cancelled(book, "sg-a"))
        assert journal.flush()
        assert journal.statistics().written == 1
