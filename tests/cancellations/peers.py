"""The two peers of these tests: an engine that does what its script says and reports exactly when its client
left, and a client on a raw socket that can leave in every way.

No test sleeps: everything waits for an event, and `LIMIT` only bounds how long a failing test takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

from stopguard.engines import OpenAIEngine
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.ledger import Book
from stopguard.stops import EngineProfile, StopConfig

LIMIT = 5.0


class Seen(asyncio.Protocol):
    """One connection to the scripted engine. `asked` becomes a future's result for every complete request."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.buffer = b""
        self.head = b""
        self.body = b""
        self.how = ""
        self.closed = asyncio.Event()
        self.transport: Any = None
        self.requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.engine.connections.add(self)
        self.engine.accepted += 1

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(self.buffer) < end + 4 + length:
                return
            self.head, self.body = head, self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            if head.startswith(b"GET /v1/models "):
                self.models()
            else:
                self.requests += 1
                self.engine.requests.put_nowait(self)

    def eof_received(self) -> None:
        self.how = self.how or "eof"
        self.closed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.how = self.how or ("reset" if error else "eof")
        self.closed.set()
        self.engine.connections.discard(self)

    def models(self) -> None:
        entries = [{"id": name, "object": "model"} for name in self.engine.models]
        self.json({"object": "list", "data": entries})

    # ---- what a script does ---------------------------------------------------------------------

    def header(self, name: str) -> str:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.decode().lower() == name.lower():
                return value.decode().strip()
        return ""

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def json(self, value: object, status: bytes = b"200 OK", extra: bytes = b"") -> None:
        body = json.dumps(value).encode()
        self.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
            % (status, extra, len(body), body)
        )

    def begin_stream(self) -> None:
        self.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def event(self, text: str) -> None:
        data = b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": text}}]}).encode()
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def close(self) -> None:
        self.transport.close()

    def reset(self) -> None:
        linger_zero(self.transport.get_extra_info("socket"))
        self.transport.abort()


class ScriptedEngine:
    """An engine that answers `/v1/models` and hands every other request to the test."""

    def __init__(self, models: tuple[str, ...] = ("tiny",)) -> None:
        self.models = models
        self.requests: asyncio.Queue[Seen] = asyncio.Queue()
        self.connections: set[Seen] = set()
        self.accepted = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Seen(self), "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for seen in list(self.connections):
            seen.transport.abort()
        await asyncio.sleep(0)

    async def next(self) -> Seen:
        async with asyncio.timeout(LIMIT):
            return await self.requests.get()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Client:
    """A client on a raw socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""

    @classmethod
    async def connect(cls, port: int, receive_buffer: int = 0, host: str = "127.0.0.1") -> Client:
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
        return cls(connection)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def ask(self, **fields: Any) -> None:
        await self.send(request(**fields))

    async def until(self, wanted: bytes) -> bytes:
        """Read until `wanted` has come; returns all that has come so far."""
        async with asyncio.timeout(LIMIT):
            while wanted not in self.received:
                data = await asyncio.get_running_loop().sock_recv(self.connection, 65536)
                if not data:
                    raise AssertionError(f"closed before {wanted!r}: {self.received!r}")
                self.received += data
        return self.received

    async def to_end(self) -> bytes:
        """Read until the gateway closes."""
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    data = await asyncio.get_running_loop().sock_recv(self.connection, 65536)
                except ConnectionResetError:
                    return self.received + b"<reset>"
                if not data:
                    return self.received
                self.received += data

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Read one response with a Content-Length, and take it from what was received."""
        await self.until(b"\r\n\r\n")
        head, _, rest = self.received.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", "0"))
        async with asyncio.timeout(LIMIT):
            while len(rest) < length:
                data = await asyncio.get_running_loop().sock_recv(self.connection, 65536)
                assert data, "closed inside a response"
                rest += data
        self.received = rest[length:]
        return int(lines[0].split()[1]), headers, rest[:length]

    # ---- ways to leave ---------------------------------------------------------------------------

    def close(self) -> None:
        self.connection.close()

    def reset(self) -> None:
        linger_zero(self.connection)
        self.connection.close()

    def half_close(self) -> None:
        self.connection.shutdown(socket.SHUT_WR)

    def leave(self, way: str) -> None:
        {"fin": self.close, "rst": self.reset, "half-close": self.half_close}[way]()


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110  (no event of ours: what is waited for is inside the gateway)
            await asyncio.sleep(0)


