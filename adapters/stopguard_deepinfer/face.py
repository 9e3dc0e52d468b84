"""A small HTTP face for DeepInfer's engine, since its release (0.1.0) has none: OpenAI's two routes, an abort, gauges.

An ASGI application over anything with the methods of `LLMEngine` (`add_request`, `step`, `abort_request`,
`has_unfinished_requests`) and a `gauges`; the engine steps in a thread of its own. It is as plain as a server that
somebody writes around the engine in an afternoon, so that what the engine does can be seen through it:

* `aborts="between"`: aborts are carried out by the stepping thread, between two steps;
* `aborts="at-once"`: by whoever asks, while a step may be in flight;
* `aborts="guarded"`: between two steps and through `InProcessStops`, which repeats and proves them.

A client that leaves is an abort. `POST /abort {"request_id": …}` answers what `abort_request` returned
(``{"aborted": sequences, "tokens": …}``) and judges nothing. The id of a request is its `X-Request-Id`.

Texts: a word of a prompt is one token, and a token of the output one word. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from stopguard_deepinfer.inprocess import AbortSaid, InProcessStops

__all__ = ["ABORT_MODES", "Face"]

ABORT_MODES: Final = ("between", "at-once", "guarded")
GAUGES_PATH: Final = "/deepinfer/gauges"
_BODY_BYTES_MAX: Final = 8 * 1024 * 1024
_CHOICES_MAX: Final = 64
_PROMPT_TOKENS_MAX: Final = 100_000
_REQUESTS_MAX: Final = 10_000
_IDLE_SECONDS: Final = 0.002
_VOCABULARY: Final = 900
_FIRST_TOKEN: Final = 3

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class _Refused(Exception):
    """The request cannot be served: status, message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class _Asked:
    """One request for generation."""

    request_id: str
    chat: bool
    stream: bool
    prompts: list[list[int]]
    choices: int
    max_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass
class _Live:
    """A request whose sequences run; `events` carries outputs and ends to the loop."""

    events: asyncio.Queue[tuple[int, int, str]]
    numbers: dict[int, int]


