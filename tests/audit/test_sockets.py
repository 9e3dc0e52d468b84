"""On real sockets: the ways of leaving, a gateway between, an engine that dies, and the command line's exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import httpx
import pytest

from stopguard.audit import Audit, AuditReport, Outcome, Plan
from stopguard.audit.client import SocketWorld
from stopguard.audit.errors import AuditRefused, CredentialsRefused, ModelUnknown, TargetUnreachable
from stopguard.audit.world import Call
from stopguard.errors import ConfigurationError
from stopguard.refengine import EngineConfig, ReferenceEngine
from stopguard.refengine.http_driver import RealClock
from stopguard.refengine.http_face import Face, FaceOptions
from stopguard.refengine.http_server import serving
from tests.audit.rig import CONFIG, accusations

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

STOPGUARD = (sys.executable, "-c", "from stopguard.cli import main; main()")
QUICK = (
    "mid-stream",
    "non-streaming",
    "before-headers",
    "half-close",
    "reset",
    "stalled-reader",
    "keep-alive",
    "abort",
)


@asynccontextmanager
async def engine(policy: str = "vllm", faults: tuple[str, ...] = ()) -> AsyncIterator[tuple[str, Face]]:
    face = Face(ReferenceEngine(EngineConfig(**CONFIG), policy, faults), RealClock(), FaceOptions(dev_mode=True))
    async with serving(face) as url:
        yield url, face


async def run(url: str, via: str = "", model: str = "", key: str = "", **plan: Any) -> AuditReport:
    world = SocketWorld(via or url, url, key=key)
    return await Audit(world, Plan(**plan), url=url, via=via, model=model).run()


async def test_a_healthy_engine_passes_on_real_sockets() -> None:
    async with engine() as (url, face):
        report = await run(url, scenarios=QUICK)
        assert report.outcome is Outcome.PASS, accusations(report)
        assert not face.exchanges
        assert face.engine.snapshot(face.driver.catch_up()).settled
    assert report.target.engine == "ref (vllm)"
    keep_alive = next(scenario for scenario in report.scenarios if scenario.name == "keep-alive")
    assert keep_alive.notes == ("30 requests on 1 connections",)


async def test_a_fault_is_caught_on_real_sockets() -> None:
    async with engine(faults=("disconnect-ignored-without-stream",)) as (url, _):
        report = await run(url, scenarios=("mid-stream", "non-streaming"), deadline_seconds=1.0)
    assert {(name, cell.ledger) for name, cell in report.accusations()} == {("non-streaming", "stream")}


async def test_a_gateway_that_holds_on_to_the_engine_is_caught() -> None:
    """A relay that goes on reading from the engine when its client has gone, as many do."""
    async with engine() as (url, _), relay(url) as via:
        report = await run(url, via, scenarios=("mid-stream", "abort"), deadline_seconds=1.0)
    assert {(name, cell.ledger) for name, cell in report.accusations()} == {("mid-stream", "stream")}
    assert next(one for one in report.scenarios if one.name == "abort").skipped == "it says nothing about a gateway"


async def test_an_engine_that_serves_others_is_refused_and_then_shared() -> None:
    async with engine() as (url, _):
        other = SocketWorld(url)
        body = {"prompt": "somebody else", "max_tokens": 1800, "stream": True}
        stream = await other.open(Call(path="/v1/completions", body=body))
        assert await other.wait(lambda: stream.reply.events > 2, 5.0)
        with pytest.raises(AuditRefused, match="--shared"):
            await run(url, scenarios=("mid-stream",))
        assert not stream.reply.ended
        report = await run(url, scenarios=("mid-stream", "abort"), shared=True)
        assert accusations(report) == []
        assert not stream.reply.ended, "the other one's stream was hit"
        cells = {cell.ledger: cell.outcome for cell in report.scenarios[0].cells}
        assert cells["kv"] is Outcome.PASS, "blocks of single requests are followed by events"
        assert cells["counters"] is Outcome.UNPROVEN
        await other.aclose()


async def test_what_prevents_an_audit_is_said_in_one_line() -> None:
    with pytest.raises(TargetUnreachable, match=r"nobody answers at http://127\.0\.0\.1:1"):
        await run("http://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="is not a base URL"):
        await run("127.0.0.1:8000")
    async with engine() as (url, _):
        with pytest.raises(ModelUnknown, match="does not serve nobody; it serves: base"):
            await run(url, model="nobody")
        with pytest.raises(TargetUnreachable, match="is this an OpenAI-compatible server"):
            await run(f"{url}/wrong")
        with pytest.raises(ConfigurationError, match="no scenario 'nothing'"):
            await run(url, scenarios=("nothing",))


async def test_a_wrong_key_is_said() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CredentialsRefused, match="--key"):
            await run(f"http://127.0.0.1:{port}", key="wrong")


# The command line ----------------------------------------------------------------------------------


@contextmanager
def process(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [*STOPGUARD, "refengine", "serve", "--port", "0", "--max-running", "8", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        found = re.search(r"http://\S+", served.stdout.readline())
        assert found is not None
        try:
            yield found.group(), served
        finally:
            if served.poll() is None:
                served.send_signal(signal.SIGTERM)
            served.wait(10)


def stopguard(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*STOPGUARD, "audit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_line_says_it_with_its_exit_code(tmp_path: Path) -> None:
    with process() as (url, _):
        passed = stopguard(url, "--scenario", "mid-stream", "--format", "json")
        assert passed.returncode == 0, passed.stderr
        document = json.loads(passed.stdout)
        assert (document["schema_version"], document["exit_code"]) == (1, 0)
        assert document["audits"][0]["verdict"] == "pass"
        unproven = stopguard(url, "--scenario", "mid-stream", "--engine", "openai", "--format", "github")
        assert unproven.returncode == 3, unproven.stderr
        assert "::warning title=unproven" in unproven.stdout
        unknown = stopguard(url, "--model", "nobody")
        assert unknown.returncode == 2
        assert unknown.stderr.splitlines()[-1] == "stopguard: the target does not serve nobody; it serves: base"
    gone = stopguard(url)
    assert gone.returncode == 2
    assert "nobody answers at" in gone.stderr
    assert "Traceback" not in gone.stderr + unknown.stderr
    with process("--fault", "blocks-leaked-on-abort") as (url, _):
        report = tmp_path / "report.xml"
        leaky = stopguard(
            url, "--scenario", "mid-stream", "--deadline", "1", "--format", "junit", "--output", str(report)
        )
        assert leaky.returncode == 1, leaky.stderr
    suite = ET.parse(report).getroot()[0]
    assert suite.get("failures") == "1"


def test_an_engine_that_dies_in_the_middle_is_said(tmp_path: Path) -> None:
    with process() as (url, served):
        command = [*STOPGUARD, "audit", url, "--scenario", "mid-stream"]
        command += ["--scenario", "busy-neighbour", "--scenario", "storm"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as audit:
            assert audit.stderr is not None
            assert audit.stdout is not None
            line = ""
            while "mid-stream" not in line:
                line = audit.stderr.readline()
                assert line
            served.kill()
            rest = audit.stderr.read()
            shown = audit.stdout.read()
            assert audit.wait(60) == 2
    assert "Traceback" not in rest
    assert rest.splitlines()[-1].startswith(f"stopguard: {url}: the engine went away during ")
    assert "mid-stream" in shown


def test_an_audit_that_is_interrupted_leaves_no_load() -> None:
    with process() as (url, _):
        command = [*STOPGUARD, "audit", url, "--scenario", "mid-stream", "--scenario", "busy-neighbour"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as audit:
            assert audit.stderr is not None
            while "mid-stream" not in audit.stderr.readline():
                assert audit.poll() is None
            busy = until(url, lambda gauges: gauges["running"] > 0)
            audit.send_signal(signal.SIGINT)
            rest = audit.stderr.read()
            assert audit.wait(20) == 130
        assert busy
        assert "Traceback" not in rest
        assert until(url, lambda gauges: gauges["running"] == gauges["blocks_held"] == gauges["watchers"] == 0)


def until(url: str, condition: Callable[[dict[str, Any]], bool]) -> bool:
    """Ask a real server until it says so; the limit is only for a broken build."""
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        if condition(httpx.get(f"{url}/ref/gauges", trust_env=False).json()):
            return True
        time.sleep(0.02)
    return False


def test_several_engines_make_a_table(tmp_path: Path) -> None:
    page = tmp_path / "matrix.html"
    with process() as (good, _), process("--fault", "disconnect-masked") as (bad, _):
        targets = (f"good={good}", f"bad={bad}", "gone=http://127.0.0.1:1")
        options = ("--matrix", "--scenario", "mid-stream", "--deadline", "1", "--format", "html")
        compared = stopguard(*targets, *options, "--output", str(page))
    assert compared.returncode == 1, compared.stderr
    text = page.read_text()
    assert "<th>good</th><th>bad</th><th>gone</th>" in text
    assert "not audited: nobody answers at http://127.0.0.1:1" in text
    assert "never (stream)" in text


def test_the_load_is_said_before_and_nothing_is_sent() -> None:
    said = stopguard("http://127.0.0.1:1", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert "requests" in said.stdout
    assert "Three clients close their connections" in " ".join(said.stdout.split())


@asynccontextmanager
async def relay(url: str, *, shuts_out: bool = False) -> AsyncIterator[str]:
    """A TCP relay that never tells the engine that its client has gone.

    `shuts_out`: it closes its client's connection at the client's FIN, and goes on reading from the engine.
    """
    host, port = url.removeprefix("http://").split(":")
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port))

        async def back() -> None:
            try:
                while data := await up_reader.read(4096):
                    if not writer.is_closing():
                        writer.write(data)
            finally:
                writer.close()
                up_writer.close()

        task = asyncio.create_task(back())
        tasks.add(task)
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                up_writer.write(data)
        if shuts_out:
            writer.close()
        await task

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
