"""The pytest plugin, run by pytest in a process of its own, against an engine in that process and one on a socket."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

IN_PROCESS = """
import pytest
from stopguard.audit.target import Reading
from stopguard.ledger import EngineGauges

HELD = {"blocks": 0}

def read() -> Reading:
    gauges = EngineGauges(at=0.0, running=0, waiting=0, blocks_used=HELD["blocks"])
    return Reading(gauges=gauges, beside={"lora slots": 0})

def test_clean(leak_watch):
    with leak_watch(read, within=0.1):
        HELD["blocks"] += 3
        HELD["blocks"] -= 3

def test_leaky(leak_watch):
    with leak_watch(read, within=0.1):
        HELD["blocks"] += 3

@pytest.mark.stopguard(read, within=0.1)
def test_leaky_by_marker():
    HELD["blocks"] += 2

def test_its_own_failure_comes_first(leak_watch):
    with leak_watch(read, within=0.1):
        HELD["blocks"] += 1
        raise ValueError("mine")
"""

OVER_HTTP = """
import pytest
from stopguard.audit.client import SocketWorld
from stopguard.audit.world import Call
from stopguard.refengine import EngineConfig, ReferenceEngine
from stopguard.refengine.http_face import Face
from stopguard.refengine.http_server import serving

async def leave(url):
    world = SocketWorld(url)
    exchange = await world.open(Call(path="/v1/completions", body={"prompt": "a", "max_tokens": 900, "stream": True}))
    await world.wait(lambda: exchange.reply.events > 2, 5.0)
    await world.aclose()

@pytest.mark.anyio
@pytest.mark.parametrize("faults", [(), ("blocks-leaked-on-abort",)])
async def test_leaving(leak_watch, faults):
    async with serving(Face(ReferenceEngine(EngineConfig(), "vllm", faults))) as url:
        async with leak_watch(url, within=1.0):
            await leave(url)

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""


def run(tmp_path: Path, text: str) -> str:
    (tmp_path / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "stopguard.testing.pytest_plugin", "-q", "--strict-markers"]
    command += ["-p", "no:cacheprovider", "-c", str(tmp_path / "none.ini"), "--rootdir", str(tmp_path), str(tmp_path)]
    (tmp_path / "none.ini").write_text("[pytest]\n")
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False).stdout


def test_in_the_same_process(tmp_path: Path) -> None:
    shown = run(tmp_path, IN_PROCESS)
    assert "3 failed, 1 passed" in shown, shown
    assert "LEAK in the engine, 0.1 s after the test: kv: 3 blocks more than before (0 then, 3 now)" in shown
    assert "kv: 2 blocks more than before" in shown
    assert "ValueError: mine" in shown


def test_over_http(tmp_path: Path) -> None:
    shown = run(tmp_path, OVER_HTTP)
    assert "1 failed, 1 passed" in shown, shown
    assert "LEAK in http://127.0.0.1:" in shown