def linger_zero(connection: Any) -> None:
    """Closing it will send a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def request(
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    headers: dict[str, str] | None = None,
    stream: bool | None = None,
    body: bytes | None = None,
    version: str = "1.1",
    **fields: object,
) -> bytes:
    """One request as it goes over the wire."""
    if body is None:
        value: dict[str, object] = {"model": "tiny", "messages": []}
        if stream is not None:
            value["stream"] = stream
        value.update(fields)
        body = json.dumps(value).encode() if method == "POST" else b""
    lines = {"Host": "gateway", "Content-Type": "application/json"}
    if body or method == "POST":
        lines["Content-Length"] = str(len(body))
    lines.update(headers or {})
    head = f"{method} {path} HTTP/{version}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode() + b"\r\n" + body


class Setup:
    """A gateway in front of scripted engines."""

    def __init__(self, gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        self.gateway = gateway
        self.engines = engines
        self.engine = engines[0]
        self.settled: asyncio.Queue[Any] = asyncio.Queue()
        self.effects: list[Any] = []
        self.clients: list[Client] = []
        gateway.observers.append(self._observe)

    @property
    def port(self) -> int:
        return self.gateway.addresses[0][1]

    async def client(self, **options: Any) -> Client:
        client = await Client.connect(self.port, **options)
        self.clients.append(client)
        return client

    def close_clients(self) -> None:
        for client in self.clients:
            client.connection.close()

    async def next_settled(self) -> Any:
        """The next request whose books closed."""
        async with asyncio.timeout(LIMIT):
            return await self.settled.get()

    def assert_nothing_left(self) -> None:
        """No book, no name, no buffer, no exchange outlives its request."""
        gateway = self.gateway
        assert len(gateway.book) == 0, repr(gateway.book)
        assert len(gateway.registry) == 0
        assert not gateway.controller.tracked
        assert len(gateway.controller.wheel) == 0
        statistics = gateway.statistics()
        assert statistics.buffered_body_bytes == 0
        assert statistics.queued == statistics.aborts_in_flight == statistics.cancel_waiters == 0
        assert all(engine.load == engine.waiting_for_connection == 0 for engine in statistics.engines)
        assert statistics.failed_effects == 0
        gateway.book.verify()

    def _observe(self, effect: Any, at: float) -> None:
        self.effects.append(effect)
        if type(effect).__name__ == "Settled":
            self.settled.put_nowait(effect.tracked)


@contextlib.asynccontextmanager
async def gateway(
    settings: GatewaySettings | None = None,
    *,
    engines: int = 1,
    models: tuple[tuple[str, ...], ...] = (("tiny",),),
    engine_settings: EngineSettings | None = None,
    stop_config: StopConfig | None = None,
    profile: dict[str, Any] | None = None,
    engine_class: type[OpenAIEngine] = OpenAIEngine,
) -> AsyncIterator[Setup]:
    """A gateway on a free port, in front of `engines` scripted engines, stopped at the end."""
    scripted = [ScriptedEngine(models[min(number, len(models) - 1)]) for number in range(engines)]
    for engine in scripted:
        await engine.start()
    known = [engine_class(f"engine{number}", engine.url) for number, engine in enumerate(scripted)]
    for each in known:
        each.profile = EngineProfile(name=each.name, **(profile or {}))
    chosen = settings or GatewaySettings()
    chosen = _with_listener(chosen)
    running = Gateway(
        [(engine, engine_settings or EngineSettings()) for engine in known],
        chosen,
        book=Book(),
        stop_config=stop_config,
    )
    await running.start()
    setup = Setup(running, scripted)
    for member in running.fleet.members:
        await running.fleet.refresh(member)
    try:
        yield setup
    finally:
        setup.close_clients()
        await running.shutdown(drain_seconds=0.01)
        for engine in scripted:
            await engine.stop()


def _with_listener(settings: GatewaySettings) -> GatewaySettings:
    import msgspec

    return msgspec.structs.replace(settings, listeners=(Listener(port=0),))
