"""Races between a stop, a preemption and an end on the real vLLM: each brings one about, and says how it went.

A race is a coroutine in the gateway's loop. It may be lost (the request ended before a busy machine let us act): then
`Raced.happened` is False and whoever asked tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from stopguard.audit.client import SocketExchange
from stopguard.testing.conformance.subject import Closed
from stopguard.testing.staging import StagingFailed
from tests.engines.vllm_rig import LONG_TOKENS, Probed

__all__ = ["RACES", "Race", "Raced"]

_NEIGHBOURS: Final = 4
_NEIGHBOUR_TOKENS: Final = 400


class Raced(msgspec.Struct, frozen=True):
    """How a race went. `text` is what came, where it is to be compared with what comes `alone`."""

    closed: Closed
    answers: tuple[str, ...] = ()
    text: str = ""
    alone: str = ""
    happened: bool = True


Race = Callable[[Probed], Awaitable[Raced]]


async def _order(probed: Probed, action: str, request_id: str, priority: int = 0) -> str:
    assert probed.probing is not None
    return str((await probed.probing.order("vllm", action, request_id, priority=priority)).answer)  # type: ignore[arg-type]


async def _decoding(probed: Probed, **options: object) -> tuple[SocketExchange, str]:
    """A stream that has begun, and our id of it."""
    subject = probed.subject
    exchange = await subject.ask(subject.shape.prompt(subject.number()), tokens=LONG_TOKENS, **options)  # type: ignore[arg-type]
    reply = exchange.reply
    await subject.through.wait(lambda: reply.events > 2 or reply.ended, 60.0)
    if reply.ended:
        raise StagingFailed(f"it ended before the race: {reply.status}, {reply.errors}")
    return exchange, subject.id_of(exchange)


async def left_while_held(probed: Probed) -> Raced:
    """Its client leaves while it is parked inside the engine."""
    exchange, name = await _decoding(probed)
    answer = await _order(probed, "preempt", name)
    await asyncio.sleep(0.1)
    await exchange.leave()
    return Raced(await probed.subject.closed_book(name), (answer,))


async def left_while_it_waits_and_is_held(probed: Probed) -> Raced:
    """It has never run, is kept from running, and its client leaves."""
    staged, name = await probed.subject.stage("queued")
    answer = await _order(probed, "hold", name)
    await asyncio.sleep(0.05)
    await staged.victim.leave()
    closed = await probed.subject.closed_book(name)
    await staged.release()
    return Raced(closed, (answer,))


async def left_while_it_is_preempted(probed: Probed) -> Raced:
    """The order to preempt it and its client's leaving are on their way at once."""
    exchange, name = await _decoding(probed)
    order = asyncio.ensure_future(_order(probed, "preempt", name))
    await asyncio.sleep(0)
    await exchange.leave()
    return Raced(await probed.subject.closed_book(name), (await order,))


async def left_while_it_resumes(probed: Probed) -> Raced:
    """As it comes back its client leaves."""
    exchange, name = await _decoding(probed)
    first = await _order(probed, "preempt", name)
    order = asyncio.ensure_future(_order(probed, "resume", name))
    await asyncio.sleep(0)
    await exchange.leave()
    return Raced(await probed.subject.closed_book(name), (first, await order))


async def preempted_twice_at_once(probed: Probed) -> Raced:
    """Two orders to preempt, two to resume: each pair is one."""
    subject = probed.subject
    prompt = subject.shape.prompt(subject.number())
    alone = await subject.text_of(await subject.ask(prompt, tokens=500))
    exchange = await subject.ask(prompt, tokens=500)
    reply, name = exchange.reply, subject.id_of(exchange)
    await subject.through.wait(lambda: reply.events > 5 or reply.ended, 60.0)
    orders = [
        await asyncio.gather(*(_order(probed, action, name) for _ in range(2))) for action in ("preempt", "resume")
    ]
    answers = tuple(answer for pair in orders for answer in sorted(pair))
    text = await subject.text_of(exchange)
    return Raced(await subject.closed_book(name), tuple(answers), text, alone, happened=answers[0] == "applied")


async def ends_as_it_is_preempted(probed: Probed) -> Raced:
    """The order comes at about its last step: it is held and ends when it is let go, or it has ended."""
    subject, tokens = probed.subject, 60
    prompt = subject.shape.prompt(subject.number())
    alone = await subject.text_of(await subject.ask(prompt, tokens=tokens))
    answers: list[str] = []
    closed: Closed | None = None
    for early in (30, 20, 14, 10, 7, 5, 3, 2, 1):
        exchange = await subject.ask(prompt, tokens=tokens)
        reply, name = exchange.reply, subject.id_of(exchange)
        await subject.through.wait(lambda reply=reply, early=early: reply.events > tokens - early or reply.ended, 60.0)  # type: ignore[misc]
        answers.append(await _order(probed, "preempt", name))
        if answers[-1] == "applied":
            await _order(probed, "resume", name)
        text = await subject.text_of(exchange)
        closed = await subject.closed_book(name)
        if text != alone:
            return Raced(closed, tuple(answers), text, alone)
    assert closed is not None
    return Raced(closed, tuple(answers), alone, alone)


async def late_while_held(probed: Probed) -> Raced:
    """Its deadline passes while it is parked inside."""
    exchange, name = await _decoding(probed, headers={"X-StopGuard-Timeout": "2"})
    answer = await _order(probed, "preempt", name)
    await probed.subject.through.wait(lambda: exchange.reply.ended, 20.0)
    return Raced(await probed.subject.closed_book(name), (answer,))


async def left_after_it_went_first(probed: Probed) -> Raced:
    """Two wait, the later one gets a more urgent priority and runs before the other; then its client leaves."""
    subject = probed.subject
    staged, _ = await subject.stage("queued")
    later = await subject.ask(subject.shape.prompt(subject.number()), tokens=LONG_TOKENS)
    name, reply, other = subject.id_of(later), later.reply, staged.victim.reply
    await asyncio.sleep(0.1)  # both are in the scheduler's queue
    answer = await _order(probed, "prioritise", name, priority=-10)
    waited = not (other.events or reply.events)
    await staged.others[0].leave()
    await subject.through.wait(lambda: bool(reply.events or other.events or reply.ended), 60.0)
    first = bool(reply.events and not other.events)
    await later.leave()
    await staged.victim.leave()
    await staged.release()
    # What came shows who went first; where neither waited any more the race is lost.
    return Raced(await subject.closed_book(name), (answer,), str(first), "True", happened=waited)


async def beside_neighbours(probed: Probed, race: Race) -> tuple[Raced, list[str], list[str]]:
    """The race beside four streams: (how it went, their texts alone, their texts beside it)."""
    subject = probed.subject
    prompts = [subject.shape.prompt(900_000 + number) for number in range(_NEIGHBOURS)]
    alone = [await subject.text_of(await subject.ask(prompt, tokens=_NEIGHBOUR_TOKENS)) for prompt in prompts]
    others = [await subject.ask(prompt, tokens=_NEIGHBOUR_TOKENS) for prompt in prompts]
    raced = await race(probed)
    return raced, alone, [await subject.text_of(other) for other in others]


RACES: Final[dict[str, Race]] = {
    race.__name__: race
    for race in (
        *(left_while_held, left_while_it_waits_and_is_held, left_while_it_is_preempted, left_while_it_resumes),
        *(preempted_twice_at_once, ends_as_it_is_preempted, late_while_held, left_after_it_went_first),
    )
}