class Face:
    """The application. `start` begins to step, `stop` ends it; both are called by the server's lifespan."""

    def __init__(self, engine: Any, *, model: str = "tiny", model_tokens: int = 4096, aborts: str = "between") -> None:
        if aborts not in ABORT_MODES:
            raise ValueError(f"aborts must be one of {', '.join(ABORT_MODES)}, not {aborts!r}")
        self._engine = engine
        self._model = model
        self._model_tokens = model_tokens
        self._aborts = aborts
        self._stops = InProcessStops(engine)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- the stepping thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to step."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="deepinfer steps", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the stepping thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._ended.is_set():
            while True:
                try:
                    self._commands.get_nowait()()
                except queue.Empty:
                    break
            if self._engine.has_unfinished_requests():
                outputs = self._engine.step()
                if self._aborts == "guarded":
                    self._stops.after_step()
                if outputs and self._loop is not None and not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(self._hand_out, outputs)
            elif self._stops.pending:
                self._stops.after_step()  # nothing is in flight: an empty step is a step
            else:
                time.sleep(_IDLE_SECONDS)

    def _hand_out(self, outputs: Iterable[Any]) -> None:
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is not None and output.sequence in live.numbers:
                live.events.put_nowait((live.numbers[output.sequence], output.token_id, output.finish_reason))

    async def _between_steps(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the stepping thread between two steps; what it returns."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # handed to whoever asked
                loop.call_soon_threadsafe(_settle, done, None, error)
            else:
                loop.call_soon_threadsafe(_settle, done, result, None)

        self._commands.put(run)
        return await done

    async def _abort(self, request_id: str) -> tuple[int, int]:
        if self._aborts == "at-once":
            aborted: tuple[int, int] = self._engine.abort_request([request_id])
        elif self._aborts == "between":
            aborted = await self._between_steps(lambda: self._engine.abort_request([request_id]))
        else:
            said = await self._between_steps(lambda: self._stops.abort(request_id))
            aborted = (0 if said is AbortSaid.UNKNOWN else 1, 0)
        return aborted

    # ---- HTTP -------------------------------------------------------------------------------------

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI 3."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            try:
                await self._answer(scope, receive, send)
            except _Refused as refused:
                error = {"message": str(refused), "type": "invalid_request_error", "code": refused.status}
                await _send_json(send, {"error": error}, refused.status)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        match scope["method"], scope["path"]:
            case "GET", "/health":
                await _send_json(send, {"status": "ok"})
            case "GET", "/v1/models":
                entry = {
                    "id": self._model,
                    "object": "model",
                    "owned_by": "deepinfer",
                    "max_model_len": self._model_tokens,
                }
                await _send_json(send, {"object": "list", "data": [entry]})
            case "GET", "/deepinfer/gauges":
                await _send_json(send, {**self._engine.gauges(), "aborts": self._aborts})
            case "POST", "/abort":
                body = await _read_json(receive)
                request_id = body.get("request_id")
                if not isinstance(request_id, str) or not request_id:
                    raise _Refused(400, "request_id must be a text")
                aborted, tokens = await self._abort(request_id)
                await _send_json(send, {"aborted": aborted, "tokens": tokens})
            case "POST", "/v1/completions" | "/v1/chat/completions":
                await self._generate(scope, receive, send)
            case _:
                raise _Refused(404, f"there is no {scope['method']} {scope['path']}")

    async def _generate(self, scope: Message, receive: Receive, send: Send) -> None:
        asked = self._read_ask(scope, await _read_json(receive))
        if len(self._live) >= _REQUESTS_MAX:
            raise _Refused(503, f"{_REQUESTS_MAX} requests are open already")
        if asked.request_id in self._live:
            raise _Refused(400, f"a request with the id {asked.request_id} runs already")
        live = self._live[asked.request_id] = _Live(asyncio.Queue(), {})
        leaving = asyncio.ensure_future(_gone(receive))
        serving = asyncio.ensure_future(self._serve(asked, live, send))
        try:
            await self._between_steps(lambda: self._add(asked, live))
            await asyncio.wait({leaving, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await self._abort(asked.request_id)
        finally:
            del self._live[asked.request_id]
            for task in (leaving, serving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    def _add(self, asked: _Asked, live: _Live) -> None:
        """In the stepping thread."""
        for number in range(len(asked.prompts) * asked.choices):
            prompt = asked.prompts[number // asked.choices]
            sequence = self._engine.add_request("face", asked.request_id, {"max_tokens": asked.max_tokens}, prompt)
            live.numbers[sequence.seq_id] = number
            if self._aborts == "guarded":
                self._stops.add(asked.request_id, sequence)

    async def _serve(self, asked: _Asked, live: _Live, send: Send) -> None:
        """Hand out what comes, until every choice has ended."""
        texts = [""] * (len(asked.prompts) * asked.choices)
        reasons: dict[int, str] = {}
        tokens = 0
        if asked.stream:
            head = [(b"content-type", b"text/event-stream"), (b"x-request-id", asked.request_id.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": head})
        while len(reasons) < len(texts):
            number, token, reason = await live.events.get()
            word = "" if token < 0 else f" w{token}"
            tokens += token >= 0
            texts[number] += word
            if reason:
                reasons[number] = reason
            if asked.stream:
                await _send_event(send, _chunk(asked, self._model, number, word, reason or None))
        usage = {
            "prompt_tokens": sum(map(len, asked.prompts)),
            "completion_tokens": tokens,
            "total_tokens": sum(map(len, asked.prompts)) + tokens,
        }
        if asked.stream:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        else:
            choices = [_choice(asked, number, text, reasons[number]) for number, text in enumerate(texts)]
            await _send_json(send, {**_envelope(asked, self._model), "choices": choices, "usage": usage})

    def _read_ask(self, scope: Message, body: dict[str, Any]) -> _Asked:
        chat = scope["path"] == "/v1/chat/completions"
        if body.get("model") not in (None, self._model):
            raise _Refused(404, f"the model {body.get('model')!r} is not served here; {self._model} is")
        prompts = [_chat_text(body.get("messages"))] if chat else _prompts(body.get("prompt"))
        tokens = [prompt if isinstance(prompt, list) else _encode(prompt) for prompt in prompts]
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        choices = body.get("n") or 1
        if not isinstance(limit, int) or limit < 1 or not isinstance(choices, int) or not 1 <= choices <= _CHOICES_MAX:
            raise _Refused(400, f"max_tokens must be at least 1, n between 1 and {_CHOICES_MAX}")
        longest = max(map(len, tokens))
        if longest + limit > self._model_tokens:
            raise _Refused(400, f"{longest} + {limit} tokens are more than the {self._model_tokens} of the model")
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1") or uuid.uuid4().hex
        return _Asked(
            request_id=request_id,
            chat=chat,
            stream=body.get("stream") is True,
            prompts=tokens,
            choices=choices,
            max_tokens=limit,
        )


# ---- small things ---------------------------------------------------------------------------------------


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


async def _gone(receive: Receive) -> None:
    """Until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_json(receive: Receive) -> dict[str, Any]:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Refused(400, "the client left")
        body += message.get("body", b"")
        if len(body) > _BODY_BYTES_MAX:
            raise _Refused(413, f"a body may have {_BODY_BYTES_MAX} bytes")
        if not message.get("more_body"):
            break
    try:
        value = json.loads(body)
    except ValueError as error:
        raise _Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Refused(400, "the body must be a JSON object")
    return value


async def _send_json(send: Send, value: Any, status: int = 200) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_event(send: Send, value: Any) -> None:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _envelope(asked: _Asked, model: str) -> dict[str, Any]:
    kind = "chat.completion" if asked.chat else "text_completion"
    prefix = "chatcmpl" if asked.chat else "cmpl"
    return {"id": f"{prefix}-{asked.request_id}", "object": kind, "created": asked.created, "model": model}


def _chunk(asked: _Asked, model: str, number: int, word: str, reason: str | None) -> dict[str, Any]:
    part = {"delta": {"content": word} if word else {}} if asked.chat else {"text": word}
    envelope = _envelope(asked, model)
    if asked.chat:
        envelope["object"] = "chat.completion.chunk"
    return {**envelope, "choices": [{"index": number, **part, "finish_reason": reason}]}


def _choice(asked: _Asked, number: int, text: str, reason: str) -> dict[str, Any]:
    part = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
    return {"index": number, **part, "finish_reason": reason}


def _chat_text(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        raise _Refused(400, "messages must be a list that is not empty")
    return " ".join(str(message.get("content") or "") for message in messages if isinstance(message, dict))


def _prompts(prompt: Any) -> list[Any]:
    """A text, several, one list of token ids, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt or len(prompt) > _CHOICES_MAX:
        raise _Refused(400, f"prompt must be a text, a list of tokens, or up to {_CHOICES_MAX} of these")
    if all(isinstance(token, int) for token in prompt):
        return [_ids(prompt)]
    return [part if isinstance(part, str) else _ids(part) for part in prompt]


def _ids(tokens: Any) -> list[int]:
    """Token ids that the scheduler can take: it does no bounds checks of its own."""
    known = range(_FIRST_TOKEN + _VOCABULARY)
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int and token in known for token in tokens):
        raise _Refused(400, f"a prompt of token ids must have some, each below {known.stop}")
    return tokens


def _encode(text: str) -> list[int]:
    tokens = [_FIRST_TOKEN + zlib.crc32(word.encode()) % _VOCABULARY for word in text.split()] or [_FIRST_TOKEN]
    if len(tokens) > _PROMPT_TOKENS_MAX:
        raise _Refused(400, f"a prompt may have {_PROMPT_TOKENS_MAX} words")
    return tokens
