"""vLLM's Prometheus page, read as gauges. Facts from vLLM 0.32 `v1/metrics/loggers.py`.

The numbers are those of the end of the engine's last step, not of the moment at which the page is read: a request
that came after that step began is not in them. A reading therefore says *since when* its numbers are known to hold.
They are newer than the reading before when anything on the page has moved since; nothing moves while an engine
rests, so that an idle page that has not changed for a while is believed too.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

__all__ = ["Numbers", "Recency", "parse"]


#: Counted down by every step that computes anything: they tell one step's page from another's.
_PROGRESS: Final = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total")
_SAMPLE: Final = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc|num_preemptions_total"
    rb"|prompt_tokens_total|generation_tokens_total|prefix_cache_queries_total|cache_config_info"
    rb"|request_success_total)\{([^}]*)\} (\S+)$",
    re.MULTILINE,
)
_LABEL: Final = re.compile(rb'(engine|num_gpu_blocks|block_size|finished_reason)="([^"]*)"')


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """One reading, summed over all data-parallel engines. Blocks in blocks, without vLLM's null block of each engine.

    `blocks_used` and `blocks_total` are `None` where the page does not say how many blocks there are. `aborts_total`
    is what vLLM itself counts as aborted (`request_success_total{finished_reason="abort"}`).
    """

    running: int
    waiting: int
    blocks_used: int | None
    blocks_total: int | None
    block_tokens: int
    preemptions_total: int
    generation_tokens_total: int
    aborts_total: int | None
    engines: int
    progress: tuple[float, ...]


def parse(page: bytes) -> Numbers | None:
    """The numbers on a page of `/metrics`; `None` when it is not vLLM's."""
    sums: dict[str, float] = {}
    usage: dict[bytes, float] = {}
    blocks: dict[bytes, int] = {}
    block_tokens = 0
    aborts: float | None = None
    for name_bytes, labels_bytes, value in _SAMPLE.findall(page):
        name = name_bytes.decode()
        labels = dict(_LABEL.findall(labels_bytes))
        engine = labels.get(b"engine", b"0")
        if name == "cache_config_info":
            count = labels.get(b"num_gpu_blocks", b"")
            if count.isdigit():
                # `BlockPool.get_usage` counts without the null block.
                blocks[engine] = int(count) - 1
            size = labels.get(b"block_size", b"")
            block_tokens = int(size) if size.isdigit() else 0
        elif name.endswith("_cache_usage_perc"):  # the second name is that of versions before 0.10
            usage[engine] = float(value)
        elif name == "request_success_total":
            if labels.get(b"finished_reason") == b"abort":
                aborts = (aborts or 0.0) + float(value)
        else:
            sums[name] = sums.get(name, 0.0) + float(value)
    if "num_requests_running" not in sums or "num_requests_waiting" not in sums:
        return None
    known = bool(blocks) and all(engine in blocks for engine in usage)
    return Numbers(
        running=round(sums["num_requests_running"]),
        waiting=round(sums["num_requests_waiting"]),
        blocks_used=sum(round(usage[engine] * blocks[engine]) for engine in usage) if known else None,
        blocks_total=sum(blocks.values()) if known else None,
        block_tokens=block_tokens,
        preemptions_total=round(sums.get("num_preemptions_total", 0.0)),
        generation_tokens_total=round(sums.get("generation_tokens_total", 0.0)),
        aborts_total=None if aborts is None else round(aborts),
        engines=max(1, len(usage)),
        progress=(
            *(sums.get(name, 0.0) for name in _PROGRESS),
            sums["num_requests_running"],
            sums["num_requests_waiting"],
        ),
    )


class Recency:
    """Since when the numbers of successive readings hold.

    `still_seconds` is how long an idle page must have stood still to be believed: longer than a step may take.
    """

    def __init__(self, still_seconds: float) -> None:
        self.still_seconds = still_seconds
        self._before: tuple[float, ...] = ()
        self._read_at: float | None = None
        self._changed_at = 0.0
        self._known_at = 0.0

    def hold_since(self, read_at: float, numbers: Numbers) -> float:
        """The latest moment of which it is known that the numbers are not older; `read_at` is when they were asked."""
        last = self._read_at
        self._read_at = read_at
        if numbers.progress != self._before:
            # A step has ended since the reading before. Nothing was read before: nothing is known.
            self._before = numbers.progress
            self._changed_at = read_at
            self._known_at = max(self._known_at, last if last is not None else 0.0)
        elif numbers.running + numbers.waiting == 0 and read_at - self._changed_at >= self.still_seconds:
            self._known_at = max(self._known_at, read_at - self.still_seconds)
        return self._known_at
