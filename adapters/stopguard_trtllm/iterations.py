"""The iteration records of `/metrics`: what they say, and of which moment.

TensorRT-LLM counts its work in one record an iteration of its loop and hands them out once: whoever reads the list has
emptied it, and an idle engine writes none. So the newest record is kept here, together with how new it is known to be:

* a record that was not there at the last reading is newer than that reading;
* where there is none, nothing has been iterated since, and a request in the engine would have been: what the last
  record says still held `QUIET_SECONDS` ago, unless a single iteration takes longer than that.

Sources: `tensorrt_llm/serve/openai_server.py: get_iteration_stats`, `tensorrt_llm/executor/result.py: IterationResult`,
`tensorrt_llm/_torch/pyexecutor/py_executor.py: _update_iter_stats` (main, 1.3.0rc). With `return_perf_metrics` the
list is kept by a collector and answered at once; without it a reading lasts until nothing has come for 2 s, which on a
busy engine is never.
"""

from __future__ import annotations

from typing import Final

import msgspec

from stopguard.ledger import EngineGauges

__all__ = ["QUIET_SECONDS", "Iterations", "Record", "newest_record"]

QUIET_SECONDS: Final = 1.0


class _Batching(msgspec.Struct, rename="camel"):
    num_paused_requests: int = 0


class _Cache(msgspec.Struct, rename="camel"):
    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int


class Record(msgspec.Struct, rename="camel"):
    """One iteration, in requests and blocks. Paused requests are among the active ones."""

    num_active_requests: int
    num_queued_requests: int = 0
    iter: int = 0
    inflight_batching_stats: _Batching | None = None
    kv_cache_stats: _Cache | None = None

    @property
    def paused(self) -> int:
        return self.inflight_batching_stats.num_paused_requests if self.inflight_batching_stats is not None else 0


def newest_record(content: bytes) -> Record | None:
    """The last record of an answer of `/metrics`; `None` when the list is empty. Raises `msgspec.DecodeError`."""
    records = msgspec.json.decode(content, type=list[msgspec.Raw])
    return msgspec.json.decode(records[-1], type=Record) if records else None


class Iterations:
    """The newest record, and of which moment it speaks. Times in monotonic seconds."""

    def __init__(self) -> None:
        self.newest: Record | None = None
        self._holds_since = 0.0
        self._last_read_at = 0.0
        self._changed_at = 0.0

    def read(self, record: Record | None, began_at: float, ended_at: float) -> None:
        """One reading of the list, which lasted from `began_at` to `ended_at`, ended with `record`."""
        if record is not None:
            self.newest = record
            self._holds_since = self._last_read_at
            self._changed_at = ended_at
        elif began_at - QUIET_SECONDS >= self._changed_at:
            self._holds_since = max(self._holds_since, began_at - QUIET_SECONDS)
        self._last_read_at = ended_at

    def gauges(self, at: float) -> EngineGauges | None:
        """What the engine had, read at `at`; `None` before its first iteration."""
        record = self.newest
        if record is None:
            return None
        cache = record.kv_cache_stats
        return EngineGauges(
            at=at,
            running=max(0, record.num_active_requests - record.paused),
            waiting=record.num_queued_requests + min(record.paused, record.num_active_requests),
            blocks_used=None if cache is None else cache.used_num_blocks,
            blocks_total=None if cache is None else cache.max_num_blocks,
            holds_since=self._holds_since,
        )
