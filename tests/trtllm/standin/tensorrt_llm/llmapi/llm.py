"""`LLM`: generate, and the iteration statistics, which are drained by whoever reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._torch.pyexecutor.py_executor import ExecutorConfig, PyExecutor  # type: ignore[import-not-found]
from tensorrt_llm.executor.proxy import GenerationExecutorProxy  # type: ignore[import-not-found]
from tensorrt_llm.executor.request import GenerationRequest  # type: ignore[import-not-found]
from tensorrt_llm.executor.result import GenerationResult  # type: ignore[import-not-found]

__all__ = ["LLM", "LlmArgs"]

_LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class LlmArgs:
    """What the server asks its generator about."""

    return_perf_metrics: bool = False
    enable_iter_perf_stats: bool = True
    num_postprocess_workers: int = 0


class LLM:
    """The engine behind the server."""

    def __init__(self, args: LlmArgs, config: ExecutorConfig) -> None:
        self.args = args
        self._executor = GenerationExecutorProxy()
        self.worker = PyExecutor(config, self._executor)
        self.worker.start()
        self._stats_done = False

    def generate_async(self, inputs: list[int], *, max_tokens: int, streaming: bool, n: int = 1) -> GenerationResult:
        self._stats_done = False  # IterationResult.mark_undone: new prompts were submitted
        return self._executor.submit(GenerationRequest(0, inputs, max_tokens, streaming, n))

    async def get_stats_async(self, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """What nobody has read yet. With a `timeout` it goes on until nothing new has come for so many seconds, and
        then says nothing until new work is submitted (`IterationResult`): on a busy engine it does not end.
        """
        if self._stats_done:
            return
        stats = self.worker.stats
        quiet_since = time.monotonic()
        while True:
            while stats:
                yield stats.popleft()
                quiet_since = time.monotonic()
            if timeout is None:
                return
            if time.monotonic() - quiet_since >= timeout:
                self._stats_done = True
                return
            await asyncio.sleep(_LOOK_SECONDS)

    def shutdown(self) -> None:
        self.worker.is_shutdown = True

    def _check_health(self) -> bool:
        return True
