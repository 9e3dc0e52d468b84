"""Scenarios in which somebody aborts by id: too early, in every state, twice, too late, and for nobody."""

from __future__ import annotations

from collections import Counter

from stopguard.audit.scenario import scenario
from stopguard.audit.scenarios_leaving import _LONG_PROMPT_WORDS, fill, in_prefill
from stopguard.audit.stage import Skip, Stage, Ticket
from stopguard.stops import AbortAnswer

__all__: list[str] = []


@scenario("abort", "aborted by id in the middle of a stream", requests=3, long=2, via=False)
async def abort(stage: Stage) -> None:
    """Two streams are aborted by id, at different moments of a step; a neighbour goes on."""
    stage.need_abort_door()
    await stage.canary(0)
    for part in (0.0, 0.5):
        victim = await stage.open()
        await stage.speaking(victim)
        await stage.world.sleep(part * stage.measured.token_seconds)
        await stage.abort(victim)


@scenario("abort-early", "aborted before the scheduler has it", requests=4, long=4, via=False)
async def abort_early(stage: Stage) -> None:
    """While the engine is busy, a request is sent and aborted at once: the abort may overtake it."""
    stage.need_abort_door()
    neighbour = await stage.open("companion")
    await stage.speaking(neighbour)
    for _ in range(3):
        await stage.world.sleep(0.3 * stage.measured.token_seconds)
        victim = await stage.open()
        await stage.abort(victim)


@scenario("abort-queued", "aborted while it waits in the queue", requests=lambda plan: plan.fill_max, long=1, via=False)
async def abort_queued(stage: Stage) -> None:
    """All slots are busy; a request that waits is aborted by id. Those that run must go on."""
    stage.need_abort_door()
    victim = await fill(stage)
    await stage.abort(victim)


@scenario("abort-prefill", "aborted during the prefill", requests=3, long=2, via=False)
async def abort_prefill(stage: Stage) -> None:
    """Requests with long prompts are aborted by id between two chunks and in the middle of one."""
    stage.need_abort_door()
    await stage.canary(1)
    for part in (0.0, 0.7):
        victim = await stage.open(words=_LONG_PROMPT_WORDS)
        await in_prefill(stage, victim)
        await stage.world.sleep(part * stage.measured.token_seconds)
        await stage.abort(victim)


@scenario("twice", "stopped twice", requests=3, long=3, via=False)
async def twice(stage: Stage) -> None:
    """An abort and another one; an abort and then the connection closes; the other way round."""
    stage.need_abort_door()
    victims = [await stage.open() for _ in range(3)]
    for victim in victims:
        await stage.speaking(victim)
    await stage.abort(victims[0])
    await stage.abort(victims[0], quietly=True)
    await stage.abort(victims[1])
    await stage.leave(victims[1])
    await stage.leave(victims[2])
    await stage.abort(victims[2], quietly=True)


@scenario("after-end", "aborted after its end", requests=3, via=False)
async def after_end(stage: Stage) -> None:
    """A request that has just ended is aborted by its id; a stream beside it must go on."""
    stage.need_abort_door()
    short = await stage.open("companion", tokens=4, must_finish=True)
    await stage.canary(0)
    await stage.all_ended([short], stage.plan.deadline_seconds)
    for engine_id in _ids(stage, short):
        await stage.knock(engine_id)
        await stage.knock(engine_id)
    stage.looked_at.add("link")


@scenario("unknown-id", "an abort for nobody", requests=1, via=False)
async def unknown_id(stage: Stage) -> None:
    """An abort with an id that never was, beside a stream that must go on."""
    if not stage.observer.facts.id_door:
        stage.need_abort_door()
    await stage.canary(2)
    reply = await stage.knock(f"audit-nobody-{stage.numbers.getrandbits(64):016x}")
    if reply.answer in {AbortAnswer.ACCEPTED, AbortAnswer.GONE}:
        stage.notes.append("the engine says yes to an id that never was: its answer to an abort proves nothing")
    await stage.world.sleep(4 * stage.measured.token_seconds)
    stage.looked_at.add("link")


@scenario("wrong-victim", "ids that begin alike", requests=4, via=False)
async def wrong_victim(stage: Stage) -> None:
    """Of two requests one bears the other's id and one more character; the shorter one is aborted, then an id that
    is the beginning of a live one. The other streams must go on, unchanged.
    """
    stage.need_abort_door()
    if stage.observer.facts.matches_by_prefix:
        raise Skip("this engine matches ids by prefix, as it says: give it ids of one length, as StopGuard does")
    tag = f"audit-{stage.numbers.getrandbits(80):020x}"
    victim = await stage.open(tag=f"{tag}-1")
    await stage.canary(0, tag=f"{tag}-10")
    await stage.speaking(victim)
    await stage.abort(victim)
    neighbour = await stage.canary(1)
    await stage.speaking(neighbour, events=1)
    for engine_id in _ids(stage, neighbour):
        await stage.knock(engine_id[:-1])
    stage.looked_at.add("queue")


def _ids(stage: Stage, ticket: Ticket) -> list[str]:
    """The engine's ids of a call, or `Skip`."""
    found = stage.ids(ticket)
    if not found:
        raise Skip("the engine does not tell its ids")
    return found


@scenario("finish-race", "stopped at the last token", requests=lambda plan: plan.race_tries, at_once=1)
async def finish_race(stage: Stage) -> None:
    """Short requests are left, or aborted, around their last token, so that the end and the stop race in both
    orders. Whoever wins, nothing may stay.
    """
    tokens, step = 8, stage.measured.token_seconds
    by_id = stage.observer.facts.abort_door and not stage.through_gateway
    winners: Counter[str] = Counter()
    for number in range(stage.plan.race_tries):
        victim = await stage.open(tokens=tokens)
        reply = victim.reply
        await stage.world.wait(
            lambda reply=reply: reply.events >= tokens - 2 or reply.ended,  # type: ignore[misc]
            stage.plan.deadline_seconds,
        )
        await stage.world.wait(
            lambda reply=reply: reply.ended,  # type: ignore[misc]
            (number % 13) / 4 * step,
        )
        winners["the end" if reply.ended else "the stop"] += 1
        if by_id and number % 2:
            await stage.abort(victim)
        else:
            await stage.leave(victim)
    stage.notes.append("first: " + ", ".join(f"{who} {count} times" for who, count in sorted(winners.items())))
