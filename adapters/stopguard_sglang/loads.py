"""`/v1/loads`: what SGLang says of itself, in requests and KV tokens. Facts are of sglang 0.5.23.

It is read from shared memory and disturbs nobody. A reading is as old as its own `timestamp`: the scheduler publishes
one at each prefill and whenever it has nothing to run, else every 15th decode step, and none during a pause
(`Scheduler.publish_load_snapshot`). A prefill in pieces shows 0 running, 0 waiting and its tokens. What the radix tree
keeps without a lock is not used. Requests whose grammar is being compiled are in no queue but `queues.grammar`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec

from stopguard.ledger import EngineGauges

__all__ = ["LOADS_PATH", "Load", "Loads", "gauges_of", "read_loads"]

LOADS_PATH: Final = "/v1/loads?include=core,queues"


class Queues(msgspec.Struct, frozen=True):
    """The part of a load's `queues` that is used, in requests."""

    grammar: int = 0


class Load(msgspec.Struct, frozen=True):
    """One scheduler's state at `timestamp` (Unix seconds, its host's clock): requests and KV tokens."""

    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int = 0
    dp_rank: int = 0
    queues: Queues = Queues()


class Loads(msgspec.Struct, frozen=True):
    """The answer of `/v1/loads`: one load a data-parallel rank; `timestamp` is when it was asked.

    That is ISO 8601 in 0.5.23; Unix seconds are understood too, which the loads themselves have.
    """

    timestamp: str | float
    loads: list[Load]
    version: str = ""


def read_loads(body: bytes) -> Loads:
    """Raises `msgspec.DecodeError` when that is not what SGLang says."""
    return msgspec.json.decode(body, type=Loads)


def gauges_of(loads: Loads, asked_at: float) -> EngineGauges | None:
    """The sum over all ranks, as old as the oldest of them; `None` when none has published yet.

    `asked_at` is our clock just before the question. Both timestamps are of SGLang's clock, so that their difference,
    the age, needs no common one. A rank that holds tokens and says that it runs nothing is prefilling in pieces.
    """
    if not loads.loads:
        return None
    told = loads.timestamp
    told_at = datetime.fromisoformat(told).timestamp() if isinstance(told, str) else told
    age = max(0.0, told_at - min(load.timestamp for load in loads.loads))
    running = waiting = used = total = 0
    for load in loads.loads:
        queued = load.num_waiting_reqs + load.queues.grammar
        prefilling = load.num_running_reqs == 0 and queued == 0 and load.num_used_tokens > 0
        running += load.num_running_reqs + prefilling
        waiting += queued
        used += load.num_used_tokens
        total += load.max_total_num_tokens
    return EngineGauges(
        at=asked_at - age, running=running, waiting=waiting, blocks_used=used, blocks_total=total or None
    )
