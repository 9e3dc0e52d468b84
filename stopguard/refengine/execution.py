"""What a step does: launch writes what is known, the end writes and samples the rest, then results are booked.

Order of writes: a step's prefill writes land when it is launched and its decode writes when it ends.
That is the worst order that overlapping kernels, copy streams and connectors permit, and it is why a
block must not be reused before every step that may write it is done.
"""

from __future__ import annotations

from stopguard.probe import wire
from stopguard.refengine.batches import Batch, Entry
from stopguard.refengine.core import Core
from stopguard.refengine.interface import FinishReason, Output
from stopguard.refengine.model import EOS, next_token
from stopguard.refengine.request import Event, Request, State

__all__ = ["finish_device", "launch", "process_outputs"]


def launch(core: Core, entries: list[Entry]) -> Batch:
    """Commit `entries` as the next step. It runs after those in flight."""
    core.steps_launched += 1
    batch = Batch(core.steps_launched, entries)
    size, pool = core.config.block_tokens, core.pool
    for entry in entries:
        request = entry.request
        entry.table = table = request.table
        request.in_flight += 1
        request.in_flight_tokens += entry.samples
        request.last_step = batch.step
        request.scheduled = entry.start + entry.count
        if entry.decodes:
            for position in range(entry.start, entry.start + entry.count):
                index, slot = divmod(position, size)
                entry.places.append((table[index], slot, pool.generation[table[index]]))
        else:
            pool.write_run(table, entry.start, request.tokens[entry.start : entry.start + entry.count])
    batch.launched_at = max(core.now, core.batches[-1].ends_at) if core.batches else core.now
    batch.ends_at = batch.launched_at + core.config.step_cost.seconds(batch.prefill_tokens, batch.decode_sequences)
    core.batches.append(batch)
    return batch


def finish_device(core: Core) -> Batch:
    """The oldest step is done: its writes have landed and its tokens are sampled. Fences behind it fall."""
    batch = core.batches.popleft()
    for entry in batch.entries:
        request = entry.request
        request.in_flight -= 1
        request.in_flight_tokens -= entry.samples
        if entry.decodes:
            _decode(core, entry)
        elif entry.samples:
            length = entry.start + entry.count
            entry.sampled.append(_sample(core, entry, length, request.tokens[length - 1]))
        if entry.sampled:
            request.device_token = entry.sampled[-1]
        if entry.epoch == request.epoch and request.state is State.RUNNING:
            request.computed = entry.start + entry.count
    core.steps_done = batch.step
    core.beats += 1
    if core.transfers:
        _land_transfers(core)
    core.drain_fences()
    return batch


def _decode(core: Core, entry: Entry) -> None:
    pool, request = core.pool, entry.request
    token, length = request.device_token, entry.start
    for block, slot, generation in entry.places:
        pool.write(block, slot, token, generation)
        length += 1
        token = _sample(core, entry, length, token)
        entry.sampled.append(token)


def _sample(core: Core, entry: Entry, length: int, last_token: int) -> int:
    request = entry.request
    value = core.pool.value(entry.table, length)
    return next_token(value, length, last_token, request.salt, request.eos_threshold, request.structured)


def _seal(core: Core, request: Request) -> None:
    """Blocks that are full by now can be shared."""
    size = core.config.block_tokens
    while (request.sealed + 1) * size <= request.computed:
        start = request.sealed * size
        block = request.table[request.sealed]
        request.chain = core.pool.seal(block, request.chain, request.tokens[start : start + size])
        request.sealed += 1


def _land_transfers(core: Core) -> None:
    """The other instance has written. It writes into the blocks that it was given, whoever has them now."""
    due = [transfer for transfer in core.transfers if transfer.step <= core.steps_done]
    core.transfers = [transfer for transfer in core.transfers if transfer.step > core.steps_done]
    size = core.config.block_tokens
    for transfer in due:
        for position, token in enumerate(transfer.tokens):
            index, slot = divmod(position, size)
            core.pool.write(transfer.blocks[index], slot, token, transfer.generations[index])
        request = transfer.request
        request.transfer_until = 0
        if request.state is State.TRANSFERRING:
            core.transferring.remove(request)
            request.move(Event.ARRIVE)
            core.running.append(request)
            request.computed = request.scheduled = len(transfer.tokens)
            _seal(core, request)
            core.events.append(wire.Moved(request.request_id, core.now, "running"))


def process_outputs(core: Core, batch: Batch) -> None:
    """Book the step's tokens: delivered, discarded (the stop is known) or stale (the request has gone)."""
    events, now, size = core.events, core.now, core.config.block_tokens
    for entry in batch.entries:
        request = entry.request
        if request.state is State.RUNNING and request.computed >= (request.sealed + 1) * size:
            _seal(core, request)
        if entry.sampled:
            events.append(wire.TokensComputed(request.request_id, now, len(entry.sampled)))
            core.counters.generated_tokens += len(entry.sampled)
            if request.state is State.GONE:
                _late(core, request, entry.sampled)
            else:
                _accept(core, request, entry.sampled)


def _late(core: Core, request: Request, sampled: list[int]) -> None:
    if any(fault.deliver_stale(request) for fault in core.hooks.deliver_stale):
        core.redeliver(request, tuple(sampled))
    else:
        core.events.append(wire.TokensDropped(request.request_id, core.now, len(sampled), stale=True))


def _accept(core: Core, request: Request, sampled: list[int]) -> None:
    """Append the tokens; deliver them unless a stop forbids it; end the request if they end it."""
    taken = 0
    text = ""
    reason: FinishReason | None = None
    assembler, limit = request.assembler, request.spec.sampling.max_tokens
    for token in sampled:
        request.tokens.append(token)
        taken += 1
        text += assembler.add(token)
        if token == EOS or assembler.stopped:
            reason = "stop"
        elif request.outputs + taken >= limit:
            reason = "length"
        if reason is not None:
            break
    request.outputs += taken
    effect = core.policy.effect
    if request.marked and effect != "loop":
        reason = None  # the abort has won already; with `loop` it is looked at after the results
    silent = (request.marked and core.policy.output == "discard") or (request.front_stopped and reason is None)
    events, now = core.events, core.now
    if taken < len(sampled):
        events.append(wire.TokensDropped(request.request_id, now, len(sampled) - taken))
    tokens = tuple(sampled[:taken])
    if silent:
        events.append(wire.TokensDropped(request.request_id, now, taken))
        return
    request.delivered += taken
    events.append(wire.TokensEmitted(request.request_id, now, taken))
    if reason is not None:
        core.end(request, reason, "finish", tokens, text)
    else:
        core.outputs.append(Output(request.root_id, request.index, tokens, text))
