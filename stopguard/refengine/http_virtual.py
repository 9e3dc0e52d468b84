"""Virtual time: the whole face in one process, no socket, no waiting, and the same bytes in every run.

`VirtualServer` runs the ASGI application in the caller's event loop. Time stands still except inside
`advance`, `run_until` and `finish`, which jump from event to event. A `VirtualExchange` is one client's
connection: it can leave (`disconnect`) or stop reading (`stall`) at any moment, which no ASGI test
transport of the usual HTTP clients can do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from stopguard.errors import LimitReached
from stopguard.refengine.engine import ReferenceEngine
from stopguard.refengine.hooks import Fault
from stopguard.refengine.http_app import Application
from stopguard.refengine.http_driver import VirtualClock
from stopguard.refengine.http_face import Face, FaceOptions
from stopguard.refengine.interface import EngineConfig, EngineSnapshot
from stopguard.refengine.policies import Policy

__all__ = ["VirtualExchange", "VirtualServer"]

#: Turns of the event loop without any message before everybody is taken to be waiting. A wake-up needs up to
#: three (future, task, message); twice as many cost nothing.
_QUIET_TURNS: Final = 6
_EVENTS_MAX: Final = 1_000_000


class VirtualExchange:
    """One request and what has come back so far."""

    def __init__(
        self, server: VirtualServer, scope: dict[str, Any], parts: Sequence[bytes], *, upload_ends: bool
    ) -> None:
        self._server = server
        self._scope = scope
        self._parts = list(parts)
        self._upload_ends = upload_ends
        self._gone = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        #: Body parts as they came, one for each write of the server.
        self.parts: list[bytes] = []
        #: The response has ended properly.
        self.complete = False
        self._task = asyncio.create_task(server.application(scope, self._receive, self._send))

    @property
    def ended(self) -> bool:
        """The server has let go of the request; an exception of the application is raised here."""
        if not self._task.done():
            return False
        self._task.result()
        return True

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[Any]:
        """The server-sent events so far, decoded; `[DONE]` is the string."""
        found: list[Any] = []
        for block in self.body.decode().split("\n\n"):
            if block.startswith("data: "):
                data = block.removeprefix("data: ")
                found.append(data if data == "[DONE]" else msgspec.json.decode(data))
        return found

    def text(self, index: int = 0) -> str:
        """What choice `index` of an OpenAI stream says so far."""
        return "".join(
            choice.get("text", "") or choice.get("delta", {}).get("content", "") or ""
            for event in self.events
            if isinstance(event, dict)
            for choice in event.get("choices", ())
            if choice["index"] == index
        )

    async def disconnect(self) -> None:
        """Close the connection now, and let the server see it."""
        self._gone.set()
        await self._server.settle()

    def stall(self) -> None:
        """Read nothing more: the server's writes wait."""
        self._reading.clear()

    def read_on(self) -> None:
        """End a stall."""
        self._reading.set()

    async def _receive(self) -> dict[str, Any]:
        self._server.activity += 1
        if self._parts and not self._gone.is_set():
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts) or not self._upload_ends}
        await self._gone.wait()
        self._server.activity += 1
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self._server.activity += 1
        if not self._reading.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._reading, self._gone)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if self._gone.is_set():
            return  # what a server writes to a closed connection is lost
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        if message.get("body"):
            self.parts.append(message["body"])
        self.complete = self.complete or not message.get("more_body", False)
        if self.complete and self._server.disconnects_after_end:
            self._gone.set()


class VirtualServer:
    """One engine and its face, in virtual time."""

    def __init__(
        self,
        policy: Policy | str = "vllm",
        config: EngineConfig | None = None,
        faults: Sequence[Fault | str] = (),
        seed: int = 0,
        options: FaceOptions | None = None,
        **face: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.engine = ReferenceEngine(config or EngineConfig(), policy, faults, seed)
        self.face = Face(self.engine, self.clock, options, seed=seed, **face)
        self.application = Application(self.face)
        self.activity = 0
        #: As in uvicorn: `receive` says disconnect after a normal end, too. Other servers say nothing more.
        self.disconnects_after_end = True
        self._exchanges: list[VirtualExchange] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what is open; an exception inside the application is raised, unless there is one already."""
        for exchange in self._exchanges:
            await exchange.disconnect()
        results = await asyncio.gather(*(exchange._task for exchange in self._exchanges), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and error is None:
                raise result

    # Requests -------------------------------------------------------------------------------------

    async def open(
        self,
        method: str,
        target: str,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        body: bytes | Sequence[bytes] = b"",
        upload_ends: bool = True,
    ) -> VirtualExchange:
        """Send a request and let the server take it; no time passes. `body` may come in parts, and may never end."""
        path, _, query = target.partition("?")
        parts = [body] if isinstance(body, bytes) else list(body)
        if json is not None:
            parts = [msgspec.json.encode(json)]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        exchange = VirtualExchange(self, scope, parts, upload_ends=upload_ends)
        self._exchanges = [known for known in self._exchanges if not known._task.done()] + [exchange]
        await self.settle()
        return exchange

    async def fetch(self, method: str, target: str, json: Any = None, **options: Any) -> VirtualExchange:
        """Send a request and let time pass until its response has ended."""
        exchange = await self.open(method, target, json, **options)
        await self.run_until(lambda: exchange.ended)
        return exchange

    # Time -----------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Let every task of the server run until all of them wait."""
        quiet, seen = 0, self.activity
        while quiet < _QUIET_TURNS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self.activity == seen else 0
            seen = self.activity

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, event by event."""
        end = self.clock.at + seconds
        for _ in range(_EVENTS_MAX):
            due = self.face.driver.due_at()
            if due is None or due > end:
                break
            await self._jump(due)
        self.clock.at = max(self.clock.at, end)
        await self.settle()

    async def run_until(self, condition: Callable[[], bool], seconds_max: float = 3600.0) -> None:
        """Let time pass until `condition` holds; `LimitReached` when it does not within `seconds_max`, or never can."""
        end = self.clock.at + seconds_max
        await self.settle()
        for _ in range(_EVENTS_MAX):
            if condition():
                return
            due = self.face.driver.due_at()
            if due is None or due > end:
                raise LimitReached("virtual seconds", int(seconds_max), f"nothing more happens: {self.engine!r}")
            await self._jump(due)
        raise LimitReached("virtual events", _EVENTS_MAX, "the condition never held")

    async def finish(self) -> EngineSnapshot:
        """Let time pass until no event is due any more; returns what is still open then."""
        await self.run_until(lambda: self.face.driver.due_at() is None)
        return self.snapshot()

    def snapshot(self) -> EngineSnapshot:
        return self.engine.snapshot(self.face.driver.catch_up())

    async def _jump(self, at: float) -> None:
        self.clock.at = max(self.clock.at, at)
        self.face.driver.catch_up()
        await self.settle()
