"""What runs next: continuous batching with chunked prefill, admission, and preemption on a full pool.

Each step has a token budget. Running requests come first, in queue order: one token (or a draft and
one) for each that decodes, a chunk for each that still prefills. When a running request needs a block
and the pool has none, the policy's victim gives way. Then the queue: the head is admitted if there is
room for all of its known tokens. Nobody is admitted in a step that had to preempt.

Planning changes no request: an entry can be dropped again when its request becomes a victim.
`execution.launch` commits.
"""

from __future__ import annotations

from collections.abc import Sequence

from stopguard.probe import wire
from stopguard.refengine.batches import Entry
from stopguard.refengine.core import Core, Transfer
from stopguard.refengine.request import Event, Request, State

__all__ = ["plan"]


def plan(core: Core) -> list[Entry]:
    """The entries of the next step; empty when nothing can run."""
    if core.paused:
        return []
    entries: dict[Request, Entry] = {}
    budget = core.config.max_batch_tokens
    preemptions = core.counters.preemptions
    for request in list(core.running):
        if budget <= 0:
            break
        if request.state is not State.RUNNING:
            continue
        # A marked request runs on only if its stop needs one more step; taken out at once, it never does.
        if request.marked and (request.in_flight or core.policy.effect == "beat"):
            continue
        entry = _next_entry(core, request, budget)
        if entry is None:
            continue
        if _grow(core, request, entry.start + entry.count, entries):
            entries[request] = entry
            budget -= entry.count
            if core.counters.preemptions != preemptions:  # a victim's entry may have been dropped
                budget = core.config.max_batch_tokens - sum(planned.count for planned in entries.values())
    if core.counters.preemptions == preemptions and not core.admission_closed:
        _admit(core, entries, budget)
    return list(entries.values())


def _next_entry(core: Core, request: Request, budget: int) -> Entry | None:
    """What the request computes next, or None when it has to wait for a step in flight."""
    if request.scheduled < request.prefill_target:
        count = min(request.prefill_target - request.scheduled, core.config.prefill_chunk_tokens, budget)
        ends = request.scheduled + count == request.prefill_target
        return Entry(request, request.scheduled, count, 1 if ends else 0, decodes=False)
    drafts = core.config.speculative_tokens if request.spec.speculative else 0
    count = min(1 + drafts, request.remaining, budget)
    if count <= 0:
        return None
    return Entry(request, request.scheduled, count, count, decodes=True)


def _grow(core: Core, request: Request, tokens: int, entries: dict[Request, Entry]) -> bool:
    """Blocks for `tokens` tokens. False when the request does not run in this step (or not at all any more)."""
    size = core.config.block_tokens
    while True:
        missing = (tokens + size - 1) // size - len(request.table)
        if missing <= 0:
            return True
        if missing <= core.pool.available:
            request.table.extend(core.pool.take(missing))
            core.events.append(wire.BlocksHeld(request.request_id, core.now, missing))
            return True
        if core.pool.fenced or request.marked:
            return False  # room is on its way, or not worth making: preempting more would be waste
        victim = _victim(core)
        if victim is None:
            return False
        if victim is request and len(core.running) == 1 and not core.transferring and not core.policy.admits_whole:
            core.end(request, "error", "error")
            return False
        _give_way(core, victim, entries)
        if victim is request:
            return False


def _victim(core: Core) -> Request | None:
    if not core.policy.preempts:
        return None
    candidates = [request for request in core.running if request.table and not request.marked]
    return core.policy.victim(candidates) if candidates else None


def _give_way(core: Core, victim: Request, entries: dict[Request, Entry]) -> None:
    entries.pop(victim, None)
    if core.policy.finishes_structured_victims and victim.structured:
        core.end(victim, "preempted", "finish")
    else:
        core.preempt(victim)


# Admission ------------------------------------------------------------------------------------------


def _admit(core: Core, entries: dict[Request, Entry], budget: int) -> None:
    config = core.config
    while core.waiting and budget > 0 and len(core.running) + len(core.transferring) < config.max_running:
        request = core.waiting[0]
        if request.in_flight or request.marked or not _slots_fit(core, request):
            return
        blocks, chain = _matched(core, request)
        if not _room_for(core, request, blocks):
            if not (core.policy.preempts_at_admission and _preempt_for(core, request, entries)):
                return
            continue
        core.waiting.remove(request)
        if core.stalled:
            core.drain_stalled()
        _take_slots(core, request)
        _start(core, request, blocks, chain)
        if request.state is not State.RUNNING:
            continue
        entry = _next_entry(core, request, budget)
        if entry is None or not _grow(core, request, entry.start + entry.count, entries):
            return
        entries[request] = entry
        budget -= entry.count


def _matched(core: Core, request: Request) -> tuple[list[int], int]:
    """The cached prefix it can share; none where its KV comes from the host or from another instance."""
    if request.host_tokens or _transfers(request):
        return [], request.chain
    return core.pool.match(request.chain, request.tokens, len(request.tokens) - 1)


def _transfers(request: Request) -> bool:
    return request.state is State.WAITING and request.spec.transfer_steps > 0


