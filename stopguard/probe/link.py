"""One probe's connection, from the collector's side: framing, the handshake, and what it may cost.

A peer that has not proved that it knows the token gets one small buffer, a few seconds and one answer. After that
it is trusted to speak for its engine, and still bounded: a message by its size, what waits for it by the
transport's buffer, silence by a time. Whatever it does wrong closes its connection and nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Protocol, cast

import msgspec

from stopguard.probe import wire

__all__ = ["ClockOffset", "Link", "LinkOwner", "ProbeLimits"]

_FIRST_PINGS_SECONDS: Final = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class ProbeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What probes may take up. `unproved` connections are those whose peer has not shown that it knows the token."""

    connections: int = 256
    unproved: int = 32
    orders: int = 8192
    handshake_seconds: float = 5.0
    ping_seconds: float = 5.0
    silence_seconds: float = 20.0
    write_buffer_bytes: int = 1024 * 1024
    message_bytes: int = wire.MESSAGE_BYTES_MAX


class ClockOffset:
    """How far an engine's clock is ahead of ours, from the ping that took the shortest way of the last few."""

    __slots__ = ("_samples", "error_seconds", "seconds")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=16)
        self.seconds: float | None = None
        self.error_seconds = float("inf")

    def add(self, sent_at: float, engine_received_at: float, engine_sent_at: float, received_at: float) -> None:
        """One ping: our two readings around the engine's two. The truth is within half of the time on the way."""
        on_the_way = (received_at - sent_at) - (engine_sent_at - engine_received_at)
        if not 0 <= on_the_way < float("inf"):
            return  # a clock that jumps, or a lie
        offset = ((engine_received_at - sent_at) + (engine_sent_at - received_at)) / 2
        self._samples.append((on_the_way, offset))
        best = min(self._samples)
        self.seconds, self.error_seconds = best[1], best[0] / 2


class LinkOwner(Protocol):
    """What a link needs of the collector."""

    token: str
    limits: ProbeLimits

    def refused(self, link: Link, refusal: wire.Refusal, detail: str) -> None:
        """The peer was sent away during the handshake."""

    def proved(self, link: Link, hello: wire.Hello) -> str:
        """The handshake is done. A reason not to take it, or nothing."""

    def heard(self, link: Link, message: wire.FromEngine, at: float) -> None:
        """A message of a peer that was taken."""

    def lost(self, link: Link, why: str) -> None:
        """The connection is closed; whether or not it had been proved."""


