"""Starts the stand-in of `trtllm-serve` as a process of its own, with the patch or without, and a gateway before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx

from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.ledger import Book
from stopguard.stops import StopConfig
from stopguard_trtllm.adapter import TensorRTLLMAdapter

__all__ = ["LIMIT", "PATCH", "Front", "StandIn", "Visitor", "gateway", "launched", "standin"]

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "trtllm" / "standin"
PATCH = ROOT / "adapters" / "stopguard_trtllm" / "patch"
LIMIT = 90.0


class StandIn:
    """One running stand-in."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.client = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=LIMIT)

    async def truth(self) -> dict[str, Any]:
        told: dict[str, Any] = (await self.client.get("/standin/truth")).json()
        return told

    async def serves(self) -> bool:
        try:
            await self.truth()
        except httpx.TransportError:
            return False
        return True

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Its truth as soon as `condition` holds of it."""
        async with asyncio.timeout(LIMIT):
            while not condition(truth := await self.truth()):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.01)
        return truth

    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()


@contextlib.contextmanager
def launched(log: Path, *arguments: str, patch: bool | Path = False, **options: Any) -> Iterator[StandIn]:
    """A stand-in that listens. `options` become ``--name value``; True is a flag."""
    command = [sys.executable, "-m", "tensorrt_llm.commands.serve", "tiny", *arguments]
    if patch:
        command += ["--custom_module_dirs", str(PATCH if patch is True else patch)]
    for name, value in options.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("STOPGUARD", "PYTHON"))}
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=STANDIN,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        running = StandIn(process, int(line or 0), log)
        assert line, "the stand-in did not start:\n" + "\n".join(running.lines())
        yield running
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.asynccontextmanager
async def standin(log: Path, *arguments: str, patch: bool | Path = False, **options: Any) -> AsyncIterator[StandIn]:
    """A stand-in that serves; what its visitors left open is closed with it."""
    with launched(log, *arguments, patch=patch, **options) as running:
        try:
            async with running.client:
                async with asyncio.timeout(LIMIT):
                    while not await running.serves():  # noqa: ASYNC110 (another process)
                        await asyncio.sleep(0.02)
                yield running
        finally:
            for visitor in list(Visitor.here):
                await visitor.leave()


class Visitor:
    """A client on a raw connection, which may leave. Those that have not are closed when the stand-in ends."""

    here: ClassVar[set[Visitor]] = set()

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> Visitor:
        visitor = cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**24))
        cls.here.add(visitor)
        return visitor

    async def ask(self, path: str = "/v1/chat/completions", **fields: Any) -> None:
        content = {"model": "tiny", "max_tokens": 2000, **fields}
        if path.endswith("chat/completions"):
            content.setdefault("messages", [{"role": "user", "content": "a story"}])
        body = json.dumps(content).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def until(self, wanted: bytes) -> bytes:
        async with asyncio.timeout(LIMIT):
            return await self.reader.readuntil(wanted)

    async def answer(self) -> Any:
        """One whole answer with a length."""
        head = await self.until(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        async with asyncio.timeout(LIMIT):
            return json.loads(await self.reader.readexactly(length))

    async def leave(self) -> float:
        """Close; returns when, in monotonic seconds, a clock that all processes of the machine share."""
        at = time.monotonic()
        Visitor.here.discard(self)
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        return at


class Front:
    """A gateway with the adapter, and the books that were settled."""

    def __init__(self, running: Gateway, adapter: TensorRTLLMAdapter) -> None:
        self.gateway = running
        self.adapter = adapter
        self.port: int = running.addresses[0][1]
        self.settled: asyncio.Queue[Any] = asyncio.Queue()
        self.leaks: list[Any] = []
        running.observers.append(self._observe)

    def _observe(self, effect: Any, at: float) -> None:
        if type(effect).__name__ == "Settled":
            self.settled.put_nowait(effect.tracked)
        elif type(effect).__name__ == "Leaked":
            self.leaks.append(effect.leak)

    async def next_settled(self) -> Any:
        async with asyncio.timeout(LIMIT):
            return await self.settled.get()

    async def learn(self) -> None:
        """What the watching task does now and then: ask the engine, and take what its adapter has learnt."""
        for member in self.gateway.fleet.members:
            assert await self.gateway.fleet.refresh(member)

    @property
    def pool(self) -> Any:
        return self.gateway.fleet.members[0].pool


@contextlib.asynccontextmanager
async def gateway(engine: StandIn, **stop: Any) -> AsyncIterator[Front]:
    """A gateway in this process, in front of `engine`, which it has asked for its models."""
    adapter = TensorRTLLMAdapter("trtllm", engine.url)
    running = Gateway(
        [(adapter, EngineSettings())],
        GatewaySettings(listeners=(Listener(port=0),)),
        book=Book(),
        stop_config=StopConfig(**stop) if stop else None,
    )
    await running.start()
    front = Front(running, adapter)
    await front.learn()
    try:
        yield front
    finally:
        await running.shutdown(drain_seconds=0.01)