def _room_for(core: Core, request: Request, matched: Sequence[int]) -> bool:
    size = core.config.block_tokens
    if core.policy.admits_whole:
        whole = sum(_whole_blocks(core, other) for other in core.running) + _whole_blocks(core, request)
        if whole > core.config.blocks:
            return False
    # One more block than the known tokens need, so that it does not have to preempt with its first token.
    needed = (len(request.tokens) + size) // size - len(matched)
    return needed + core.pool.count_resting(matched) <= core.pool.available


def _whole_blocks(core: Core, request: Request) -> int:
    tokens = request.prompt_tokens + request.spec.sampling.max_tokens
    return (tokens + core.config.block_tokens - 1) // core.config.block_tokens


def _preempt_for(core: Core, request: Request, entries: dict[Request, Entry]) -> bool:
    """Make room for a much more urgent newcomer; True when it is worth looking again."""
    threshold = core.config.admission_preemption_threshold
    victims = [
        other for other in core.running if request.spec.priority - other.spec.priority >= threshold and not other.marked
    ]
    if not victims or core.pool.fenced:
        return False
    _give_way(core, core.policy.victim(victims), entries)
    return core.waiting[0] is request


def _slots_fit(core: Core, request: Request) -> bool:
    spec, slots = request.spec, core.slots
    return (
        (not spec.lora or slots["lora"].fits(1, spec.lora))
        and (not spec.images or slots["encoder"].fits(spec.images))
        and (not spec.speculative or slots["speculative"].fits(1))
        and (not spec.grammar or slots["grammar"].fits(1))
    )


def _take_slots(core: Core, request: Request) -> None:
    spec = request.spec
    if spec.lora:
        core.take_slot(request, "lora", 1, spec.lora)
    if spec.images:
        core.take_slot(request, "encoder", spec.images)
    if spec.speculative:
        core.take_slot(request, "speculative", 1)
    if spec.grammar:
        core.take_slot(request, "grammar", 1)


def _start(core: Core, request: Request, blocks: list[int], chain: int) -> None:
    """Give it the prefix that is there already, and its place among the running (or the transferring)."""
    came_back = request.state in {State.PREEMPTED, State.PAUSED}
    request.prefill_target = len(request.tokens)
    if request.host_tokens:
        _restore(core, request)
    elif _transfers(request):
        _begin_transfer(core, request)
        return
    else:
        _reuse(core, request, blocks, chain)
    request.move(Event.ADMIT)
    core.running.append(request)
    if came_back:
        core.events.append(wire.Resumed(request.request_id, core.now))
        _replay(core, request)
    else:
        request.cached_tokens = request.computed
        core.counters.prompt_tokens += request.prompt_tokens
    core.events.append(wire.Moved(request.request_id, core.now, "running"))


def _reuse(core: Core, request: Request, blocks: list[int], chain: int) -> None:
    size = core.config.block_tokens
    core.pool.share(blocks)
    request.table.extend(blocks)
    request.computed = len(blocks) * size
    request.sealed = len(blocks)
    request.chain = chain
    if core.policy.keeps_partial_blocks:
        rest = request.tokens[request.computed : min(request.computed + size, len(request.tokens) - 1)]
        partial = core.pool.take_over_partial(chain, rest)
        if partial is not None:
            request.table.append(partial[0])
            request.computed += partial[1]
    request.scheduled = request.computed
    if request.table:
        core.events.append(wire.BlocksHeld(request.request_id, core.now, len(request.table)))


def _restore(core: Core, request: Request) -> None:
    """Copy the host backup into fresh blocks; the last known token is computed again, to sample after it."""
    tokens = request.host_tokens[: len(request.tokens) - 1]
    size = core.config.block_tokens
    request.table.extend(core.pool.take((len(tokens) + size - 1) // size))
    core.pool.write_run(request.table, 0, tokens)
    request.computed = request.scheduled = len(tokens)
    core.drop_backup(request)
    core.events.append(wire.BlocksHeld(request.request_id, core.now, len(request.table)))


def _begin_transfer(core: Core, request: Request) -> None:
    """Another instance writes the prompt's KV into these blocks, and will whatever happens here."""
    tokens = request.tokens[: request.prompt_tokens - 1]
    size = core.config.block_tokens
    request.table.extend(core.pool.take((request.prompt_tokens + size - 1) // size))
    request.transfer_until = core.steps_launched + request.spec.transfer_steps
    request.move(Event.TRANSFER)
    core.transferring.append(request)
    generations = [core.pool.generation[block] for block in request.table]
    core.transfers.append(Transfer(request.transfer_until, request, list(request.table), generations, tokens))
    core.counters.prompt_tokens += request.prompt_tokens
    core.events.append(wire.BlocksHeld(request.request_id, core.now, len(request.table)))
    core.events.append(wire.Moved(request.request_id, core.now, "transferring"))


def _replay(core: Core, request: Request) -> None:
    """A fault delivers once more what was delivered before the preemption."""
    if request.outputs and any(fault.replay(request) for fault in core.hooks.replay):
        again = tuple(request.tokens[request.prompt_tokens :])
        core.redeliver(request, again)
