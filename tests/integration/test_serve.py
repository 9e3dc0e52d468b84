"""`stopguard serve` as a process: it serves, it stops by order, it ends by a signal, and it remembers a crash."""

from __future__ import annotations

import signal
import socket
import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest

from stopguard.ledger.journal_reader import JournalReader
from tests.integration.serving import COMMAND, ROOT, chat, engine, gateway, start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOW = ("--step-seconds", "0.02")
LONG = 3000
"""Tokens that take a minute: a stream that certainly still runs when it is stopped."""


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with engine(*SLOW) as url:
        yield url


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=20.0) as opened:
        yield opened


def first_id(client: httpx.Client, admin: str) -> str:
    """The id of the one request that is open."""
    (row,) = client.get(f"{admin}/requests").json()["requests"]
    request_id: str = row["id"]
    return request_id


def test_it_serves_and_says_where(engine_url: str, client: httpx.Client) -> None:
    with gateway(engine_url) as server:
        assert server.ready["engines"] == [{"name": "openai", "kind": "openai"}]
        assert server.ready["pid"] == server.process.pid
        response = client.post(f"{server.url}/v1/chat/completions", json=chat(3, stream=False))
        assert response.status_code == 200
        request_id = response.headers["x-stopguard-id"]
        detail = client.get(f"{server.admin}/requests/{request_id}").json()
        assert (detail["source"], detail["request"]["state"]) == ("recent", "settled")
        assert detail["request"]["tokens_delivered"] == 3
        assert client.get(f"{server.admin}/healthz").json() == {"status": "ok"}
        server.signal(signal.SIGTERM)
        stopped = server.event("stopped")
        assert stopped["left_open"] == 0
        assert server.wait() == 0


def test_an_order_of_the_admin_port_ends_a_stream_with_a_word(engine_url: str, client: httpx.Client) -> None:
    with (
        gateway(engine_url) as server,
        client.stream(
            "POST",
            f"{server.url}/v1/chat/completions",
            json=chat(LONG),
            headers={"X-StopGuard-Group": "batch-7"},
        ) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        report = client.post(
            f"{server.admin}/stops", json={"group": "batch-7", "reason": "runaway", "wait_seconds": 10}
        )
        assert report.status_code == 200
        assert (report.json()["stopping"], report.json()["settled"]) == (1, True)
        rest = [line for line in lines if line]
        assert '"finish_reason":"abort"' in rest[-2]
        assert rest[-1] == "data: [DONE]"


def test_the_first_signal_lets_requests_end(engine_url: str, client: httpx.Client) -> None:
    with (
        gateway(engine_url) as server,
        client.stream("POST", f"{server.url}/v1/chat/completions", json=chat(30)) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        assert server.event("draining")["requests"] == 1
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.wait() == 0


def test_the_second_signal_stops_them_with_a_word(engine_url: str, client: httpx.Client) -> None:
    with (
        gateway(engine_url) as server,
        client.stream("POST", f"{server.url}/v1/chat/completions", json=chat(LONG)) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGINT)
        server.event("draining")
        server.signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert '"code":"shutdown"' in rest[-2]
        assert server.event("stopped")["left_open"] == 0
        assert server.wait() == 0


def test_a_crash_is_reported_by_the_next_run(engine_url: str, client: httpx.Client, tmp_path: Path) -> None:
    journal = str(tmp_path / "stopguard.journal")
    with (
        gateway(engine_url, "--journal", journal) as server,
        client.stream("POST", f"{server.url}/v1/chat/completions", json=chat(LONG)) as response,
    ):
        lines = response.iter_lines()  # kept: a generator that is let go closes the connection
        next(lines)
        request_id = first_id(client, server.admin)
        with JournalReader(journal) as reader:
            while not reader.open_books():
                pass
        server.signal(signal.SIGKILL)
        server.process.wait(10)
    with gateway(engine_url, "--journal", journal) as server:
        recovered = server.event("recovered")
        assert (recovered["left_open"], recovered["requests"]) == (1, [request_id])
        books = client.get(f"{server.admin}/books").json()
        assert [book["id"] for book in books["recovered"]] == [request_id]
        detail = client.get(f"{server.admin}/requests/{request_id[:12]}").json()
        assert (detail["source"], detail["verdict"]["good"]) == ("journal", False)


def test_a_token_opens_the_admin_port_and_is_never_said(engine_url: str, client: httpx.Client, tmp_path: Path) -> None:
    token = "correct-horse-battery"
    with gateway(engine_url, "--log-level", "debug", environment={"STOPGUARD_ADMIN_TOKEN": token}) as server:
        assert client.get(f"{server.admin}/books").status_code == 401
        headers = {"authorization": f"Bearer {token}"}
        assert client.get(f"{server.admin}/books", headers=headers).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert token not in "\n".join(server.lines)


# ---- what is said before anything starts ---------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "serve", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_check_says_everything_that_is_wrong_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "stopguard.toml"
    file.write_text("[timeouts]\nhead_second = 1\n[engines.a]\nurl = 'x'\n")
    result = run("--check", "--config", str(file), "--policy", "maybe")
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("stopguard: ") for line in lines)


def test_check_is_content_with_what_is_right() -> None:
    result = run("--check", "--engine", "openai=http://127.0.0.1:1")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == ("the configuration is fine: 1 engine(s), listen 127.0.0.1:8080, admin 127.0.0.1:9090\n")


@pytest.mark.parametrize("port", ["--listen", "--admin"])
def test_a_port_that_is_taken_is_one_line(port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        other = "--admin" if port == "--listen" else "--listen"
        result = run("--engine", "openai=http://127.0.0.1:1", port, address, other, "127.0.0.1:0")
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("stopguard: ")]
    assert f"cannot listen on {address}: Address already in use" in line
    assert "Traceback" not in result.stderr


def test_the_banner_is_plain_where_nobody_looks(engine_url: str) -> None:
    process = start("serve", "--engine", f"gpu0:openai={engine_url}", "--listen", "127.0.0.1:0", "--admin", "off")
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        assert lines[0].startswith("stopguard ")
        assert lines[2:] == ["admin   off\n", f"engine  gpu0 (openai) at {engine_url}\n", "journal off\n"]
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0
