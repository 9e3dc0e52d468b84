"""A server by hand: it says what the test tells it to say, and keeps what the application sends.

Its `receive` behaves like uvicorn's: it waits for news, and after the response's end or the client's it says
``http.disconnect`` for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from stopguard.middleware import Application, DisconnectGuard

__all__ = ["Server", "body", "serve", "start", "turns"]

Message = dict[str, Any]


class Server:
    """One request of one client."""

    def __init__(self, *, silent_after_end: bool = False) -> None:
        #: A server that keeps quiet after a normal end, as some behind a keep-alive proxy do.
        self.silent_after_end = silent_after_end
        self.sent: list[Any] = []
        self.asked = 0
        self.gone = False
        self.block_send: asyncio.Event | None = None
        self.fail: Exception | None = None
        self._news: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._complete = False

    def uploads(self, content: bytes, *, more: bool = False) -> None:
        self._news.append({"type": "http.request", "body": content, "more_body": more})
        self._wake.set()

    def client_leaves(self) -> None:
        self.gone = True
        self._wake.set()

    def breaks(self, error: Exception) -> None:
        self.fail = error
        self._wake.set()

    async def receive(self) -> Any:
        self.asked += 1
        while True:
            if self.fail is not None:
                raise self.fail
            if self.gone or (self._complete and not self.silent_after_end):
                return {"type": "http.disconnect"}
            if self._news:
                return self._news.popleft()
            self._wake.clear()
            await self._wake.wait()

    async def send(self, message: Any) -> None:
        if self.block_send is not None:
            await self.block_send.wait()
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True
            self._wake.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent if message["type"] == "http.response.body")


def serve(
    application: Application, server: Server, *, headers: tuple[tuple[bytes, bytes], ...] = (), **options: Any
) -> tuple[DisconnectGuard, asyncio.Task[None]]:
    """Run one request through a guard, in a task as servers do."""
    guard = DisconnectGuard(application, **options)
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": list(headers)}

    async def run() -> None:
        await guard(scope, server.receive, server.send)

    return guard, asyncio.get_running_loop().create_task(run(), name="request")


async def turns(condition: Callable[[], bool], most: int = 200) -> None:
    """Let the loop turn until `condition` holds; fails when it does not."""
    for _ in range(most):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


def start(**fields: Any) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [], **fields}


def body(content: bytes = b"", *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
