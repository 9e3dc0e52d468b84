"""A peer that vanishes without a word: its machine lost power, its cable was cut, its address moved.

Two network namespaces and a virtual cable between them; cutting it leaves both sockets open and silent. The
gateway has to find out by itself, streaming (unacknowledged data) or not (keep-alive probes).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from time import monotonic

import msgspec
import pytest

from stopguard.engines import OpenAIEngine
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener, Liveness
from tests.cancellations.peers import ScriptedEngine, Setup, request

pytestmark = [pytest.mark.anyio, pytest.mark.network_namespace, pytest.mark.slow]

NAMESPACE = f"stopguard-{os.getpid()}"
NEAR, FAR = f"sgn{os.getpid()}"[:15], f"sgf{os.getpid()}"[:15]
GATEWAY_ADDRESS, CLIENT_ADDRESS = "10.231.77.1", "10.231.77.2"

CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(bytes.fromhex(sys.argv[3]))
print("sent", flush=True)
while connection.recv(65536):
    print("read", flush=True)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[None]:
    """A namespace for the client, joined to ours."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 to build a network namespace")
    try:
        ip("netns", "add", NAMESPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine allows no network namespaces: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", NAMESPACE)
        ip("addr", "add", f"{GATEWAY_ADDRESS}/30", "dev", NEAR)
        ip("link", "set", NEAR, "up")
        ip("-n", NAMESPACE, "addr", "add", f"{CLIENT_ADDRESS}/30", "dev", FAR)
        ip("-n", NAMESPACE, "link", "set", FAR, "up")
        yield
    finally:
        subprocess.run(["ip", "link", "del", NEAR], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=False, capture_output=True)


QUICK = Liveness(
    keep_alive_idle_seconds=1, keep_alive_interval_seconds=1, keep_alive_probes=3, user_timeout_seconds=2.0
)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no-stream"])
@pytest.mark.parametrize(("liveness", "limit"), [(QUICK, 6.0), (Liveness(), 15.0)], ids=["quick", "defaults"])
async def test_it_is_found(cable: None, stream: bool, liveness: Liveness, limit: float) -> None:
    engine = ScriptedEngine()
    await engine.start()
    settings = msgspec.structs.replace(
        GatewaySettings(), listeners=(Listener(host=GATEWAY_ADDRESS, port=0),), liveness=liveness
    )
    gateway = Gateway([(OpenAIEngine("engine", engine.url), EngineSettings())], settings)
    await gateway.start()
    setup = Setup(gateway, [engine])
    client = await asyncio.create_subprocess_exec(
        *("ip", "netns", "exec", NAMESPACE, sys.executable, "-c", CLIENT),
        *(GATEWAY_ADDRESS, str(setup.port), request(stream=stream).hex()),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert client.stdout is not None
        seen = await engine.next()
        if stream:
            seen.begin_stream()
            assert await client.stdout.readline() == b"sent\n"
            assert await client.stdout.readline() == b"read\n"
        ip("-n", NAMESPACE, "link", "set", FAR, "down")
        cut_at = monotonic()
        async with asyncio.timeout(limit + 1.0):
            while not seen.closed.is_set():
                if stream:
                    seen.event("into the void")
                await asyncio.wait([asyncio.ensure_future(seen.closed.wait())], timeout=0.2)
        took = monotonic() - cut_at
        tracked = await setup.next_settled()
        assert tracked.ledgers.stop.reason == "keepalive"
        assert took <= limit
        setup.assert_nothing_left()
    finally:
        client.kill()
        await client.wait()
        await gateway.shutdown(drain_seconds=0.01)
        await engine.stop()
