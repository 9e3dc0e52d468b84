"""Scenarios for requests that hold more than blocks, or are more than one: each exit must give back all of it."""

from __future__ import annotations

from typing import Any

from stopguard.audit.scenario import scenario
from stopguard.audit.stage import Skip, Stage, Ticket

__all__: list[str] = []

_CHILDREN = 3
#: Requests that fill the pool together.
_CROWD = 8
#: A picture of one pixel (PNG), as content parts carry it.
_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJg"
    "gg=="
)


@scenario("children", "several answers of one request (n > 1)", requests=2, long=6)
async def children(stage: Stage) -> None:
    """A request for three answers at once is left, another is aborted by id: all three sequences must stop."""
    await _both_ways(stage, sequences=_CHILDREN)


@scenario("prompt-list", "several prompts in one request", requests=2, long=6)
async def prompt_list(stage: Stage) -> None:
    """One request with three prompts is left, another is aborted: all three must stop."""
    for by_id in (False, True):
        prompts = [stage.prompt(2) for _ in range(_CHILDREN)]
        victim = await stage.open(prompt=prompts, tokens=stage.long_tokens(_CHILDREN, 0.3))
        await _stop(stage, victim, by_id=by_id)


@scenario("structured", "structured output", requests=2, long=2)
async def structured(stage: Stage) -> None:
    """Requests whose output a grammar binds are left and aborted: the compiled grammar must be let go."""
    await _both_ways(stage, extra=stage.feature("structured"))


@scenario("lora", "a LoRA adapter", requests=2, long=2)
async def lora(stage: Stage) -> None:
    """Requests to a LoRA adapter are left and aborted: its slot must come back."""
    await _both_ways(stage, extra=stage.feature("lora"))


@scenario("speculative", "speculative decoding", requests=2, long=2)
async def speculative(stage: Stage) -> None:
    """Requests that are decoded speculatively are left and aborted: the draft's state must be let go."""
    await _both_ways(stage, extra=stage.feature("speculative"))


@scenario("image", "an image in the prompt", requests=2, long=2)
async def image(stage: Stage) -> None:
    """Requests with an image are left and aborted: the encoder's cache must be let go."""
    content = [
        {"type": "text", "text": stage.prompt(1)},
        {"type": "image_url", "image_url": {"url": _PIXEL}},
    ]
    await _both_ways(stage, extra={**stage.feature("image"), "messages": [{"role": "user", "content": content}]})


async def _both_ways(stage: Stage, *, sequences: int = 1, extra: dict[str, Any] | None = None) -> None:
    for by_id in (False, True):
        tokens = stage.long_tokens(sequences, 0.3)
        victim = await stage.open(sequences=sequences, extra=extra, tokens=tokens)
        await _stop(stage, victim, by_id=by_id)


async def _stop(stage: Stage, victim: Ticket, *, by_id: bool) -> None:
    await stage.speaking(victim, events=2 * victim.sequences)
    if by_id and stage.observer.facts.abort_door and not stage.through_gateway:
        await stage.abort(victim)
    else:
        await stage.leave(victim)


@scenario("preempted", "stopped while it is preempted", requests=lambda plan: min(plan.fill_max, _CROWD), long=_CROWD)
async def preempted(stage: Stage) -> None:
    """More work than the pool can hold, until the engine preempts; preempted requests are aborted and left. The
    others must reach their ends, no token lost and none twice.
    """
    reading = await stage.reading()
    if reading is None or reading.preempted is None:
        raise Skip("this engine does not show who is preempted")
    waiting = await _crowd(stage)
    for number, victim in enumerate(waiting[:2]):
        victim.role = "victim"
        if number == 0 and stage.observer.facts.abort_door and not stage.through_gateway:
            await stage.abort(victim)
        else:
            await stage.leave(victim)
    for ticket in stage.companions()[:3]:
        ticket.must_finish = True


async def _crowd(stage: Stage) -> list[Ticket]:
    """Fill the pool until somebody is preempted; gives the preempted ones. `Skip` when it never comes to that."""
    pool = stage.pool_tokens
    if not pool:
        raise Skip("the size of the pool is not known")
    count = min(stage.plan.fill_max, _CROWD)
    tokens = int(1.5 * pool / count)
    if tokens > min(stage.plan.tokens_max, stage.model.context_tokens or stage.plan.tokens_max) - 256:
        raise Skip(f"the pool holds {pool} tokens: {count} requests cannot fill it")
    for _ in range(count):
        await stage.open("companion", tokens=tokens, words=1)
    until = stage.world.now() + stage.plan.deadline_seconds + 2 * tokens * stage.measured.token_seconds
    while stage.world.now() < until:
        reading = await stage.reading()
        if reading is not None and reading.preempted:
            found = _preempted(stage)
            if found:
                return found
        if all(ticket.reply.ended for ticket in stage.tickets):
            break
        await stage.world.sleep(stage.watch.interval_seconds)
    raise Skip("the engine never preempted anybody, with more work than its pool holds")


def _preempted(stage: Stage) -> list[Ticket]:
    live = [ticket for ticket in stage.tickets if not ticket.reply.ended]
    if stage.events:
        places = {"preempted", "paused"}
        return [ticket for ticket in live if any(trace.place in places for trace in stage.traces(ticket))]
    # Without events: those that have been silent for longest.
    return sorted(live, key=lambda ticket: ticket.reply.last_at or 0.0)[:1]
