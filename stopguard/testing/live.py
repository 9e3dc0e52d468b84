"""A storm over real sockets: the clients of a plan, against any server that speaks OpenAI's API.

Each client is a raw connection, since the ways of leaving that matter (FIN in the middle, RST, a cancel
call from elsewhere, a deadline in a header) are exactly what HTTP libraries hide. The number of clients,
their time and their bytes are bounded; the target is whatever loopback address it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from stopguard.errors import ConfigurationError
from stopguard.refengine import decode
from stopguard.testing.plan import ClientPlan, Ending, StormPlan

__all__ = ["LiveStorm"]

_KEY = "storm"
_READ_BYTES = 65536
_HEAD_BYTES = 65536
#: Who leaves before its first token, and how long after the request was sent.
_EARLY_SECONDS = {
    Ending.CANCEL_IN_ADMISSION: 0.0,
    Ending.CANCEL_WHILE_WAITING: 0.003,
    Ending.CANCEL_IN_PREFILL: 0.03,
}
_LEAVES_AFTER_TOKENS = (
    Ending.CANCEL_IN_DECODE,
    Ending.CANCEL_TWICE,
    Ending.CANCEL_WHILE_PREEMPTED,
    Ending.CANCEL_AT_THE_END,
)
_CALLS_THE_API = (Ending.CANCEL_BY_API, Ending.FAIL)
_RESET = struct.pack("ii", 1, 0)


class LiveStorm:
    """One storm's clients. `run` ends when all of them have; `outcomes` says what each came to.

    Every request asks for a total deadline of `patience_seconds`: no client waits for ever. `fail` is called
    with the id of each request that is planned to fail; without it these are cancelled through the API. `fields` go
    into every body.
    """

    def __init__(
        self,
        plan: StormPlan,
        base_url: str,
        *,
        model: str = "base",
        patience_seconds: float = 20.0,
        fail: Callable[[str], None] | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        target = urlsplit(base_url)
        if target.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigurationError(f"a storm is for a server on this machine, not for {base_url}")
        self.plan = plan
        self.host = target.hostname
        self.port = target.port or 80
        self.model = model
        self.patience_seconds = patience_seconds
        self._fail = fail
        self._fields = fields or {}
        self.outcomes: Counter[str] = Counter()
        self.ended = 0

    async def run(self) -> None:
        """Let every client arrive at its time and behave as planned."""
        async with asyncio.TaskGroup() as group:
            for client in self.plan.clients:
                group.create_task(self._live(client))

    async def _live(self, plan: ClientPlan) -> None:
        await asyncio.sleep(plan.arrives_after_seconds)
        try:
            async with asyncio.timeout(self.patience_seconds + 5.0):
                self.outcomes[await self._request(plan)] += 1
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            self.outcomes[f"error: {type(error).__name__}"] += 1
        finally:
            self.ended += 1

    async def _request(self, plan: ClientPlan) -> str:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(self._message(plan))
            ending = plan.ending
            if ending in _EARLY_SECONDS:
                await writer.drain()
                await asyncio.sleep(
                    {Ending.CANCEL_IN_ADMISSION: 0.0, Ending.CANCEL_WHILE_WAITING: 0.003}.get(ending, 0.03)
                )
                _leave(writer, reset=plan.number % 2 == 0)
                return "left"
            if not plan.stream and ending in (*_LEAVES_AFTER_TOKENS, *_CALLS_THE_API):
                # Nothing comes before the end, so the number of tokens is a time.
                await asyncio.sleep(0.01 * plan.after_tokens)
                _leave(writer, reset=plan.number % 2 == 0)
                return "left"
            head = await reader.readuntil(b"\r\n\r\n")
            status = head.split(b" ", 2)[1].decode()
            if not plan.stream or status != "200":  # an error is no stream
                await self._read_sized(reader, head)
                return status
            return await self._stream(plan, reader, writer, head)
        finally:
            writer.close()
            with contextlib.suppress(OSError, ConnectionError):
                await writer.wait_closed()

    async def _stream(
        self, plan: ClientPlan, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> str:
        """Count the events as they come, and leave or call the API at the planned one."""
        events, tail, called = 0, b"", False
        goal = max(1, plan.max_tokens * plan.n - 1) if plan.ending is Ending.CANCEL_AT_THE_END else plan.after_tokens
        while True:
            data = await reader.read(_READ_BYTES)
            if not data:
                return "cut" if not tail.endswith(b"0\r\n\r\n") else "ended"
            events += data.count(b"data: ")
            tail = (tail + data)[-256:]
            if b"data: [DONE]" in tail and tail.endswith(b"0\r\n\r\n"):
                return "told" if called else "served"
            if events >= goal and not called:
                if plan.ending in _LEAVES_AFTER_TOKENS:
                    _leave(writer, reset=plan.number % 2 == 0)
                    if plan.ending is Ending.CANCEL_TWICE:
                        await self._cancel(head)
                    return "left"
                if plan.ending in _CALLS_THE_API:
                    called = True
                    await self._end_from_outside(plan, head)

    async def _end_from_outside(self, plan: ClientPlan, head: bytes) -> None:
        """Somebody else ends the request: its owner through the cancel API, or whoever `fail` stands for."""
        request_id = _header(head, b"x-stopguard-id")
        if plan.ending is Ending.FAIL and self._fail is not None and request_id is not None:
            self._fail(request_id.decode())
        else:
            await self._cancel(head)

    async def _cancel(self, head: bytes) -> None:
        """Call the cancel API for the request whose response begins with `head`."""
        request_id = _header(head, b"x-stopguard-id")
        if request_id is None:
            return
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(
                b"DELETE /v1/requests/%b HTTP/1.1\r\nhost: storm\r\nauthorization: Bearer %b\r\n\r\n"
                % (request_id, _KEY.encode())
            )
            await self._read_sized(reader, await reader.readuntil(b"\r\n\r\n"))
        finally:
            writer.close()

    async def _read_sized(self, reader: asyncio.StreamReader, head: bytes) -> bytes:
        length = _header(head, b"content-length")
        return await reader.readexactly(int(length)) if length is not None else b""

    def _message(self, plan: ClientPlan) -> bytes:
        """The request as bytes, the same for the same plan."""
        rng = random.Random(f"{self.plan.seed}/{plan.number}")
        prompt = decode([rng.randrange(260, 480) for _ in range(plan.prompt_tokens)])
        body: dict[str, object] = {
            "model": f"{self.model}:{plan.lora}" if plan.lora else self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": plan.max_tokens,
            "stream": plan.stream,
            "n": plan.n,
            **self._fields,
        }
        if plan.priority:
            body["priority"] = plan.priority
        if plan.grammar:
            body["response_format"] = {"type": "json_object"}
        data = json.dumps(body).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: storm",
            f"Authorization: Bearer {_KEY}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        patience = self.patience_seconds
        if plan.ending is Ending.CANCEL_BY_DEADLINE:
            patience = 0.05 + 0.005 * plan.after_tokens
        lines.append(f"X-StopGuard-Timeout: {patience:.3f}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def _leave(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Close the connection, by a FIN or (`reset`) by a RST."""
    if reset:
        connection = writer.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort() if reset else writer.close()


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None
