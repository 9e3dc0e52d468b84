"""A collector with an audience that remembers, a probe that is only a socket, and ways to wait without sleeping."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from stopguard.probe import wire
from stopguard.probe.collector import Collector, Source
from stopguard.probe.link import ProbeLimits
from stopguard.probe.sender import Sender

TOKEN = "a-token-of-some-length"
QUICK = (0.005, 0.01)
HELLO = wire.Hello(
    proof=b"", engine="x", engine_version="1", instance="", commands=("abort", "snapshot"), blocks_total=8
)


def frame(sequence: int, *events: wire.Event) -> wire.Frame:
    return wire.Frame(sequence, sequence, 0.5 * sequence, list(events), 0, 0, 8, 0)


def snapshot(command_id: int, sequence: int, *requests: wire.RequestNow) -> wire.Snapshot:
    return wire.Snapshot(command_id, sequence, sequence, 1.0, list(requests), 0, 0, 8, 0)


class Audience:
    """Remembers what it is told, and lets a test wait for it."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.said: list[str] = []
        self.frames: list[wire.Frame] = []
        self.sources: list[Source] = []
        self._news = asyncio.Event()

    def _note(self, text: str) -> None:
        self.said.append(text)
        self._news.set()

    def attached(self, source: Source) -> str:
        source.engine = source.hello.name or "e"
        self.sources.append(source)
        self._note("attached")
        return self.refuse

    def described(self, source: Source) -> None:
        self._note(f"described {source.hello.hooks_missing}")

    def frame(self, source: Source, frame: wire.Frame, at: float) -> None:
        self.frames.append(frame)
        self._note(f"frame {frame.sequence}")

    def gap(self, source: Source, frames_missed: int, at: float) -> None:
        self._note(f"gap {frames_missed}")

    def snapshot(self, source: Source, snapshot: wire.Snapshot, at: float, gap_since: float | None) -> None:
        self._note("snapshot" if gap_since is None else "snapshot closes the gap")

    def detached(self, source: Source, at: float, why: str) -> None:
        self._note(f"detached: {why}")

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` holds; looked at whenever something is said."""
        async with asyncio.timeout(10):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def hears(self, text: str) -> None:
        await self.until(lambda: text in self.said)


@asynccontextmanager
async def collecting(
    audience: Audience | None = None, address: str = "tcp://127.0.0.1:1", limits: ProbeLimits | None = None
) -> AsyncIterator[tuple[Collector, Audience]]:
    """A collector that listens; `address` with port 1 stands for any free one."""
    told = audience or Audience()
    if address == "tcp://127.0.0.1:1":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    collector = Collector([address], TOKEN, told, limits)
    await collector.start()
    try:
        yield collector, told
    finally:
        await collector.close()


def sender_to(address: str, **changes: Any) -> Sender:
    changes.setdefault("retry_seconds", QUICK)
    changes.setdefault("refused_retry_seconds", QUICK[-1])
    return Sender(address, changes.pop("token", TOKEN), changes.pop("hello", HELLO), **changes)


class RawProbe:
    """The engine's end by hand: says exactly what a test wants said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, address: str) -> RawProbe:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port)))

    @classmethod
    async def attached(cls, address: str, instance: str = "i1", **hello: Any) -> RawProbe:
        """One that has shaken hands."""
        probe = await cls.connect(address)
        nonce = b"n" * wire.NONCE_BYTES
        probe.say(wire.Greeting(wire.SCHEMA_VERSION, nonce))
        challenge = await probe.hear(wire.Challenge)
        proof = wire.engine_proof(TOKEN, nonce, challenge.nonce)
        probe.say(msgspec.structs.replace(HELLO, proof=proof, instance=instance, **hello))
        await probe.hear(wire.Welcome)
        return probe

    def say(self, message: wire.FromEngine) -> None:
        self.writer.write(wire.encode(message))

    async def hear(self, kind: type[Any]) -> Any:
        """The next message of a kind, others skipped."""
        async with asyncio.timeout(10):
            while True:
                size = int.from_bytes(await self.reader.readexactly(4), "big")
                message = wire.decode_from_collector(await self.reader.readexactly(size))
                if isinstance(message, kind):
                    return message

    async def ended(self) -> bool:
        """Whether the collector closes the connection."""
        async with asyncio.timeout(10):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
        return True

    async def close(self) -> None:
        self.writer.close()
