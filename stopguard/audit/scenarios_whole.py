"""Scenarios about the engine as a whole: one long connection, a storm, cross-talk, and life afterwards."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from typing import Any

from stopguard.audit.scenario import scenario
from stopguard.audit.stage import Skip, Stage, Ticket
from stopguard.audit.world import Leaving

__all__: list[str] = []

_CROSSTALK_TRIES = 12
_SLOWER_THAN_COLD = 5.0


@scenario(
    "keep-alive",
    "many requests on one connection",
    requests=lambda plan: plan.keep_alive_requests,
    at_once=1,
    via=False,
)
async def keep_alive(stage: Stage) -> None:
    """Short requests one after another on one keep-alive connection: whoever watches it may not grow with them."""
    last: Ticket | None = None
    connections = 0
    for _ in range(stage.plan.keep_alive_requests):
        exchange = last.exchange if last is not None else None
        ticket = await stage.open(
            "companion", stream=False, tokens=2, words=1, must_finish=True, keep_alive=True, after=exchange, bind=False
        )
        connections += exchange is None or ticket.exchange is not exchange
        await stage.all_ended([ticket], stage.plan.deadline_seconds * 2)
        last = ticket
    stage.notes.append(f"{stage.plan.keep_alive_requests} requests on {connections} connections")
    stage.looked_at.add("stream")


@scenario("storm", "a storm of mixed stops", requests=lambda plan: plan.storm, at_once=None)
async def storm(stage: Stage) -> None:
    """Requests of all shapes come at random and are left, reset or aborted at random moments, while fixed prompts run
    between them and must say what they said to a quiet engine.
    """
    if not stage.plan.storm:
        raise Skip("--storm 0")
    numbers, step = stage.numbers, stage.measured.token_seconds
    due: list[tuple[float, int, Ticket]] = []
    for number in range(stage.plan.storm):
        if number % 8 == 3:
            await stage.canary(number)
        else:
            ticket = await _any_request(stage)
            if numbers.random() < 0.85:
                due_at = (
                    stage.world.now() + numbers.choice((0.0, 0.5, 2.5, 9.0, 30.0)) * numbers.uniform(0.5, 1.5) * step
                )
                ticket.role = "victim"
                heapq.heappush(due, (due_at, number, ticket))
        await stage.world.sleep(numbers.uniform(0.0, 3.0) * step)
        await _stop_those(stage, due, stage.world.now())
    while due:
        await stage.world.sleep(max(0.0, due[0][0] - stage.world.now()))
        await _stop_those(stage, due, stage.world.now())


async def _any_request(stage: Stage) -> Ticket:
    numbers = stage.numbers
    features = stage.observer.facts.features
    short = stage.long_tokens(2, 0.05)
    extra: dict[str, Any] = {}
    if "structured" in features and numbers.random() < 0.1:
        extra = dict(features["structured"])
    return await stage.open(
        "companion",
        stream=numbers.random() < 0.7,
        tokens=numbers.choice((4, 16, short)),
        words=numbers.choice((1, 4, 30)),
        sequences=numbers.choice((1, 1, 1, 2)),
        extra=extra,
        bind=True,
    )


async def _stop_those(stage: Stage, due: list[tuple[float, int, Ticket]], now: float) -> None:
    while due and due[0][0] <= now:
        ticket = heapq.heappop(due)[2]
        if ticket.reply.ended:
            ticket.role = "companion"
            continue
        ways: list[Leaving | str] = ["fin", "fin", "reset"]
        if stage.observer.facts.abort_door and not stage.through_gateway and stage.ids(ticket):
            ways.append("abort")
        match stage.numbers.choice(ways):
            case "abort":
                await stage.abort(ticket)
            case "reset":
                await stage.leave(ticket, "reset")
            case _:
                await stage.leave(ticket, "fin")


@scenario(
    "crosstalk", "outputs of those that follow a stop", requests=2 * _CROSSTALK_TRIES, at_once=2, long=_CROSSTALK_TRIES
)
async def crosstalk(stage: Stage) -> None:
    """A stream is stopped in the middle of a step and a fixed prompt sent at once, so that it gets the blocks of the
    dead one: its output must be the cold one. At last the fixed prompts are sent once more, alone.
    """
    step = stage.measured.token_seconds
    by_id = stage.observer.facts.abort_door and not stage.through_gateway
    for number in range(_CROSSTALK_TRIES):
        victim = await stage.open(tokens=stage.long_tokens(), words=2)
        await stage.speaking(victim, events=3 + number % 5)
        await stage.world.sleep(step * (0.2 + 0.6 * stage.numbers.random()))
        stop: Callable[[Ticket], Awaitable[Any]] = stage.abort if by_id and number % 2 else stage.leave
        await stop(victim)
        canary = await stage.canary(number, bind=False)
        await stage.all_ended([canary], stage.plan.deadline_seconds * 2)
        # The next one takes the blocks of the next dead one, not of this one.
    for number in range(len(stage.canaries)):
        canary = await stage.canary(number)
        await stage.all_ended([canary], stage.plan.deadline_seconds * 2)


@scenario("afterlife", "a fresh request after everything", requests=3, at_once=1)
async def afterlife(stage: Stage) -> None:
    """Fresh requests after all the stops: served, and about as quickly as in the beginning."""
    spans: list[float] = []
    for _ in range(3):
        ticket = await stage.open("companion", stream=False, tokens=4, must_finish=True)
        await stage.all_ended([ticket], stage.plan.deadline_seconds * 2)
        spans.append((ticket.reply.ended_at or stage.world.now()) - ticket.opened_at)
    measured, cold = sorted(spans)[1], stage.measured.short_seconds
    limit = max(_SLOWER_THAN_COLD * cold, cold + stage.plan.deadline_seconds / 5)
    stage.notes.append(f"a short request takes {measured * 1000:.0f} ms, at the beginning {cold * 1000:.0f} ms")
    if measured > limit:
        stage.slowness.append(("health", measured, limit, "a fresh request takes much longer than before the stops"))
