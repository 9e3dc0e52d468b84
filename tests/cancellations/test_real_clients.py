"""The clients that people use, against the gateway: they get their answers, and leaving them stops the engine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.cancellations.peers import LIMIT, Seen, Setup, gateway

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "hi"}]
COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def part(text: str) -> bytes:
    import json

    chunk = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
    }
    data = b"data: %b\n\n" % json.dumps(chunk).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


async def assert_stopped(setup: Setup, seen: Seen) -> None:
    async with asyncio.timeout(LIMIT):
        await seen.closed.wait()
    tracked = await setup.next_settled()
    assert tracked.ledgers.stop.semantics == "cancel"
    setup.assert_nothing_left()


@contextlib.asynccontextmanager
async def async_openai(setup: Setup) -> AsyncIterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(api_key="k", base_url=f"http://127.0.0.1:{setup.port}/v1", max_retries=0)
    async with client:
        yield client


async def test_openai_async_whole_and_streamed() -> None:
    async with gateway() as setup, async_openai(setup) as client:
        asked = asyncio.create_task(client.chat.completions.create(model="tiny", messages=MESSAGES))
        seen = await setup.engine.next()
        seen.json(COMPLETION)
        answer = await asked
        assert answer.choices[0].message.content == "hello"
        assert answer._request_id is not None
        assert answer._request_id.startswith("sg-")
        streaming = asyncio.create_task(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
        seen = await setup.engine.next()
        seen.begin_stream()
        seen.write(part("one") + part("two"))
        seen.end_stream()
        async with await streaming as stream:
            assert [chunk.choices[0].delta.content async for chunk in stream] == ["one", "two"]


async def test_openai_async_closes_a_stream() -> None:
    async with gateway() as setup, async_openai(setup) as client:
        streaming = asyncio.create_task(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
        seen = await setup.engine.next()
        seen.begin_stream()
        seen.write(part("one"))
        stream = await streaming
        async for _ in stream:
            break
        await stream.close()
        await assert_stopped(setup, seen)


async def test_openai_async_cancels_a_task() -> None:
    async with gateway() as setup, async_openai(setup) as client:
        asked = asyncio.create_task(client.chat.completions.create(model="tiny", messages=MESSAGES))
        seen = await setup.engine.next()
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        await assert_stopped(setup, seen)


async def test_openai_gets_an_error_that_it_understands_when_somebody_cancels_by_the_api() -> None:
    async with gateway() as setup, async_openai(setup) as client:
        asked = asyncio.create_task(client.chat.completions.create(model="tiny", messages=MESSAGES))
        seen = await setup.engine.next()
        cancelled = await client.delete(f"/requests/{seen.header('x-request-id')}", cast_to=object)
        assert cancelled["status"] in ("stopping", "written_off", "settled")  # type: ignore[index]
        with pytest.raises(openai.APIStatusError) as caught:
            await asked
        assert caught.value.status_code == 499
        assert caught.value.code == "cancelled"
        await setup.next_settled()


async def test_openai_sync_whole_streamed_and_closed() -> None:
    async with gateway() as setup:
        client = openai.OpenAI(api_key="k", base_url=f"http://127.0.0.1:{setup.port}/v1", max_retries=0)

        def whole() -> str | None:
            return client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content

        def first_part() -> str | None:
            with client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) as stream:
                for chunk in stream:
                    return chunk.choices[0].delta.content
            return None

        asked = asyncio.create_task(asyncio.to_thread(whole))
        (await setup.engine.next()).json(COMPLETION)
        assert await asked == "hello"
        await setup.next_settled()
        asked = asyncio.create_task(asyncio.to_thread(first_part))
        seen = await setup.engine.next()
        seen.begin_stream()
        seen.write(part("one"))
        assert await asked == "one"
        await assert_stopped(setup, seen)
        client.close()


async def test_httpx_times_out() -> None:
    async with gateway() as setup, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{setup.port}/v1/completions"
        asked = asyncio.create_task(client.post(url, json={"model": "tiny"}, timeout=0.2))
        seen = await setup.engine.next()
        with pytest.raises(httpx.ReadTimeout):
            await asked
        await assert_stopped(setup, seen)


async def run(*command: str) -> asyncio.subprocess.Process:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed here")
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )


async def test_curl_gets_an_answer_and_is_interrupted() -> None:
    async with gateway() as setup:
        url = f"http://127.0.0.1:{setup.port}/v1/completions"
        curl = await run("curl", "-sN", "--noproxy", "*", url, "-d", '{"model":"tiny"}')
        (await setup.engine.next()).json({"text": "hello"})
        assert (await curl.communicate())[0] == b'{"text": "hello"}'
        await setup.next_settled()
        curl = await run("curl", "-sN", "--noproxy", "*", url, "-d", '{"model":"tiny","stream":true}')
        seen = await setup.engine.next()
        seen.begin_stream()
        seen.write(part("one"))
        assert curl.stdout is not None
        assert b"one" in await curl.stdout.readline()
        curl.terminate()
        await assert_stopped(setup, seen)
        await curl.communicate()


NODE = """
const controller = new AbortController()
const response = await fetch(process.argv[1], {
  method: 'POST', body: JSON.stringify({ model: 'tiny', stream: true }), signal: controller.signal,
  headers: { 'content-type': 'application/json' },
})
const reader = response.body.getReader()
await reader.read()
controller.abort()
try { await reader.read() } catch (error) { console.log(error.name) }
await new Promise(() => setInterval(() => {}, 1000))
"""


async def test_nodes_fetch_aborts() -> None:
    async with gateway() as setup:
        url = f"http://127.0.0.1:{setup.port}/v1/completions"
        node = await run("node", "--input-type=module", "-e", NODE, url)
        seen = await setup.engine.next()
        seen.begin_stream()
        seen.write(part("one"))
        assert node.stdout is not None
        assert await node.stdout.readline() == b"AbortError\n"
        # The process lives on: it is the abort, not the end of the process, that closes the connection.
        await assert_stopped(setup, seen)
        node.kill()
        await node.communicate()
