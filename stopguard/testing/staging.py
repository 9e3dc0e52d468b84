"""Bringing a request into a state of its life, from outside, so that it can be stopped there.

The same staging serves the conformance suite, the table of stops and the storms against real engines: it needs
a way to send requests (`SocketWorld`) and knows no engine. Where a state cannot be seen from outside (waiting,
prefill) it is brought about by load and time, and `Staged.in_state` says whether nothing contradicts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stopguard.audit.client import SocketExchange, SocketWorld
from stopguard.audit.world import Call

__all__ = ["STATES", "Shape", "Staged", "StagingFailed", "stage"]

STATES: Final = ("queued", "prefill", "before_first_byte", "decode", "non_streaming", "many_choices")
"""The states in which a request can be stopped, in the order of its life."""

_CHOICES: Final = 3
_DECODE_EVENTS: Final = 3
_PREFILL_SECONDS: Final = 0.03
_QUEUED_SECONDS: Final = 0.15
_NON_STREAMING_SECONDS: Final = 0.25
_WORDS: Final = (
    *("river", "stone", "winter", "paper", "signal", "garden", "copper", "window", "letter", "harbour", "silver"),
    *("mirror", "engine", "valley", "number", "candle", "bridge", "forest", "market", "planet"),
)


class StagingFailed(AssertionError):
    """The engine did not let the state come about; says what came instead."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How requests look at one engine.

    `fields` go into every body. `slots` is how many requests run at once there (more of them wait). `long_tokens` is
    an output that lasts long enough to be stopped, in tokens; `long_words` a prompt whose prefill takes time.
    """

    model: str
    chat: bool = True
    fields: Mapping[str, Any] = {}
    slots: int = 8
    long_tokens: int = 400
    short_tokens: int = 24
    long_words: int = 200
    patience_seconds: float = 60.0

    def call(
        self,
        prompt: str,
        *,
        tokens: int,
        stream: bool = True,
        choices: int = 1,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Call:
        """One request; greedy unless several choices are wanted, so that the same prompt gives the same text."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": tokens,
            "stream": stream,
            "temperature": 0,
            **self.fields,
            **fields,
        }
        if choices > 1:
            body["n"] = choices
            # Several choices of one greedy text make no sense, and some engines refuse to.
            body["temperature"] = 1
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        return Call(path=path, body=body, headers=dict(headers or {}))

    def prompt(self, number: int, words: int = 12) -> str:
        """A prompt of about `words` words, its own for each number, so that no prefix cache makes two of them one."""
        chosen = [_WORDS[(number * 7 + place * (3 + number % 5)) % len(_WORDS)] for place in range(words - 1)]
        return " ".join([str(number), *chosen])


class Staged:
    """A request in its state, and those that keep it there."""

    def __init__(self, state: str, victim: SocketExchange, others: list[SocketExchange]) -> None:
        self.state = state
        self.victim = victim
        self.others = others

    @property
    def in_state(self) -> bool:
        """Whether what came back so far fits the state."""
        reply = self.victim.reply
        if self.state in ("decode", "many_choices"):
            return reply.events > 0 and not reply.ended
        return reply.events == 0 and not reply.ended

    async def release(self) -> None:
        """Let those that kept it there go."""
        for other in self.others:
            await other.leave()


async def stage(world: SocketWorld, shape: Shape, state: str, number: int) -> Staged:
    """A request that is in `state` now. `number` makes its prompt its own.

    Raises `StagingFailed` when the engine refuses it or it ended on its way; everything is left then.
    """
    staged = Staged(state, await _send(world, shape, state, number), []) if state != "queued" else None
    if staged is None:
        staged = await _queued(world, shape, number)
    reply = staged.victim.reply
    match state:
        case "decode" | "many_choices":
            wanted = _DECODE_EVENTS * (_CHOICES if state == "many_choices" else 1)
            await world.wait(lambda: reply.events >= wanted or reply.ended, shape.patience_seconds)
        case "prefill":
            await world.wait(lambda: reply.ended, _PREFILL_SECONDS)
        case "queued":
            await world.wait(lambda: reply.ended, _QUEUED_SECONDS)
        case "non_streaming":
            await world.wait(lambda: reply.ended, _NON_STREAMING_SECONDS)
        case "before_first_byte":
            await world.sleep(0.002)
        case _:
            raise ValueError(f"no state {state!r}")
    if reply.ended:
        said = "; ".join(reply.errors) or reply.failure or f"status {reply.status}, {reply.events} events"
        await staged.release()
        raise StagingFailed(f"{state}: the request ended before it could be stopped: {said}")
    return staged


async def _send(world: SocketWorld, shape: Shape, state: str, number: int) -> SocketExchange:
    words = shape.long_words if state in ("prefill", "before_first_byte") else 12
    return await world.open(
        shape.call(
            shape.prompt(number, words),
            tokens=shape.long_tokens,
            stream=state != "non_streaming",
            choices=_CHOICES if state == "many_choices" else 1,
        )
    )


async def _queued(world: SocketWorld, shape: Shape, number: int) -> Staged:
    """Every place that runs is taken by somebody who has begun; then one more comes."""
    others = [
        await world.open(shape.call(shape.prompt(number * 1000 + place + 1), tokens=shape.long_tokens * 4))
        for place in range(shape.slots)
    ]
    replies = [other.reply for other in others]
    await world.wait(lambda: all(reply.events or reply.ended for reply in replies), shape.patience_seconds)
    if any(reply.ended for reply in replies):
        for other in others:
            await other.leave()
        raise StagingFailed("queued: those who should take the places ended too early")
    return Staged("queued", await _send(world, shape, "queued", number), others)
