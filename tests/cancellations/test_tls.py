"""TLS on both sides: the same windows, seen through a record layer."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from stopguard.engines import OpenAIEngine
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from tests.cancellations.peers import LIMIT, ScriptedEngine, Seen, Setup, linger_zero, request

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, chain = folder / "key.pem", folder / "chain.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(chain), "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return chain, key


@pytest.mark.parametrize("way", ["close", "abort", "reset", "after the end"])
async def test_leaving_over_tls_reaches_an_engine_over_tls(certificate: tuple[Path, Path], way: str) -> None:
    chain, key = certificate
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(chain, key)
    asking = ssl.create_default_context(cafile=str(chain))
    engine = ScriptedEngine()
    loop = asyncio.get_running_loop()
    engine._server = await loop.create_server(lambda: Seen(engine), "127.0.0.1", 0, ssl=serving)
    port = engine._server.sockets[0].getsockname()[1]
    gateway = Gateway(
        [(OpenAIEngine("e", f"https://127.0.0.1:{port}", tls=asking), EngineSettings(tls=asking))],
        GatewaySettings(listeners=(Listener(port=0, tls=serving),)),
    )
    await gateway.start()
    setup = Setup(gateway, [engine])
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.port, ssl=asking)
    try:
        for _ in range(2):
            writer.write(request())
            (await engine.next()).json({"ok": 1})
            async with asyncio.timeout(LIMIT):
                assert (await reader.readuntil(b'{"ok": 1}')).startswith(b"HTTP/1.1 200")
            assert (await setup.next_settled()).ledgers.stop is None
        writer.write(request(stream=True))
        seen = await engine.next()
        seen.begin_stream()
        seen.event("one")
        async with asyncio.timeout(LIMIT):
            await reader.readuntil(b"one")
        if way == "after the end":
            seen.end_stream()
            assert (await setup.next_settled()).ledgers.stop is None
            writer.close()
        else:
            if way == "close":
                writer.close()
            elif way == "abort":
                writer.transport.abort()
            else:
                linger_zero(writer.get_extra_info("socket"))
                writer.transport.abort()
            async with asyncio.timeout(LIMIT):
                await seen.closed.wait()
            assert (await setup.next_settled()).ledgers.stop.semantics == "cancel"
        setup.assert_nothing_left()
    finally:
        writer.transport.abort()
        await gateway.shutdown(drain_seconds=0.01)
        await engine.stop()
