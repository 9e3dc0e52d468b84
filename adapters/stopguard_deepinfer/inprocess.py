"""StopGuard inside a process that drives DeepInfer's `LLMEngine`: stops that are retried, proved, and really free.

The engine of the release (0.1.0) has no server of its own; whoever writes one calls `add_request`, `step` and
`abort_request`. Put this between: `add` what `add_request` returned, `abort` instead of `abort_request`, and
`after_step` behind each `step`, in the thread that steps. What it knows, all from `csrc/engine/scheduler.hpp`:

* `abort_sequence` looks into `waiting` and `running`. While a prefill step is in flight its sequences are in neither,
  so the answer 0 means "try again", never "gone". An abort is therefore kept and repeated after each step until it has
  caught its request, or the request has ended.
* A sequence that is aborted in `waiting` leaves through `ignored_seqs`, which is not shown to Python, and `LLMEngine`
  frees only `finished_seqs`. If a chunk of its prompt had been computed its blocks stay for ever. `free_seq` empties
  the sequence's block table, so freeing it once more when it has left both queues is harmless where it was freed and
  the cure where not.
* Blocks of an aborted sequence come back with the step after next, so nothing is judged before two steps.
* The prefill engine of a pair does not abort (`EngineType.PROMPT`): there nothing is ever confirmed.

Standard library only: it runs in the engine's process.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

__all__ = ["AbortSaid", "InProcessStops", "LLMEngineLike", "Stopped"]

_STEPS_UNTIL_JUDGED: Final = 2
#: Requests that are watched at once; more are refused.
_WATCHED_MAX: Final = 100_000
#: Aborts for ids that are not here, which may have overtaken their requests: how many are kept, and for how many steps.
_EARLY_MAX: Final = 4096
_EARLY_STEPS: Final = 1000


class LLMEngineLike(Protocol):
    """The part of `deepinfer.engine.llm_engine.LLMEngine` that is used."""

    scheduler: Any

    def abort_request(self, request_id: Any) -> tuple[int, int]:
        """(aborted sequences, sum of their tokens)."""
        ...


class AbortSaid(enum.Enum):
    """What came of one abort, so far."""

    APPLIED = "applied"
    """The scheduler has marked it; it leaves with the next steps (see `InProcessStops.after_step`)."""
    TRYING = "trying"
    """The scheduler did not find it now; it is tried again after each step."""
    UNKNOWN = "unknown"
    """It is not here: it has ended, never was, or has not come yet. Should it come soon, it is aborted at once."""


@dataclass(frozen=True)
class Stopped:
    """A stop that is proved: the request is in no queue of the scheduler, and what it held is free.

    `blocks_repaired` were still held by it, and given back here.
    """

    request_id: str
    attempts: int
    blocks_repaired: int


@dataclass
class _Watched:
    sequences: list[Any]
    wanted: bool = False
    attempts: int = 0
    applied_at_step: int = -1


class InProcessStops:
    """The stops of one `LLMEngine`. Not thread-safe: everything in the thread that steps."""

    def __init__(self, engine: LLMEngineLike, *, aborts: bool = True) -> None:
        """`aborts` False: a prefill engine, which does not abort."""
        self._engine = engine
        self._aborts = aborts
        self._watched: dict[str, _Watched] = {}
        self._early: dict[str, int] = {}
        self._steps = 0
        self.blocks_repaired_total = 0

    def add(self, request_id: str, sequence: Any) -> None:
        """`sequence` was added for `request_id`; several are its choices."""
        if len(self._watched) >= _WATCHED_MAX:
            raise RuntimeError(f"more than {_WATCHED_MAX} requests are open: does anybody call after_step?")
        self._watched.setdefault(request_id, _Watched([])).sequences.append(sequence)
        if request_id in self._early:
            self._watched[request_id].wanted = True  # carried out behind the next step, when all its choices are there

    def abort(self, request_id: str) -> AbortSaid:
        """Stop it, now or as soon as the scheduler finds it. Twice is once."""
        watched = self._watched.get(request_id)
        if watched is None:
            self._early.pop(request_id, None)
            self._early[request_id] = self._steps
            if len(self._early) > _EARLY_MAX:
                del self._early[next(iter(self._early))]
            return AbortSaid.UNKNOWN
        if not watched.wanted:
            watched.wanted = True
            self._knock(request_id, watched)
        return AbortSaid.APPLIED if watched.applied_at_step >= 0 else AbortSaid.TRYING

    def after_step(self) -> list[Stopped]:
        """To be called behind each `step`: repeats the aborts that found nothing, and says which stops are proved."""
        self._steps += 1
        while self._early and self._steps - self._early[next(iter(self._early))] > _EARLY_STEPS:
            del self._early[next(iter(self._early))]
        queued: set[int] | None = None
        stopped = []
        for request_id, watched in list(self._watched.items()):
            if not watched.wanted:
                if all(_finished(sequence) for sequence in watched.sequences):
                    del self._watched[request_id]
                continue
            if watched.applied_at_step < 0:
                self._knock(request_id, watched)
                continue
            if self._steps - watched.applied_at_step < _STEPS_UNTIL_JUDGED:
                continue
            queued = self._queued() if queued is None else queued
            if any(sequence.seq_id in queued for sequence in watched.sequences):
                continue
            stopped.append(Stopped(request_id, watched.attempts, self._free(watched.sequences)))
            del self._watched[request_id]
        return stopped

    @property
    def pending(self) -> int:
        """Requests that are to stop and have not been seen to."""
        return sum(watched.wanted for watched in self._watched.values())

    def _knock(self, request_id: str, watched: _Watched) -> None:
        if all(_finished(sequence) for sequence in watched.sequences):
            watched.applied_at_step = self._steps  # it has ended, by itself or by an earlier abort
        elif self._aborts:
            watched.attempts += 1
            self._engine.abort_request([request_id])
            # Of several choices some may have been in flight: only when all are caught is it done.
            if all(_finished(sequence) for sequence in watched.sequences):
                watched.applied_at_step = self._steps

    def _queued(self) -> set[int]:
        scheduler = self._engine.scheduler
        return {sequence.seq_id for sequence in (*scheduler.running, *scheduler.waiting)}

    def _free(self, sequences: Iterable[Any]) -> int:
        scheduler = self._engine.scheduler
        before = scheduler.get_num_free_gpu_blocks()
        for sequence in sequences:
            scheduler.free_seq(sequence)
        repaired = int(scheduler.get_num_free_gpu_blocks() - before)
        self.blocks_repaired_total += repaired
        return repaired


def _finished(sequence: Any) -> bool:
    return str(sequence.status.name).startswith("FINISHED")
