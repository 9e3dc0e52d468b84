"""`OpenAIServer`: FastAPI on uvicorn, its disconnects found by a poll.

The names, signatures and behaviour that matter to a stop are those of `tensorrt_llm/serve/openai_server.py` (main,
1.3.0rc): `await_disconnected(raw_request, promise)` is started as a task nobody keeps, once for each prompt; the stream
generators only log and pass on; nothing else aborts.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from tensorrt_llm.executor.result import GenerationResult  # type: ignore[import-not-found]
from tensorrt_llm.llmapi.llm import LLM  # type: ignore[import-not-found]
from tensorrt_llm.logger import logger  # type: ignore[import-not-found]
from tensorrt_llm.version import __version__ as VERSION  # type: ignore[import-not-found]  # noqa: N812

__all__ = ["OpenAIServer"]

TIMEOUT_KEEP_ALIVE = 5


class OpenAIServer:
    """`generator` is the engine, `model` the name it is served under. With `silent_after_end` nobody is told that a
    response has ended, as long as its connection is open: the server that NVIDIA/TensorRT-LLM#13777 describes.
    """

    def __init__(self, generator: LLM, model: str, *, silent_after_end: bool = False) -> None:
        self.generator = generator
        self.model = model
        self._prometheus: dict[str, float] = {}
        self._iteration_stats_buffer: list[dict[str, Any]] = []
        self._iteration_stats_wakeup_event = asyncio.Event()

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            collector = None
            if generator.args.return_perf_metrics:
                collector = asyncio.create_task(self._iteration_stats_collector_loop())
            yield
            if collector is not None:
                collector.cancel()
            generator.shutdown()

        self.app = FastAPI(lifespan=lifespan)
        self.register_routes()
        if silent_after_end:
            self.app.add_middleware(_SilentAfterEnd)

    async def await_disconnected(self, raw_request: Request | None, promise: Any) -> None:
        if raw_request is None:
            return
        while not await raw_request.is_disconnected():  # noqa: ASYNC110 (the poll is the point)
            await asyncio.sleep(1)
        if not promise.finished:
            promise.abort()
            logger.info(f"{raw_request.client} is disconnected, abort {promise.request_id}")

    def register_routes(self) -> None:
        add = self.app.add_api_route
        add("/health", self.health, methods=["GET"])
        add("/version", self.version, methods=["GET"])
        add("/v1/models", self.get_model, methods=["GET"])
        add("/metrics", self.get_iteration_stats, methods=["GET"])
        add("/perf_metrics", self.get_perf_metrics, methods=["GET"])
        add("/v1/completions", self.openai_completion, methods=["POST"])
        add("/v1/chat/completions", self.openai_chat, methods=["POST"])
        if self.generator.args.return_perf_metrics:
            add("/prometheus/metrics", self.prometheus_metrics, methods=["GET"])
        add("/standin/truth", self.truth, methods=["GET"])

    # ---- about itself ----------------------------------------------------------------------------

    async def health(self) -> Response:
        return Response(status_code=200)

    async def version(self) -> JSONResponse:
        return JSONResponse(content={"version": VERSION})

    async def get_model(self) -> JSONResponse:
        card = {"id": self.model, "object": "model", "created": int(time.time()), "owned_by": "tensorrt_llm"}
        return JSONResponse(content={"object": "list", "data": [card]})

    async def get_perf_metrics(self) -> JSONResponse:
        return JSONResponse(content=[])

    async def get_iteration_stats(self) -> JSONResponse:
        """With the collector's buffer at once; without it as `get_stats_async(2)` has it."""
        if self.generator.args.return_perf_metrics:
            kept, self._iteration_stats_buffer = self._iteration_stats_buffer, []
            return JSONResponse(content=kept + [stat async for stat in self.generator.get_stats_async(None)])
        return JSONResponse(content=[stat async for stat in self.generator.get_stats_async(2)])

    async def _iteration_stats_collector_loop(self) -> None:
        """Wakes when a response was completed: until then the gauges say what was true after the one before."""
        while True:
            await self._iteration_stats_wakeup_event.wait()
            self._iteration_stats_wakeup_event.clear()
            async for stat in self.generator.get_stats_async(None):
                self._iteration_stats_buffer.append(stat)
                cache = stat["kvCacheStats"]
                self._prometheus = {
                    "trtllm_num_requests_running": stat["numActiveRequests"],
                    "trtllm_num_requests_waiting": stat["numQueuedRequests"],
                    "trtllm_num_paused_requests": stat["inflightBatchingStats"]["numPausedRequests"],
                    "trtllm_kv_cache_used_blocks": cache["usedNumBlocks"],
                    "trtllm_kv_cache_free_blocks": cache["freeNumBlocks"],
                    "trtllm_kv_cache_max_blocks": cache["maxNumBlocks"],
                }
            del self._iteration_stats_buffer[:-1000]

    async def prometheus_metrics(self) -> Response:
        labels = f'{{engine_type="pytorch",model_name="{self.model}"}}'
        lines = [
            line
            for name, value in self._prometheus.items()
            for line in (f"# TYPE {name} gauge", f"{name}{labels} {float(value)}")
        ]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def truth(self) -> JSONResponse:
        """For the tests: what no such server would tell."""
        worker = self.generator.worker
        names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
        return JSONResponse(
            content={
                "pid": os.getpid(),
                "active": len(worker.active_requests),
                "waiting": len(worker.waiting_queue) + self.generator._executor.request_queue.qsize(),
                "blocks": worker.used_blocks,
                "iterations": worker.iter_counter,
                "left": list(worker.left),
                "watchers": sum(name.endswith("await_disconnected") for name in names),
                "listeners": sum("stopguard" in task.get_name() for task in asyncio.all_tasks()),
                "promises": len(GenerationResult.alive),
                "results": len(self.generator._executor._results),
                "tasks": len(names),
            }
        )

    # ---- generating ------------------------------------------------------------------------------

    async def openai_chat(self, request: dict[str, Any], raw_request: Request) -> Response:
        words = " ".join(str(message.get("content", "")) for message in request.get("messages", []))
        promise = self._generate(request, words)
        self._watch(raw_request, promise)
        if request.get("stream"):
            return StreamingResponse(self._stream([promise], chat=True), media_type="text/event-stream")
        await promise.aresult()
        return self._answer([promise], chat=True)

    async def openai_completion(self, request: dict[str, Any], raw_request: Request) -> Response:
        prompts = request.get("prompt", "")
        promises = []
        for prompt in prompts if isinstance(prompts, list) else [prompts]:
            promise = self._generate(request, prompt)
            self._watch(raw_request, promise)
            promises.append(promise)
        if request.get("stream"):
            return StreamingResponse(self._stream(promises, chat=False), media_type="text/event-stream")
        await asyncio.gather(*[promise.aresult() for promise in promises])
        return self._answer(promises, chat=False)

    def _watch(self, raw_request: Request, promise: GenerationResult) -> None:
        """As the engine does it: a task that nobody keeps."""
        _ = asyncio.create_task(self.await_disconnected(raw_request, promise))  # noqa: RUF006

    def _generate(self, request: dict[str, Any], prompt: str) -> GenerationResult:
        tokens = [sum(word.encode()) % 997 for word in prompt.split()] or [0]
        wanted = int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)
        stream, n = bool(request.get("stream")), int(request.get("n") or 1)
        return self.generator.generate_async(tokens, max_tokens=wanted, streaming=stream, n=n)

    async def _stream(self, promises: list[GenerationResult], *, chat: bool) -> AsyncIterator[str]:
        name, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        try:
            for index, promise in enumerate(promises):
                async for result in promise:
                    output = result.outputs[0]
                    piece = {"delta": {"content": output.text_diff}} if chat else {"text": output.text_diff}
                    choice = {"index": index, **piece, "finish_reason": output.finish_reason}
                    chunk = {"id": name, "created": created, "model": self.model, "choices": [choice]}
                    yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"
            self._iteration_stats_wakeup_event.set()
        except BaseException:
            logger.error("the stream of %s broke off", promises[0].request_id)
            raise

    def _answer(self, promises: list[GenerationResult], *, chat: bool) -> Response:
        self._iteration_stats_wakeup_event.set()
        choices = []
        for index, promise in enumerate(promises):
            output = promise.outputs[0]
            text = {"message": {"role": "assistant", "content": output.text}} if chat else {"text": output.text}
            choices.append({"index": index, **text, "finish_reason": output.finish_reason})
        asked = sum(len(promise.prompt_token_ids) for promise in promises)
        given = sum(len(promise.outputs[0].token_ids) for promise in promises)
        usage = {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}
        content = {"id": f"cmpl-{uuid.uuid4().hex}", "model": self.model, "choices": choices, "usage": usage}
        return JSONResponse(content=content, status_code=HTTPStatus.OK)

    async def __call__(self, host: str, port: int, fd: int) -> None:
        config = uvicorn.Config(
            self.app, host=host, port=port, fd=fd, log_level="warning", timeout_keep_alive=TIMEOUT_KEEP_ALIVE
        )
        await uvicorn.Server(config).serve()


class _SilentAfterEnd:
    """Keeps ``http.disconnect`` to itself when it only means that the response has ended."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        ended = False

        async def receive_until_end() -> Any:
            message = await receive()
            if ended and message["type"] == "http.disconnect":
                await asyncio.Event().wait()
            return message

        async def send_and_look(message: Any) -> None:
            nonlocal ended
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        await self.app(scope, receive_until_end, send_and_look)