class Link(asyncio.Protocol):
    """One connection. `clock` is measured from the moment it is open."""

    def __init__(self, owner: LinkOwner, *, admit: Callable[[Link], bool]) -> None:
        self._owner = owner
        self._admit = admit
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._engine_nonce = b""
        self._nonce = b""
        self._timer: asyncio.TimerHandle | None = None
        self._pings: dict[int, float] = {}
        self._ping_id = 0
        self._why = "it closed the connection"
        self.peer = "?"
        self.open = False
        self.closed = False
        self.heard_at = 0.0
        self.clock = ClockOffset()

    # ---- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._owner.limits.write_buffer_bytes)
        name: Any = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) > 1 else "a Unix socket"
        if not self._admit(self):
            self._transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._owner.limits.handshake_seconds, self._too_slow)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start, size = 0, len(buffer)
        while not self.closed and size - start >= 4:
            length = int.from_bytes(buffer[start : start + 4], "big")
            longest = self._owner.limits.message_bytes if self.open else wire.HANDSHAKE_BYTES_MAX
            if length > longest:
                self._refuse("protocol", f"a message of {length} bytes is longer than {longest}: this is no probe")
                return
            if size - start - 4 < length:
                break
            payload = bytes(memoryview(buffer)[start + 4 : start + 4 + length])
            start += 4 + length
            try:
                message = wire.decode_from_engine(payload)
            except msgspec.DecodeError as error:
                self._refuse("protocol", f"it sent what is no message of schema {wire.SCHEMA_VERSION} ({error})")
                return
            # Each by its own time: what the one before set off has been booked meanwhile.
            self._take(message, monotonic())
        if start:
            del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._buffer.clear()
        self._pings.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owner.lost(self, str(exc) if exc is not None else self._why)

    # ---- the collector's side --------------------------------------------------------------------

    def send(self, message: wire.FromCollector) -> bool:
        """Send one message; False when the connection is closed, or was closed because its peer does not read."""
        transport = self._transport
        if self.closed or transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > self._owner.limits.write_buffer_bytes:
            self._why = "it does not read"
            transport.abort()
            return False
        transport.write(wire.encode(message))
        return True

    def close(self, why: str) -> None:
        """Close it, with what was sent before."""
        self._why = why
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _take(self, message: wire.FromEngine, at: float) -> None:
        self.heard_at = at
        if self.open:
            if isinstance(message, wire.Pong):
                sent_at = self._pings.pop(message.ping_id, None)
                if sent_at is not None:
                    self.clock.add(sent_at, message.received_at, message.sent_at, at)
            elif isinstance(message, wire.Greeting):
                self._refuse("protocol", "it greeted twice")
            else:
                self._owner.heard(self, message, at)
        elif isinstance(message, wire.Greeting) and not self._nonce:
            self._challenge(message)
        elif isinstance(message, wire.Hello) and self._nonce:
            self._welcome(message, at)
        else:
            self._refuse("protocol", "it did not greet")

    def _challenge(self, greeting: wire.Greeting) -> None:
        if greeting.schema_version != wire.SCHEMA_VERSION:
            self._refuse(
                "schema",
                f"the engine's StopGuard speaks schema version {greeting.schema_version} and this collector "
                f"{wire.SCHEMA_VERSION}: install the same version of StopGuard on both sides",
            )
        elif len(greeting.nonce) != wire.NONCE_BYTES:
            self._refuse("protocol", "its nonce has the wrong length")
        else:
            self._engine_nonce, self._nonce = greeting.nonce, secrets.token_bytes(wire.NONCE_BYTES)
            proof = wire.collector_proof(self._owner.token, self._engine_nonce, self._nonce)
            self.send(wire.Challenge(wire.SCHEMA_VERSION, self._nonce, proof))

    def _welcome(self, hello: wire.Hello, at: float) -> None:
        proof = wire.engine_proof(self._owner.token, self._engine_nonce, self._nonce)
        if not hmac.compare_digest(proof, hello.proof):
            self._refuse("token", "wrong token: STOPGUARD_COLLECTOR_TOKEN must be the gateway's probe token")
            return
        reason = self._owner.proved(self, hello)
        if reason:
            self._refuse("full", reason)
            return
        self.open = True
        if self._timer is not None:
            self._timer.cancel()
        self.send(wire.Welcome())
        self._ping(0)

    def _refuse(self, refusal: wire.Refusal, detail: str) -> None:
        self._owner.refused(self, refusal, detail)
        self.send(wire.Refused(refusal, detail[:500]))
        self.close(detail)
        self._buffer.clear()

    def _too_slow(self) -> None:
        self._refuse("protocol", "it did not finish the handshake in time")

    def _ping(self, number: int) -> None:
        limits, at = self._owner.limits, monotonic()
        if self.closed:
            return
        if at - self.heard_at > limits.silence_seconds:
            self._why = f"it said nothing for {limits.silence_seconds:g} s"
            if self._transport is not None:
                self._transport.abort()
            return
        if len(self._pings) >= len(_FIRST_PINGS_SECONDS):
            del self._pings[next(iter(self._pings))]
        self._ping_id += 1
        self._pings[self._ping_id] = at
        self.send(wire.Ping(self._ping_id))
        wait = _FIRST_PINGS_SECONDS[number] if number < len(_FIRST_PINGS_SECONDS) else limits.ping_seconds
        self._timer = asyncio.get_running_loop().call_later(wait, self._ping, number + 1)
