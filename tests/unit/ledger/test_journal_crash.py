"""kill -9 in the middle of writes, in a real process: what was flushed is there, and what may be missing is said."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from stopguard.ledger import Account, Book
from stopguard.ledger.journal import Journal
from stopguard.ledger.journal_lock import LockNote, lock_path
from stopguard.ledger.journal_reader import JournalReader
from stopguard.ledger.journal_recovery import clock_time
from tests.unit.ledger.journal_scenarios import Clock, begin

ROOT = Path(__file__).resolve().parents[3]
FLUSH_SECONDS = 0.02


def run_and_kill(path: Path, lines: int) -> tuple[dict[str, dict[str, float]], int]:
    """Start a victim, kill it after it has said `lines` lines; return when it said what of which id, and its pid."""
    times: dict[str, dict[str, float]] = {"open": {}, "opened": {}, "settle": {}, "settled": {}}
    victim = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.ledger.journal_victim", path, str(FLUSH_SECONDS)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with victim:
        assert victim.stdout is not None
        said = [victim.stdout.readline() for _ in range(lines)]
        victim.kill()
        said += victim.stdout.readlines()
    for line in said:
        if not line.endswith("\n"):
            break  # the last words
        word, request_id, at = line.split()
        if word != "start":
            times[word][request_id] = float(at)
    assert len(said) >= lines
    return times, victim.pid


@pytest.mark.slow
@pytest.mark.parametrize("lines", [2, 300, 1400, 3000, 6000])
def test_a_killed_writer_loses_only_what_came_after_its_last_flush_and_that_is_said(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "j"
    times, pid = run_and_kill(path, lines)

    with JournalReader(path) as reader:
        run = reader.runs()[0]
        assert (run.pid, run.closed_at, reader.writer_pid()) == (pid, None, None)
        said = f"entries after {clock_time(run.last_flush_at)}, up to the flush interval of 0.02 s, may be missing"
        assert reader.blind_window() == said
        still_open = {found.record.request_id: found for found in reader.open_books()}
        kept = {found.record.request_id: found for found in reader.recent(10_000)}
    assert not still_open.keys() & kept.keys()

    due = {request_id for request_id, at in times["settled"].items() if at < run.last_flush_at}
    assert due <= kept.keys()
    assert kept.keys() <= times["settle"].keys()
    due_open = {request_id for request_id, at in times["opened"].items() if at < run.last_flush_at}
    assert due_open - times["settle"].keys() <= still_open.keys()
    assert still_open.keys() <= times["open"].keys()
    if lines > 1000:
        assert due
        assert due_open - times["settle"].keys()
    for found in [*kept.values(), *still_open.values()]:
        open_amounts = {
            account for account, amount in found.record.balances().items() if account < Account.QUEUE_ARRIVALS
        }
        assert bool(open_amounts) == (found.state == "abandoned")

    with Journal.open(path, flush_seconds=3600.0) as journal, JournalReader(path) as reader:
        assert {found.request_id for found in journal.recovered} == still_open.keys()
        assert journal.unclean_run is not None
        assert journal.unclean_run.blind_window() == said
        assert reader.open_books() == []
        abandoned = reader.abandoned(10_000)
        assert {found.record.request_id: found.record for found in abandoned} == {
            request_id: found.record for request_id, found in still_open.items()
        }
        assert all(found.run.pid == pid and found.run.blind_window() == said for found in abandoned)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.slow
def test_a_journal_that_is_killed_again_and_again_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "j"
    pids, left_open = [], 0
    for lines in (200, 350, 500):
        pids.append(run_and_kill(path, lines)[1])
        with JournalReader(path) as reader:
            left_open += len(reader.open_books())
    with Journal.open(path) as journal, JournalReader(path) as reader:
        assert journal.unclean_run is not None
        assert [run.pid for run in reader.runs()][1:] == pids[::-1]
        assert len(reader.abandoned(10_000)) == left_open


def test_a_writer_that_died_while_the_disk_failed_says_since_when(tmp_path: Path) -> None:
    """The row of the run could not be written; the note in the lock's file could."""
    path = tmp_path / "j"
    journal = Journal.open(path, flush_seconds=3600.0, wall_clock=Clock(1_700_000_000.0))
    journal.opened(begin(Book(), "sg-a", 1000.0))
    assert journal.flush()
    pid = journal._writer.start_of_run.pid
    # What kill -9 leaves: the files as they are now, in a folder of their own.
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for name in ("j", "j-wal"):
        (crashed / name).write_bytes((tmp_path / name).read_bytes())
    journal.close()
    note = LockNote(pid, 1_699_999_000.0)
    lock_path(crashed / "j").write_text(f'{{"pid":{note.pid},"failing_since":{note.failing_since}}}')

    words = f"entries after {clock_time(1_699_999_000.0)} may be missing: the disk had been failing since then"
    with JournalReader(crashed / "j") as reader:
        assert words in reader.blind_window()
    with Journal.open(crashed / "j") as journal, JournalReader(crashed / "j") as reader:
        assert journal.unclean_run is not None
        assert words in journal.unclean_run.blind_window()
        assert words in reader.find("sg-a").run.blind_window()
