"""Checks on a real engine behind a gateway that need more than one request, or the engine's life in their hands.

They are written over a `Subject` (an adapter and a gateway of its own, see `stopguard.testing.conformance`) and give
reports, so that a test asserts on them and a demo prints them.

* `neighbours`: half of many streams are cancelled at random; the others deliver what they deliver alone.
* `killed_mid_stream`: the engine dies; clients hear whether to try again, the books say `fail`, and it is used again
  when it is back.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import httpx
import msgspec

from stopguard.testing.conformance.subject import Subject

__all__ = ["KilledReport", "NeighboursReport", "Told", "killed_mid_stream", "neighbours"]

_TELL_SECONDS: Final = 30.0


class NeighboursReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of `streams` streams of which `cancelled` left. `differing` are the texts that were not the same."""

    streams: int
    cancelled: int
    compared: int
    differing: tuple[str, ...]
    outcomes: dict[str, int]
    seconds: float

    @property
    def clean(self) -> bool:
        return not self.differing and self.compared == self.streams - self.cancelled

    def __str__(self) -> str:
        stops = ", ".join(f"{number} {name}" for name, number in sorted(self.outcomes.items()))
        return (
            f"{self.cancelled} of {self.streams} streams cancelled ({stops}); of the other {self.compared}"
            f" {len(self.differing)} differ from what they deliver alone ({self.seconds:.1f} s)"
        )


def neighbours(
    subject: Subject, *, streams: int = 40, cancelled: int = 20, tokens: int = 48, seed: int = 7
) -> NeighboursReport:
    """Run `streams` greedy streams at once and cancel `cancelled` of them at random moments.

    Alone is taken literally: each prompt that will be compared runs by itself first.
    """
    return subject.run(lambda: _neighbours(subject, streams, cancelled, tokens, seed))


async def _neighbours(subject: Subject, streams: int, cancelled: int, tokens: int, seed: int) -> NeighboursReport:
    rng = random.Random(seed)
    began = monotonic()
    prompts = [subject.shape.prompt(subject.number()) for _ in range(streams)]
    leaving = set(rng.sample(range(streams), cancelled))
    staying = [number for number in range(streams) if number not in leaving]
    alone = {number: await subject.text_of(await subject.ask(prompts[number], tokens=tokens)) for number in staying}
    # Whoever leaves asks for more than is compared: nobody is at the end when it leaves.
    asked = {
        number: await subject.ask(prompts[number], tokens=subject.shape.long_tokens if number in leaving else tokens)
        for number in rng.sample(range(streams), streams)
    }

    async def leave(number: int) -> str:
        exchange, wanted = asked[number], rng.choice((0, 0, 1, 3, 6, 12))  # a third leave while they still wait
        reply = exchange.reply
        await subject.through.wait(lambda: reply.events >= wanted or reply.ended, subject.shape.patience_seconds)
        await exchange.leave(rng.choice(("fin", "reset")))
        return (await subject.closed_book(subject.id_of(exchange))).stop.outcome

    stops = [asyncio.ensure_future(leave(number)) for number in sorted(leaving)]
    beside = {number: await subject.text_of(asked[number]) for number in staying}
    outcomes = Counter(await asyncio.gather(*stops))
    await subject.idle()
    return NeighboursReport(
        streams=streams,
        cancelled=cancelled,
        compared=len(beside),
        differing=tuple(
            f"{prompts[number]!r}: alone {alone[number]!r}, beside others {beside[number]!r}"
            for number in staying
            if beside[number] != alone[number]
        ),
        outcomes=dict(outcomes),
        seconds=monotonic() - began,
    )


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What one client heard when its engine died: status, the `stopguard` object, and whether an end was claimed."""

    stream: bool
    status: int
    retry: str
    reason: str
    ended_as_if_whole: bool


class KilledReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a death in the middle came to. `back_seconds`: from the engine's return to the first request served."""

    told: tuple[Told, ...]
    semantics: tuple[str, ...]
    while_away: Told
    back_seconds: float

    @property
    def clean(self) -> bool:
        """Every client heard whether to try again, none took a half for a whole, all books say `fail`."""
        told = [*self.told, self.while_away]
        return (
            all(one.retry in ("safe", "unsafe") and not one.ended_as_if_whole for one in told)
            and set(self.semantics) == {"fail"}
            and self.while_away.retry == "safe"
        )


def killed_mid_stream(
    subject: Subject, kill: Callable[[], None], restart: Callable[[], None], *, back_within_seconds: float = 60.0
) -> KilledReport:
    """`kill` ends the engine as a crash would; `restart` returns when it serves again at the same address."""
    told, semantics = subject.run(lambda: _watch_it_die(subject, kill))
    while_away = subject.run(lambda: _ask(subject, stream=True, seconds=_TELL_SECONDS))
    restart()
    return KilledReport(
        told=told,
        semantics=semantics,
        while_away=while_away,
        back_seconds=subject.run(lambda: _until_served(subject, back_within_seconds)),
    )


async def _watch_it_die(subject: Subject, kill: Callable[[], None]) -> tuple[tuple[Told, ...], tuple[str, ...]]:
    known = subject.known_ids()
    tasks = [
        asyncio.ensure_future(_ask(subject, stream=stream, seconds=_TELL_SECONDS)) for stream in (True, True, False)
    ]
    due_at = monotonic() + subject.shape.patience_seconds
    controller = subject.gateway.controller
    while sum(name not in known and one.events > 0 for name, one in controller.tracked.items()) < 2:
        assert monotonic() < due_at, "two streams did not begin"
        await asyncio.sleep(0.01)
    ids = [name for name in controller.tracked if name not in known]
    await asyncio.to_thread(kill)
    told = tuple(await asyncio.gather(*tasks))
    closed = [await subject.closed_book(name) for name in ids]
    return told, tuple(one.stop.semantics for one in closed)


async def _ask(subject: Subject, *, stream: bool, seconds: float, tokens: int = 0) -> Told:
    """Ask with an ordinary client and read what came to the end, as raw text."""
    call = subject.shape.call(
        subject.shape.prompt(subject.number()), tokens=tokens or subject.shape.long_tokens * 4, stream=stream
    )
    text, status = "", 0
    async with httpx.AsyncClient(trust_env=False, timeout=seconds) as client:
        try:
            async with client.stream("POST", subject.url + call.path, json=call.body) as response:
                status = response.status_code
                async for part in response.aiter_text():
                    text += part
        except httpx.RemoteProtocolError:
            pass  # cut without an end: what was said before it counts
    details = _details(text)
    whole = "[DONE]" in text if stream else status == httpx.codes.OK
    return Told(
        stream=stream,
        status=status,
        retry=str(details.get("retry", "")),
        reason=str(details.get("retry_reason", "")),
        ended_as_if_whole=whole,
    )


def _details(text: str) -> dict[str, Any]:
    """The last `stopguard` object in an error body or in a stream's events."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            value = msgspec.json.decode(line.removeprefix("data:").strip())
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(value, dict) and isinstance(value.get("stopguard"), dict):
            found = value["stopguard"]
    return found


async def _until_served(subject: Subject, seconds: float) -> float:
    began = monotonic()
    while True:
        told = await _ask(subject, stream=False, seconds=seconds, tokens=4)
        if told.status == httpx.codes.OK:
            return monotonic() - began
        assert monotonic() - began < seconds, f"the engine is back, and after {seconds:g} s it is not used: {told}"
        await asyncio.sleep(0.2)
