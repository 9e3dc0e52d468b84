"""`stopguard top`: what people see of one moment, what programs get, and what it says when nobody answers."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from stopguard.admin.page_overview import overview
from stopguard.cli import main, top
from stopguard.cli.top_screen import Screen
from stopguard.ledger import Evidence
from stopguard.stops import CLOSE_CONNECTION, AbortAnswer, EngineProfile
from tests.unit.admin.fake_view import FakeView, facts

if TYPE_CHECKING:
    from collections.abc import Callable

PROVES = EngineProfile(name="gpu0", doors=(CLOSE_CONNECTION,), best_evidence=Evidence.PROBE)
WIDTH = 150


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STOPGUARD_ADMIN", "STOPGUARD_ADMIN_TOKEN", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def view() -> FakeView:
    made = FakeView()
    made.facts = [
        facts("gpu0", kind="ref", blocks_used=30, blocks_total=400),
        facts("gpu1", healthy=False),
    ]
    return made


def stopping(view: FakeView, number: int) -> str:
    """A request whose client left and whose abort is out."""
    tracked = view.run(number, profile=PROVES)
    view.controller.client_left(tracked, view.at, "eof")
    view.controller.abort_answered(tracked, view.at, "close", AbortAnswer.SENT)
    return tracked.request_id


def document(view: FakeView) -> dict[str, Any]:
    """What the admin API answers."""
    return dict(json.loads(overview(view, requests_max=0, ended_max=0, points_max=0).model_dump_json()))


def serve(monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx.Request], httpx.Response]) -> list[httpx.Request]:
    """Let `top` speak with `answer` instead of a socket; returns what it asked."""
    asked: list[httpx.Request] = []
    made = top._client

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answer(request)

    def client(base_url: str, token: str) -> httpx.Client:
        real = made(base_url, token)
        mocked = httpx.Client(
            base_url=real.base_url, headers=real.headers, transport=httpx.MockTransport(handler), trust_env=False
        )
        real.close()
        return mocked

    monkeypatch.setattr(top, "_client", client)
    return asked


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, ["top", *arguments], prog_name="stopguard", **options)


def shown(moment: dict[str, Any], width: int = WIDTH, **options: Any) -> list[str]:
    """The lines of one moment."""
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, **options)
    for part in top.render(moment, stops_max=20, width=width):
        console.print(part, soft_wrap=True)
    return [line.rstrip() for line in file.getvalue().splitlines()]


# ---- what people see -----------------------------------------------------------------------------------------


def test_engines_have_a_row_each_and_dashes_where_nothing_is_known(view: FakeView) -> None:
    view.run(1)
    lines = shown(document(view))
    heading = next(line for line in lines if line.startswith("ENGINE"))
    assert heading.split() == (
        ["ENGINE", "KIND", "STATE", "RUN", "QUEUE", "STOPPING", "KV%", "STOPS/MIN", "P50", "P99", "WASTE", "LEAKS"]
    )
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("gpu")}
    assert rows["gpu0"] == ["gpu0", "ref", "up", "0", "1", "0", "8", "0", "–", "–", "0", "0"]
    assert rows["gpu1"] == ["gpu1", "–", "down", "0", "0", "0", "–", "0", "–", "–", "0", "0"]


def test_stops_are_oldest_first_with_stage_tries_and_five_marks(view: FakeView) -> None:
    first = stopping(view, 1)
    view.at = 1.0
    second = stopping(view, 2)
    view.at = 1.5
    lines = shown(document(view))
    rows = [line for line in lines if line.startswith("sg-")]
    assert [row.split()[0] for row in rows] == [first, second]
    assert "q✗ kv✗ out✓ ack✗ str✓" in rows[0]
    assert rows[0].split()[1:5] == ["1.5", "s", "ack", "1"]
    assert "cancel: client eof" in rows[0]
    assert "stopping 2" in lines[0]


def test_a_leak_is_said_at_the_top_and_marked_in_its_ledger(view: FakeView) -> None:
    request_id = stopping(view, 1)
    view.at = 30.0
    view.controller.advance(view.at)
    lines = shown(document(view))
    assert "LEAKING 1" in lines[0]
    assert lines[1].startswith("! leak: ")
    assert request_id in lines[1]
    (row,) = [line for line in lines if line.startswith("sg-")]
    assert "ack!" in row
    assert " overdue " in row


def test_without_stops_the_last_times_are_said(view: FakeView) -> None:
    assert shown(document(view))[-1] == "no stop in progress"
    tracked = view.controller.tracked[stopping(view, 1)]
    view.at = 0.041
    view.controller.acknowledged(tracked, view.at, Evidence.PROBE)
    assert shown(document(view))[-1] == "no stop in progress; the last 1 settled in 41.0 ms (p50), 41.0 ms (p99)"


def test_more_stops_than_rows_are_counted(view: FakeView) -> None:
    for number in range(60):
        stopping(view, number)
    assert shown(document(view))[-1] == "… and 40 more"


def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_rows(view: FakeView) -> None:
    stopping(view, 1)
    lines = shown(document(view), width=80)
    assert all(len(line) <= 80 for line in lines[1:])
    assert "KIND" not in "".join(lines)
    assert any("q✗ kv✗ out✓ ack✗ str✓" in line for line in lines)


def test_nothing_that_clients_write_steers_the_terminal(view: FakeView) -> None:
    stopping(view, 1)
    moment = document(view)
    request = moment["stops"][0]["request"]
    request["stop"]["reason"] = "\x1b[2J\x1b]0;x\x07"
    request["id"] = "sg-\x9b31m\r\n"
    moment["engines"][0]["name"] = "gpu\u202e0"
    moment["warnings"] = ["\x1b[8m[red]x[/]"]
    text = "\n".join(shown(moment))
    assert [one for one in text if not one.isprintable() and one != "\n"] == []
    assert "[red]x[/]" in text  # no markup either: it is shown as it was written


# ---- once, in a pipe, as JSON ----------------------------------------------------------------------------------


def test_in_a_pipe_it_prints_one_moment_without_colour(view: FakeView, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping(view, 1)
    asked = serve(monkeypatch, lambda _: httpx.Response(200, json=document(view)))
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    assert all(line == line.rstrip() for line in result.stdout.splitlines())
    assert "q✗ kv✗ out✓ ack✗ str✓" in result.stdout
    assert [str(request.url) for request in asked] == ["http://127.0.0.1:9090/overview"]
    assert "authorization" not in asked[0].headers


def test_json_is_the_overview_with_its_schema_version(view: FakeView, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping(view, 1)
    serve(monkeypatch, lambda _: httpx.Response(200, json=document(view)))
    result = run("--json")
    assert result.exit_code == 0
    parsed = json.loads(result.stdout)
    assert (parsed["schema_version"], parsed["stops_total"]) == (1, 1)
    assert parsed["stops"][0]["stage"] == "ack"


def test_a_locale_without_the_marks_gets_ascii(view: FakeView, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping(view, 1)
    serve(monkeypatch, lambda _: httpx.Response(200, json=document(view)))
    result = CliRunner(charset="ascii").invoke(main, ["top"], prog_name="stopguard")
    assert "q- kv- out+ ack- str+" in result.stdout


def test_colour_is_for_terminals_that_want_it(view: FakeView, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping(view, 1)
    moment = document(view)
    assert any("\x1b[3" in line for line in shown(moment, force_terminal=True, color_system="standard"))
    monkeypatch.setenv("NO_COLOR", "1")
    lines = shown(moment, force_terminal=True, color_system="standard")
    assert not any("\x1b[3" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "asked_for"),
    [
        ("10.0.0.7:9090", "http://10.0.0.7:9090/overview"),
        ("https://sg.example/base/", "https://sg.example/base/overview"),
        ("http://[::1]:9090", "http://[::1]:9090/overview"),
    ],
)
def test_the_admin_port_is_given_as_url_or_address(
    view: FakeView, monkeypatch: pytest.MonkeyPatch, given: str, asked_for: str
) -> None:
    asked = serve(monkeypatch, lambda _: httpx.Response(200, json=document(view)))
    assert run("--admin", given).exit_code == 0
    assert run(env={"STOPGUARD_ADMIN": given, "STOPGUARD_ADMIN_TOKEN": "secret"}).exit_code == 0
    assert [str(request.url) for request in asked] == [asked_for] * 2
    assert asked[1].headers["authorization"] == "Bearer secret"


# ---- when it does not work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (httpx.Response(401, json={"detail": "no"}), "asks for its admin token: set STOPGUARD_ADMIN_TOKEN"),
        (httpx.Response(403, json={"detail": "only \x1b[1mhere"}), "403: only \N{REPLACEMENT CHARACTER}[1mhere"),
        (httpx.Response(500, text="x"), "answered 500: it does not say why"),
        (httpx.Response(200, text="<html>"), "is no admin port of StopGuard"),
        (httpx.Response(200, json=[1]), "is no admin port of StopGuard"),
        (httpx.Response(200, json={"schema_version": 2}), "is a newer StopGuard"),
    ],
)
def test_what_is_wrong_is_one_line(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, line: str) -> None:
    serve(monkeypatch, lambda _: answer)
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("stopguard: http://127.0.0.1:9090 ")
    assert line in result.stderr
    assert result.stderr.count("\n") == 1


def test_nobody_there_says_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[Errno 111] Connection refused")

    serve(monkeypatch, refuse)
    result = run()
    assert result.exit_code == 2
    assert result.stderr == (
        "stopguard: nothing answers at http://127.0.0.1:9090 (Connection refused): "
        "is `stopguard serve` running, and is this its admin port?\n"
    )


@pytest.mark.parametrize("admin", ["off", "ftp://x", "http://", "http://x:99999", "http://[::1"])
def test_an_admin_port_that_is_none_is_wrong_usage(admin: str) -> None:
    result = run("--admin", admin)
    assert result.exit_code == 2
    assert "admin" in result.stderr


def test_a_token_that_is_none_is_never_sent() -> None:
    result = run(env={"STOPGUARD_ADMIN_TOKEN": "two words"})
    assert result.exit_code == 2
    assert "two words" not in result.output


# ---- the screen ---------------------------------------------------------------------------------------------------


def drawn(screen: Screen, width: int = WIDTH, height: int = 30) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(screen.draw(width, height))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_keys_pause_quit_and_change_the_pace() -> None:
    screen = Screen(1.0)
    assert screen.key(" ") is True
    assert screen.key("+") is False
    assert screen.interval_seconds == 0.5
    for _ in range(20):
        screen.key("+")
    assert screen.interval_seconds == 0.2
    for _ in range(20):
        screen.key("-")
    assert screen.interval_seconds == 60.0
    states = [(screen.key("p"), screen.paused) for _ in range(2)]
    assert states == [(False, True), (True, False)]
    states = [(screen.ended, screen.key("q")), (screen.ended, False)]
    assert states == [(False, False), (True, False)]


def test_the_last_line_is_the_keys_and_everything_fits(view: FakeView) -> None:
    for number in range(60):
        stopping(view, number)
    view.at = 30.0
    view.controller.advance(view.at)
    screen = Screen(2.0)
    screen.look(lambda: document(view))
    for height in (24, 40):
        lines = drawn(screen, height=height)
        assert len(lines) <= height
        assert lines[-1] == "q quit   p pause   space now   +/- faster, slower   every 2 s"
        assert sum(line.startswith("sg-") for line in lines) >= height - 16
    screen.key("p")
    assert drawn(screen)[-1].endswith("paused")


def test_a_gateway_that_goes_away_leaves_the_last_moment_and_a_word(view: FakeView) -> None:
    screen = Screen(1.0)
    request_id = stopping(view, 1)
    screen.look(lambda: document(view))

    def gone() -> dict[str, Any]:
        raise top.AdminUnreachable("nothing answers at http://127.0.0.1:9090")

    screen.look(gone)
    lines = drawn(screen)
    assert lines[0] == "! nothing answers at http://127.0.0.1:9090"
    assert any(line.startswith(request_id) for line in lines)
    screen.look(lambda: document(view))
    assert not drawn(screen)[0].startswith("!")
