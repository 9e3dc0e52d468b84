"""`DisconnectGuard` in a real uvicorn with FastAPI, on both of its HTTP parsers, with and without the guard."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware

from stopguard.middleware import DisconnectGuard

pytestmark = pytest.mark.anyio

LIMIT = 10.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Server(uvicorn.Server):
    """pytest keeps its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Site:
    """An application whose handlers wait, and what became of them."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.entered = asyncio.Event()
        self.go = asyncio.Event()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.app.post("/answer")(self.answer)
        self.app.post("/stream")(self.stream)
        self.app.post("/shielded")(self.shielded)
        self.app.post("/quick")(self.quick)
        self.app.post("/background")(self.background)
        self.url = ""
        self.port = 0

    async def _wait(self, name: str) -> None:
        self.entered.set()
        try:
            await self.go.wait()
            self.ended.put_nowait(f"{name} answered")
        except asyncio.CancelledError:
            self.ended.put_nowait(f"{name} cancelled")
            raise

    async def answer(self, request: Request) -> dict[str, str]:
        await request.json()
        await self._wait("answer")
        return {"text": "all"}

    async def stream(self) -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: half\n\n"
            await self._wait("stream")
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def shielded(self) -> dict[str, str]:
        async def give_back() -> None:
            await asyncio.sleep(0)
            self.ended.put_nowait("given back")

        self.entered.set()
        try:
            await self.go.wait()
        finally:
            await asyncio.shield(give_back())
        return {}

    async def quick(self, request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    async def background(self) -> StreamingResponse:
        from starlette.background import BackgroundTask

        async def later() -> None:
            await self._wait("background")

        async def events() -> AsyncIterator[bytes]:
            yield b"data: all\n\n"

        return StreamingResponse(events(), background=BackgroundTask(later))

    async def next(self) -> str:
        async with asyncio.timeout(LIMIT):
            return await self.ended.get()

    async def leave(
        self, path: str, *, until: bytes = b"", content: bytes = b"{}", declared: int | None = None
    ) -> None:
        """Send a request over a raw socket, wait until its handler is there (or `until` was read), and close."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        length = len(content) if declared is None else declared
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), length) + content)
        async with asyncio.timeout(LIMIT):
            if until:
                await reader.readuntil(until)
            if declared is None:
                await self.entered.wait()
            else:
                await writer.drain()
        writer.close()
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(application: Any, parser: str) -> AsyncIterator[int]:
    # asyncio switches Nagle off only where the protocol is named.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(application, http=parser, ws="none", log_config=None, access_log=False)
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(LIMIT):
            while not server.started:  # noqa: ASYNC110 (uvicorn says it nowhere else)
                await asyncio.sleep(0.005)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task
        listener.close()


@pytest.fixture(params=["h11", "httptools"])
def parser(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def site(parser: str, *, wrapped: bool = False, **options: Any) -> AsyncIterator[tuple[Site, DisconnectGuard]]:
    """With `wrapped`, a middleware of Starlette's own kind is between, which keeps disconnects to itself."""
    made = Site()
    if wrapped:

        async def pass_on(request: Request, call_next: Any) -> Any:
            return await call_next(request)

        made.app.add_middleware(BaseHTTPMiddleware, dispatch=pass_on)
    guard = DisconnectGuard(made.app, **options)
    async with serving(guard, parser) as port:
        made.port, made.url = port, f"http://127.0.0.1:{port}"
        yield made, guard
        made.go.set()


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "base-http-middleware"])
async def test_a_waiting_handler_is_cancelled(parser: str, wrapped: bool) -> None:
    async with site(parser, wrapped=wrapped) as (made, _):
        await made.leave("/answer")
        assert await made.next() == "answer cancelled"


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "base-http-middleware"])
async def test_a_stream_is_stopped(parser: str, wrapped: bool) -> None:
    async with site(parser, wrapped=wrapped) as (made, _):
        await made.leave("/stream", until=b"half\n\n")
        assert await made.next() == "stream cancelled"


async def test_without_the_guard_nobody_tells_a_waiting_handler(parser: str) -> None:
    made = Site()
    async with serving(made.app, parser) as port:
        made.port = port
        await made.leave("/answer")
        # The server has closed its side of the connection, and with it the only news there was.
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(f"http://127.0.0.1:{port}/quick")).status_code == 200
        assert made.ended.empty()
        made.go.set()
        assert await made.next() == "answer answered"


async def test_cleanup_runs_to_its_end(parser: str) -> None:
    async with site(parser) as (made, _):
        await made.leave("/shielded")
        assert await made.next() == "given back"


async def test_it_leaves_in_the_middle_of_its_upload(parser: str) -> None:
    async with site(parser) as (made, guard):
        await made.leave("/answer", content=b'{"half":', declared=1000)
        async with asyncio.timeout(LIMIT):
            while guard.statistics().listened_total + guard.statistics().cancelled_total < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert guard.statistics().requests_open == 0
        assert made.ended.empty()


async def test_background_work_outlives_a_client_that_left_after_the_end(parser: str) -> None:
    async with site(parser) as (made, guard):
        await made.leave("/background", until=b"0\r\n\r\n")
        made.entered.clear()
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(f"{made.url}/quick")).status_code == 200
        made.go.set()
        assert await made.next() == "background answered"
        assert guard.statistics().cancelled_total == 0


async def test_a_large_upload_arrives(parser: str) -> None:
    async with site(parser, read_ahead_bytes=10_000) as (made, _), httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{made.url}/quick", content=b"x" * 5_000_000)
        assert answer.json() == {"bytes": 5_000_000}


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_ten_thousand_requests_on_one_connection_leave_nothing(parser: str) -> None:
    async with site(parser) as (made, guard):
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        question = b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"

        async def ask(times: int) -> None:
            for _ in range(times):
                writer.write(question)
                await reader.readuntil(b"}")

        await ask(100)
        gc.collect()
        tasks, objects = len(asyncio.all_tasks()), len(gc.get_objects())
        await ask(10_000)
        gc.collect()
        assert len(asyncio.all_tasks()) == tasks
        assert len(gc.get_objects()) - objects < 500
        statistics = guard.statistics()
        assert (statistics.requests_open, statistics.watchers_open) == (0, 0)
        assert (statistics.finished_total, statistics.cancelled_total) == (10_100, 0)
        writer.close()
        await writer.wait_closed()


async def test_many_clients_leave_at_once(parser: str) -> None:
    async with site(parser) as (made, guard):
        await asyncio.gather(*[made.leave("/answer") for _ in range(200)])
        ended = [await made.next() for _ in range(200 - guard.statistics().listened_total)]
        assert set(ended) <= {"answer cancelled"}
        async with asyncio.timeout(LIMIT):
            while guard.statistics().requests_open:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        statistics = guard.statistics()
        assert statistics.watchers_open == 0
        assert statistics.cancelled_total + statistics.listened_total == 200
