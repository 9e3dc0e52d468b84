"""`stopguard explain`: what people and programs read, in a terminal, in a pipe, and when there is nothing to read."""

from __future__ import annotations

import io
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from stopguard.cli import explain, main
from stopguard.ledger import Book
from stopguard.ledger.journal import Journal
from tests.unit.ledger.journal_scenarios import Clock, begin, cancelled, finished, leaking, stop

if TYPE_CHECKING:
    from pathlib import Path

WALL, MONOTONIC = 1_700_000_000.25, 1000.0


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("STOPGUARD_JOURNAL", raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal that its writer closed: a finish, a cancel, a leak given up, and two books left open."""
    path, book = tmp_path / "stopguard.journal", Book()
    with Journal.open(
        path, policy="all", flush_seconds=3600.0, wall_clock=Clock(WALL), monotonic_clock=Clock(MONOTONIC)
    ) as journal:
        journal.settled(finished(book, "sg-finished"))
        journal.settled(cancelled(book, "sg-cancelled"))
        request, leaks = leaking(book, "sg-leaking")
        for leak in leaks:
            journal.leaked(leak)
        book.write_off(request, MONOTONIC + 9, "given up")
        journal.settled(request)
        journal.opened(stop(begin(book, "sg-open-1", MONOTONIC), MONOTONIC + 1))
        journal.opened(begin(book, "sg-open-2", MONOTONIC))
    return path


def run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", "--journal", str(path), *arguments], prog_name="stopguard")


def text_of(result: Result) -> str:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def document_of(result: Result) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text_of(result))
    assert document["schema_version"] == 1
    return document


def test_a_cancel_as_a_person_reads_it(path: Path) -> None:
    lines = text_of(run(path, "sg-cancelled")).splitlines()
    assert lines[0] == "sg-cancelled  local, small"
    assert lines[1] == "opened 2023-11-14 22:13:20.250, closed after 821 ms"
    assert lines[2] == "labels tenant=blue"
    assert lines[4].split() == ["time", "ms", "ledger", "what", "amount", "evidence"]
    assert lines[5].split() == ["22:13:20.250", "+0.000", "stream", "clients", "→", "connected", "1", "connection"]
    assert "22:13:21.050  +800.000  ·       cancel observed: end of file on the client's socket" in lines
    released = next(line for line in lines if "held → pool, as due" in line)
    assert released.split()[:3] == ["22:13:21.070", "+820.000", "kv"]
    assert released.endswith("13 blocks  probe")
    assert "happened 1.50 ms before" in released
    steps = [line.split("  ") for line in lines if line.startswith(("notify", "ack", "in-flight", "release", "settle"))]
    assert [step[0] for step in steps] == ["notify", "ack", "in-flight output", "release", "settle"]
    assert steps[3][-2:] == ["20.0 ms", "7.00 ms"]
    assert lines[-2] == "outcome  confirmed (probe) after 1 attempt"
    assert lines[-1].startswith("SETTLED: cancel confirmed (evidence: probe), settled 21.0 ms after it was observed")


def test_in_a_pipe_there_is_no_colour_no_padding_and_no_wrapping(path: Path) -> None:
    text = text_of(run(path, "sg-cancelled"))
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert sum(line.endswith("  1 notice  sent") for line in text.splitlines()) == 1
    assert max(map(len, text.splitlines())) > 120


def test_an_id_may_be_shortened_while_it_is_unique(path: Path) -> None:
    assert text_of(run(path, "sg-c")).startswith("sg-cancelled")
    result = run(path, "sg-open")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "stopguard: several requests begin with sg-open: sg-open-1, sg-open-2; give more of the id\n"
    )


def test_an_unknown_id_is_one_line_and_exit_code_1(path: Path) -> None:
    result = run(path, "sg-nobody")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"stopguard: no request in {path} begins with sg-nobody\n"


def test_no_journal_is_one_line_that_says_how_to_name_one(tmp_path: Path) -> None:
    result = run(tmp_path / "absent", "sg-a")
    assert result.exit_code == 2
    assert result.stderr == (
        f"stopguard: there is no journal at {tmp_path / 'absent'}: name one with --journal or STOPGUARD_JOURNAL\n"
    )


def test_the_journal_is_named_by_the_environment_or_stands_in_the_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    assert "sg-finished" in CliRunner().invoke(main, ["explain", "sg-f"]).stdout
    monkeypatch.chdir("/")
    monkeypatch.setenv("STOPGUARD_JOURNAL", str(path))
    assert "sg-finished" in CliRunner().invoke(main, ["explain", "sg-f"]).stdout


def test_a_leak_has_a_name_a_size_an_age_and_what_opened_it(path: Path) -> None:
    text = text_of(run(path, "sg-leaking"))
    assert (
        "LEAK     kv.held 13 blocks of sg-leaking (local, small), open for 5.500 s since entry 8 "
        "(kv: pool → held 13 blocks (probe)), found 500 ms after it was due\n"
    ) in text
    assert "release                 not seen\n" in text
    assert text.endswith("WRITTEN OFF: never settled; given up on: kv.held 13 blocks\n")
    listed = text_of(run(path, "--leaks")).splitlines()
    assert listed[1].split()[:3] == ["11-14", "22:13:26", "sg-leaking"]
    assert "kv.held  13 blocks  5.50 s  entry 8: kv: pool → held 13 blocks (probe)" in listed[1]


def test_a_book_left_open_says_what_is_not_known(path: Path) -> None:
    text = text_of(run(path, "sg-open-1"))
    assert "ABANDONED: its process ended before it settled; open at its last flush: queue (running 1 place)" in text
    assert f"its books are here up to 22:13:20.250; process {os.getpid()} ended without closing them" in text
    assert any(line.split() == ["release", "not", "seen"] for line in text.splitlines())


def test_a_book_of_a_living_writer_is_open(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal.open(path, flush_seconds=3600.0, wall_clock=Clock(WALL), monotonic_clock=Clock(MONOTONIC)) as journal:
        journal.opened(begin(Book(), "sg-a", MONOTONIC))
        assert journal.flush()
        text = text_of(run(path, "sg-a"))
        assert "OPEN: running; open: queue (running 1 place)" in text
        assert f"process {os.getpid()} is still writing" in text
        assert "sg-a" in text_of(run(path, "--open"))


def test_lists(path: Path) -> None:
    def ids(*arguments: str) -> list[str]:
        return [line.split()[2] for line in text_of(run(path, *arguments)).splitlines()[1:] if "sg-" in line]

    assert ids() == ids("--last") == ["sg-leaking", "sg-cancelled", "sg-finished"]
    assert ids("--last", "1") == ["sg-leaking"]
    assert ids("--stops") == ["sg-leaking", "sg-cancelled"]
    assert ids("--stops", "--last", "1") == ["sg-leaking"]
    assert ids("--open") == ["sg-open-1", "sg-open-2"]


def test_open_books_of_a_killed_writer_come_with_the_blind_window(path: Path, tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    with Journal.open(path, flush_seconds=0.25, wall_clock=Clock(WALL), monotonic_clock=Clock(MONOTONIC)) as journal:
        journal.opened(begin(Book(), "sg-a", MONOTONIC))
        assert journal.flush()
        for name in (path.name, path.name + "-wal"):
            (crashed / name).write_bytes((path.parent / name).read_bytes())
    text = text_of(run(crashed / path.name, "--open"))
    assert text.splitlines()[-1] == "entries after 22:13:20.250, up to the flush interval of 0.25 s, may be missing"
    assert len(text.splitlines()) == 5  # and the two that the run before it left
    assert text_of(run(crashed / path.name, "sg-a")).splitlines()[-1] == text.splitlines()[-1]


def test_empty_lists_say_so(tmp_path: Path) -> None:
    Journal.open(tmp_path / "j").close()
    for arguments, words in (
        ([], "no requests kept last"),
        (["--stops"], "no stops, failures and leaks"),
        (["--leaks"], "no leaks"),
        (["--open"], "no open requests"),
    ):
        assert text_of(run(tmp_path / "j", *arguments)) == f"{words}\n"


@pytest.mark.parametrize("arguments", [("sg-a", "--leaks"), ("sg-a", "--last"), ("--stops", "--open"), ("--last", "0")])
def test_what_contradicts_itself_is_wrong_usage(path: Path, arguments: tuple[str, ...]) -> None:
    result = run(path, *arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_json_of_one_request(path: Path) -> None:
    request = document_of(run(path, "sg-cancelled", "--format", "json"))["request"]
    assert (request["request_id"], request["state"], request["kind"]) == ("sg-cancelled", "settled", "cancel")
    assert request["opened"] == "2023-11-14T22:13:20.250000+00:00"
    assert request["verdict"]["good"] is True
    assert request["stop"]["evidence"] == "probe"
    assert request["stop"]["steps"][0]["name"] == "notify"
    assert len(request["timeline"]) == 20
    assert request["balances"]["output.discarded"] == 3
    assert sum(amount for name, amount in request["balances"].items() if name.startswith("output.")) == 0
    assert request["run"]["pid"] == os.getpid()
    leak = document_of(run(path, "sg-leaking", "--format", "json"))["request"]["leaks"][0]
    assert (leak["account"], leak["amount"], leak["unit"], leak["age_seconds"]) == ("held", 13, "blocks", 5.5)


def test_json_of_lists(path: Path) -> None:
    document = document_of(run(path, "--format", "json"))
    assert [request["request_id"] for request in document["requests"]] == ["sg-leaking", "sg-cancelled", "sg-finished"]
    leaks = document_of(run(path, "--leaks", "--format", "json"))["leaks"]
    assert [leak["request_id"] for leak in leaks] == ["sg-leaking"]
    assert document_of(run(path, "--open", "--format", "json"))["requests"][0]["cautions"]


def on_terminal(path: Path, monkeypatch: pytest.MonkeyPatch, width: int, *arguments: str) -> str:
    monkeypatch.setattr(
        explain,
        "_console",
        lambda: Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, color_system="standard"),
    )
    return CliRunner().invoke(main, ["explain", "--journal", str(path), *arguments], color=True).stdout


@pytest.mark.parametrize("width", [80, 120, 220])
def test_on_a_terminal_nothing_is_wider_than_it(path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    for arguments in (["sg-leaking"], ["sg-cancelled"], ["--last"], ["--open"]):
        text = on_terminal(path, monkeypatch, width, *arguments)
        assert "\x1b[" in text
        plain = "".join(part.partition("m")[2] for part in ("\x1b[m" + text).split("\x1b["))
        assert max(len(line) for line in plain.splitlines()) <= width
        assert "…" not in plain  # nothing that was to be read was cut off
    assert ("22:13:21.050" in on_terminal(path, monkeypatch, width, "sg-cancelled")) == (width >= 100)


def test_no_color_is_honoured_on_a_terminal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = on_terminal(path, monkeypatch, 120, "sg-leaking")
    assert "\x1b[31m" not in text
    assert "\x1b[36m" not in text


def test_a_terminal_without_arrows_gets_letters(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner(charset="ascii").invoke(main, ["explain", "--journal", str(path), "sg-cancelled"])
    assert result.exit_code == 0
    assert "clients -> connected" in result.stdout
    assert "400 us after it happened" in result.stdout
