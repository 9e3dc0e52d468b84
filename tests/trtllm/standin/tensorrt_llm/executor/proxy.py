"""`GenerationExecutorProxy`: the serve process's end of the queues to and from the worker."""

from __future__ import annotations

import queue
import threading

from tensorrt_llm.executor.request import CancellingRequest, GenerationRequest  # type: ignore[import-not-found]
from tensorrt_llm.executor.result import GenerationResult, LlmResponse  # type: ignore[import-not-found]

__all__ = ["GenerationExecutorProxy"]


class GenerationExecutorProxy:
    """`request_queue` is one FIFO for work and cancels alike."""

    def __init__(self) -> None:
        self.request_queue: queue.Queue[GenerationRequest | CancellingRequest] = queue.Queue()
        self.result_queue: queue.Queue[LlmResponse | None] = queue.Queue()
        self._results: dict[int, GenerationResult] = {}
        self._last_id = 0
        self._dispatcher = threading.Thread(target=self.dispatch_result_task, name="dispatch results", daemon=True)
        self._dispatcher.start()

    def submit(self, request: GenerationRequest) -> GenerationResult:
        self._last_id += 1
        request.id = self._last_id
        result = GenerationResult(request, executor=self)
        self._results[request.id] = result
        self.request_queue.put(request)
        return result

    def abort_request(self, request_id: int) -> None:
        self.request_queue.put(CancellingRequest(request_id))

    def dispatch_result_task(self) -> None:
        while (response := self.result_queue.get()) is not None:
            result = self._results.get(response.client_id)
            if result is None:
                continue
            result.deliver(response)
            if response.is_final:
                self._results.pop(response.client_id)
            del result
