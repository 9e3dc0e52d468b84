"""The virtual world: the reference engine's HTTP face in this process, and time that only the audit moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stopguard.audit.world import Answer, Call, Exchange, Leaving, Reply
from stopguard.refengine.http_virtual import VirtualExchange, VirtualServer


class _Exchange:
    """A virtual exchange, and its reply as far as it has been read."""

    def __init__(self, inner: VirtualExchange, *, stream: bool) -> None:
        self.inner = inner
        self.reply = Reply(stream=stream)
        self.left = False
        self.stalled = False
        self._read = 0

    def read(self, at: float) -> None:
        if self.left or self.reply.ended:
            return
        if self.inner.status is not None and self.reply.status is None:
            self.reply.head(self.inner.status, at)
        for part in self.inner.parts[self._read :]:
            self.reply.data(part, at)
        self._read = len(self.inner.parts)
        if self.inner.complete:
            self.reply.end(at)
        elif self.inner.ended:
            self.reply.fail("the connection was closed", at)

    @property
    def open(self) -> bool:
        return not self.left

    async def leave(self, how: Leaving = "fin") -> None:
        self.left = True
        await self.inner.disconnect()

    def stall(self) -> None:
        self.inner.stall()


class VirtualWorld:
    """`World` over a `VirtualServer`."""

    def __init__(self, server: VirtualServer) -> None:
        self.server = server
        self.exchanges: list[_Exchange] = []
        self.controls = 0

    def now(self) -> float:
        return self.server.clock.at

    def _read(self) -> None:
        at = self.now()
        for exchange in self.exchanges:
            exchange.read(at)

    async def sleep(self, seconds: float) -> None:
        await self.wait(lambda: False, seconds)

    async def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        server = self.server
        end = server.clock.at + seconds
        self._read()
        while not condition():
            due = server.face.driver.due_at()
            if due is None or due > end:
                await server.advance(max(0.0, end - server.clock.at))
                self._read()
                return condition()
            await server.advance(max(0.0, due - server.clock.at))
            self._read()
        return True

    async def open(self, call: Call, after: Exchange | None = None) -> _Exchange:
        self.exchanges = [known for known in self.exchanges if not (known.left or known.reply.ended)]
        inner = await self.server.open("POST", call.path, call.body, call.headers)
        exchange = _Exchange(inner, stream=bool(call.body.get("stream")))
        self.exchanges.append(exchange)
        self._read()
        return exchange

    async def control(self, method: str, path: str, body: Any = None) -> Answer:
        self.controls += 1
        inner = await self.server.open(method, path, body)
        assert inner.ended
        return Answer(status=inner.status or 0, body=inner.body, headers=inner.headers)

    async def aclose(self) -> None:
        for exchange in self.exchanges:
            await exchange.inner.disconnect()
        self.exchanges.clear()


def settled(server: VirtualServer) -> bool:
    """Whether the engine, its driver and its face hold nothing."""
    snapshot = msgspec.to_builtins(server.snapshot())
    return not snapshot["requests"] and not server.face.exchanges
