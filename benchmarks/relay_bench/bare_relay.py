"""The floor: a relay with no books, ids, limits or metrics, on the parts that StopGuard's own relay is made of.

Run as ``python -m benchmarks.relay_bench.bare_relay LISTEN_PORT UPSTREAM_PORT``. What StopGuard costs above this row is
what its accounting costs. It is no proxy to use: it buffers whole request bodies and passes on no request header but
the type.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import ClassVar, cast

import httptools
import uvloop


class Upstream(asyncio.Protocol):
    """A pooled connection to the engine; passes response bytes through untouched."""

    idle: ClassVar[deque[Upstream]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self.downstream: Downstream | None = None
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if self.downstream is not None:
            self.downstream.transport.write(data)
            self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self.downstream is not None
        self.downstream.upstream = None
        self.downstream = None
        Upstream.idle.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self.downstream is not None:
            self.downstream.transport.abort()
        elif self in Upstream.idle:
            Upstream.idle.remove(self)


class Downstream(asyncio.Protocol):
    """A client's connection."""

    upstream_port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self.parser = httptools.HttpRequestParser(self)
        self.upstream: Upstream | None = None
        self.url = b""
        self.body = b""
        self.connecting: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_message_begin(self) -> None:
        self.url = self.body = b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        line = self.parser.get_method() + b" " + self.url
        head = b"%s HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        request = head % (line, len(self.body)) + self.body
        if Upstream.idle:
            self.send(Upstream.idle.pop(), request)
        else:
            self.connecting = asyncio.ensure_future(self.connect(request))

    async def connect(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, upstream = await loop.create_connection(Upstream, "127.0.0.1", self.upstream_port)
        except OSError:
            self.transport.abort()
            return
        self.send(upstream, request)

    def send(self, upstream: Upstream, request: bytes) -> None:
        upstream.downstream = self
        self.upstream = upstream
        upstream.transport.write(request)

    def pause_writing(self) -> None:
        if self.upstream is not None:
            self.upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.upstream is not None:
            self.upstream.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.connecting is not None:
            self.connecting.cancel()
        if self.upstream is not None:
            self.upstream.downstream = None
            self.upstream.transport.abort()


async def _serve(listen_port: int, upstream_port: int) -> None:
    Downstream.upstream_port = upstream_port
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Downstream, "127.0.0.1", listen_port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
