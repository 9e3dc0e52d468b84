"""One real server on a loopback socket: raw connections, the OpenAI SDK, the command line."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from stopguard.refengine.engine import ReferenceEngine
from stopguard.refengine.http_driver import RealClock
from stopguard.refengine.http_face import Face, FaceOptions
from stopguard.refengine.http_server import serving
from stopguard.refengine.interface import EngineConfig
from tests.unit.refengine_http.helpers import CHAT, chat

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@asynccontextmanager
async def real(policy: str = "vllm", **more: Any) -> AsyncIterator[tuple[str, Face]]:
    config = EngineConfig(**{"max_running": 4, "max_model_tokens": 4096, **more})
    face = Face(ReferenceEngine(config, policy), RealClock(), FaceOptions(dev_mode=True))
    async with serving(face) as url:
        yield url, face


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait in real time; what must happen is fast, the limit is only for a broken build."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (the condition is in the engine, which has no event for it)
            await asyncio.sleep(0.002)


async def settled(url: str, face: Face) -> None:
    await until(lambda: face.engine.snapshot(face.driver.catch_up()).settled and not face.driver.tickets)
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"{url}/metrics")).text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert re.search(rf"^vllm:{name}\{{.*\}} 0\.0$", metrics, re.MULTILINE), metrics
    assert not face.exchanges


async def connect(url: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    payload = json.dumps(body).encode()
    writer.write(
        b"POST %s HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(payload), payload)
    )
    await writer.drain()
    return reader, writer


async def _queued(face: Face, url: str) -> list[asyncio.StreamWriter]:
    busy = [(await connect(url, chat(2000)))[1] for _ in range(4)]
    await until(lambda: face.engine.gauges().running == 4)
    return busy


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("window", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_closed_connection_stops_the_request(window: str, stream: bool, how: str) -> None:
    async with real(prefill_chunk_tokens=16) as (url, face):
        others = await _queued(face, url) if window == "queued" else []
        words = 200 if window == "prefill" else 4
        _, writer = await connect(url, chat(2000, stream=stream, words=words))
        engine = face.engine
        match window:
            case "queued":
                await until(lambda: engine.gauges().waiting == 1)
            case "prefill":
                await until(lambda: engine.gauges().running == 1)
                assert engine.snapshot(face.driver.catch_up()).requests[0].output_tokens == 0
            case _:
                await until(lambda: any(v.output_tokens for v in engine.snapshot(face.driver.catch_up()).requests))
        for leaving in (writer, *others):
            leaving.transport.abort() if how == "reset" else leaving.close()
        await settled(url, face)
        assert engine.gauges().aborts_total == 1 + len(others)
        for leaving in (writer, *others):
            await asyncio.gather(leaving.wait_closed(), return_exceptions=True)


async def test_keep_alive_streaming_and_whole() -> None:
    async with real() as (url, face), httpx.AsyncClient(base_url=url) as client:
        whole = (await client.post(CHAT, json=chat(20, n=2))).json()
        async with client.stream("POST", CHAT, json=chat(20, n=2, stream=True)) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert response.headers["transfer-encoding"] == "chunked"
        assert lines[-1] == "data: [DONE]"
        texts = ["", ""]
        for line in lines[:-1]:
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == [choice["message"]["content"] for choice in whole["choices"]]
        assert response.headers["server"] == "uvicorn"
        await settled(url, face)
        assert not [entry for entry in face.log(10_000) if entry.kind == "client_gone"]


async def test_the_openai_sdk_async() -> None:
    async with real() as (url, face), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "the river"}]
        assert [model.id async for model in client.models.list()] == ["base"]
        whole = await client.chat.completions.create(model="base", messages=messages, max_tokens=12)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        text, usage = "", None
        async for chunk in await client.chat.completions.create(
            model="base", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
        ):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content
        assert usage is not None
        assert usage.completion_tokens == 12
        stream = await client.completions.create(model="base", prompt="the river", max_tokens=3000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await settled(url, face)
        assert face.engine.gauges().aborts_total == 1
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="base", messages=messages, max_tokens=99_999)


async def test_the_openai_sdk_sync() -> None:
    def use(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.completions.create(model="base", prompt="the river", max_tokens=15)
            with client.completions.create(model="base", prompt="the river", max_tokens=15, stream=True) as stream:
                return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)

    async with real() as (url, face):
        whole, streamed = await asyncio.to_thread(use, url)
        assert whole == streamed != ""
        await settled(url, face)


async def test_shutdown_ends_open_streams_with_an_error() -> None:
    received: list[str] = []

    async def read(url: str) -> None:
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{url}{CHAT}", json=chat(3000, stream=True)) as r,
        ):
            received.extend([line async for line in r.aiter_lines() if line])

    async with real() as (url, face):
        reading = asyncio.create_task(read(url))
        await until(lambda: face.engine.gauges().running == 1)
    await reading
    assert "shutting down" in received[-2]
    assert received[-1] == "data: [DONE]"
    assert not face.exchanges
    assert not face.driver.tickets


def _serve(*arguments: str) -> subprocess.Popen[str]:
    code = "from stopguard.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, "refengine", "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_the_command_line_serves_until_sigterm() -> None:
    with _serve("--policy", "sglang", "--speed", "20", "--fault", "watcher-leaks", "--seed", "3") as process:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        match = re.fullmatch(
            r"refengine ready: (http://127\.0\.0\.1:\d+) \(policy sglang, faults watcher-leaks\)\n", line
        )
        assert match, line
        async with httpx.AsyncClient(base_url=match[1]) as client:
            answer = (await client.post(CHAT, json=chat(200))).json()
            assert answer["usage"]["completion_tokens"] == 200
            assert (await client.get("/ref/gauges")).json()["watchers"] == 1, "the fault is there"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--fault", "no-such"], "no fault"),
        (["--probe", "x"], "probe address"),
        (["--block-tokens", "0"], "block-tokens"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments: list[str], word: str) -> None:
    with _serve(*arguments) as process:
        out, error = process.communicate(timeout=30)
    assert process.returncode == 2
    assert word in error
    assert "Traceback" not in error
    assert out == ""
