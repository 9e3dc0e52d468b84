"""`GenerationResult`: the promise that a handler consumes.

As in the engine, `finished` turns true only when the *consumer* takes the final response from the queue: a stream whose
client has left has no consumer any more, and its promise stays unfinished although the worker is done with it.
"""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tensorrt_llm.executor.proxy import GenerationExecutorProxy  # type: ignore[import-not-found]

    from .request import GenerationRequest

__all__ = ["CompletionOutput", "GenerationResult", "LlmResponse"]


@dataclass(frozen=True)
class LlmResponse:
    """What the worker sends back after a step."""

    client_id: int
    token_ids: list[int]
    is_final: bool
    finish_reason: str = ""


@dataclass
class CompletionOutput:
    """The one output of a request."""

    token_ids: list[int] = field(default_factory=list)
    token_ids_diff: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(f"w{token} " for token in self.token_ids)

    @property
    def text_diff(self) -> str:
        return "".join(f"w{token} " for token in self.token_ids_diff)


class GenerationResult:
    """The handler's side of one request."""

    alive: ClassVar[weakref.WeakSet[GenerationResult]] = weakref.WeakSet()

    def __init__(self, generation_request: GenerationRequest, executor: GenerationExecutorProxy) -> None:
        self._generation_request = generation_request
        self._executor = weakref.ref(executor)
        self._done = False
        self._aborted = False
        self.aqueue: asyncio.Queue[LlmResponse] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.outputs = [CompletionOutput()]
        GenerationResult.alive.add(self)

    @property
    def request_id(self) -> int:
        return self._generation_request.id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._generation_request.prompt_token_ids

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        executor = self._executor()
        assert executor is not None
        executor.abort_request(self.request_id)
        self._aborted = True

    def _handle_response(self, response: LlmResponse) -> None:
        output = self.outputs[0]
        output.token_ids_diff = response.token_ids
        output.token_ids += response.token_ids
        self._done = response.is_final
        if response.is_final:
            output.finish_reason = response.finish_reason

    async def _aresult_step(self) -> None:
        response = await self.aqueue.get()
        self._handle_response(response)

    async def aresult(self) -> GenerationResult:
        while not self._done:
            await self._aresult_step()
        return self

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        await self._aresult_step()
        return self

    def __repr__(self) -> str:
        return f"GenerationResult(request_id={self.request_id}, finished={self.finished})"

    def deliver(self, response: Any) -> None:
        """From the proxy's thread."""
        self.loop.call_soon_threadsafe(self.aqueue.put_nowait, response)
