"""`PyExecutor`: the worker's loop. A thread here, a process there; the order of a loop's steps is the same."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from tensorrt_llm.executor.proxy import GenerationExecutorProxy  # type: ignore[import-not-found]
from tensorrt_llm.executor.request import CancellingRequest, GenerationRequest  # type: ignore[import-not-found]
from tensorrt_llm.executor.result import LlmResponse  # type: ignore[import-not-found]

__all__ = ["ExecutorConfig", "PyExecutor"]

_IDLE_SECONDS = 0.05


@dataclass(frozen=True)
class ExecutorConfig:
    """`refusals`: how many loops in a row `_try_cancel_request` says no (KV in transmission, a connector's load)."""

    step_seconds: float = 0.01
    max_batch_size: int = 4
    max_num_tokens: int = 256
    max_num_blocks: int = 512
    tokens_per_block: int = 16
    refusals: int = 0
    enable_iter_perf_stats: bool = True
    iter_stats_max_iterations: int = 1000


class PyExecutor:
    """Continuous batching over a pool of blocks."""

    def __init__(self, config: ExecutorConfig, proxy: GenerationExecutorProxy) -> None:
        self.config = config
        self._proxy = proxy
        self.active_requests: list[GenerationRequest] = []
        self.waiting_queue: deque[GenerationRequest] = deque()
        self.canceled_req_ids: set[int] = set()
        self.iter_counter = 0
        self.stats: deque[dict[str, Any]] = deque(maxlen=config.iter_stats_max_iterations)
        #: (request id, why it left, monotonic seconds): for the tests, not imitated.
        self.left: deque[tuple[int, str, float]] = deque(maxlen=10_000)
        self.is_shutdown = False
        self._thread = threading.Thread(target=self._executor_loop, name="worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def used_blocks(self) -> int:
        return sum(request.blocks for request in list(self.active_requests))

    def _executor_loop(self) -> None:
        while not self.is_shutdown:
            self._fetch_and_activate_new_requests()
            if not self.active_requests:
                continue
            self._forward_step()
            self._handle_canceled_requests()
            finished = self._handle_responses()
            self._process_iter_stats(finished)

    def _fetch_and_activate_new_requests(self) -> None:
        timeout: float | None = None if self.active_requests or self.waiting_queue else _IDLE_SECONDS
        while True:
            try:
                item = self._proxy.request_queue.get(block=timeout is not None, timeout=timeout)
            except queue.Empty:
                break
            timeout = None
            if isinstance(item, CancellingRequest):
                self.canceled_req_ids.add(item.id)
            else:
                self.waiting_queue.append(item)
        self._update_waiting_queue()
        while self.waiting_queue and len(self.active_requests) < self.config.max_batch_size:
            self.active_requests.append(self.waiting_queue.popleft())
        known = {request.id for request in self.active_requests}
        # Cancels for what has ended already.
        self.canceled_req_ids &= known

    def _update_waiting_queue(self) -> None:
        """Whoever is cancelled while it waits leaves without a word: no response, so its promise never ends."""
        for request in [request for request in self.waiting_queue if request.id in self.canceled_req_ids]:
            self.waiting_queue.remove(request)
            self.canceled_req_ids.discard(request.id)
            self.left.append((request.id, "cancelled while waiting", time.monotonic()))

    def _forward_step(self) -> None:
        time.sleep(self.config.step_seconds)
        for request in self.active_requests:
            missing = len(request.prompt_token_ids) - request.computed_tokens
            if missing > 0:
                request.computed_tokens += min(missing, self.config.max_num_tokens)
                missing = len(request.prompt_token_ids) - request.computed_tokens
            if missing <= 0:
                request.output_tokens += 1
                request.new_tokens.append((sum(request.prompt_token_ids) * 31 + request.output_tokens * 7) % 997)
                if request.output_tokens >= request.max_tokens:
                    request.finish_reason = "length"
            tokens = request.computed_tokens + request.output_tokens * request.n
            request.blocks = -(-tokens // self.config.tokens_per_block)

    def _handle_canceled_requests(self) -> None:
        for request in self.active_requests:
            if request.id in self.canceled_req_ids and self._try_cancel_request(request):
                request.finish_reason = "cancelled"
                self.canceled_req_ids.discard(request.id)

    def _try_cancel_request(self, request: GenerationRequest) -> bool:
        """May refuse; the id stays in `canceled_req_ids`, and the next loop tries again."""
        if request.refusals < self.config.refusals:
            request.refusals += 1
            return False
        return True

    def _handle_responses(self) -> list[GenerationRequest]:
        finished = [request for request in self.active_requests if request.finish_reason]
        self.active_requests = [request for request in self.active_requests if not request.finish_reason]
        for request in [*self.active_requests, *finished]:
            final = bool(request.finish_reason)
            if final:
                request.blocks = 0
                self.left.append((request.id, request.finish_reason, time.monotonic()))
            if final or (request.streaming and request.new_tokens):
                response = LlmResponse(request.id, request.new_tokens, final, request.finish_reason)
                self._proxy.result_queue.put(response)
                request.new_tokens = []
        return finished

    def _process_iter_stats(self, finished: list[GenerationRequest]) -> None:
        self.iter_counter += 1
        if not self.config.enable_iter_perf_stats:
            return
        used = self.used_blocks
        self.stats.append(
            {
                "timestamp": time.strftime("%m-%d-%Y %H:%M:%S"),
                "iter": self.iter_counter,
                "iterLatencyMS": self.config.step_seconds * 1000,
                "numActiveRequests": len(self.active_requests),
                "numQueuedRequests": self._proxy.request_queue.qsize() + len(self.waiting_queue),
                "numCompletedRequests": len(finished),
                "maxNumActiveRequests": self.config.max_batch_size,
                "inflightBatchingStats": {
                    "numScheduledRequests": len(self.active_requests) + len(finished),
                    "numContextRequests": 0,
                    "numGenRequests": len(self.active_requests),
                    "numPausedRequests": 0,
                    "numCtxTokens": 0,
                },
                "kvCacheStats": {
                    "maxNumBlocks": self.config.max_num_blocks,
                    "freeNumBlocks": self.config.max_num_blocks - used,
                    "usedNumBlocks": used,
                    "tokensPerBlock": self.config.tokens_per_block,
                },
            }
        )
