"""The upstream stub: an engine's HTTP face without the engine, cheap enough to sit behind the fastest proxy.

Run as ``python -m benchmarks.relay_bench.upstream PORT``. It reports the life of each request that names itself on
standard output, one line each, with CLOCK_MONOTONIC nanoseconds, which all processes of one machine share::

    began    IDENTITY NANOSECONDS    a request's body has come, or its first part
    closed   IDENTITY NANOSECONDS    the proxy closed or reset the connection before the answer was complete
    finished IDENTITY NANOSECONDS    the answer was sent to its end: nobody stopped it

A stub must never run for ever, so every answer is cut off after LIFETIME_SECONDS. The harness may also ask how many
answers are in progress (``GET /relay-bench/active``) and have them all broken off (``GET /relay-bench/abort``).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import ClassVar, cast

import httptools
import uvloop

from benchmarks.relay_bench.wire import CHUNK_MARK, MODEL, PATH, QUIET, Program, find_program

LIFETIME_SECONDS = 150.0
_DEFAULT_PROGRAM = Program()
_COMPLETIONS_PATH = PATH.encode()


def _json_response(value: object, status: str = "200 OK") -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _sse_chunk(delta: dict[str, str], finish_reason: str | None) -> bytes:
    event = {
        "id": "chatcmpl-relay-bench",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_COMPLETION = _json_response(
    {
        "id": "chatcmpl-relay-bench",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
)
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
# Chunks of one length that differ: LiteLLM ends a stream whose chunks repeat ("the model is repeating the same chunk").
_CHUNKS = [_sse_chunk({"content": f" token-{number:x}{CHUNK_MARK.decode()}"}, None) for number in range(16)]
_STREAM_END = _sse_chunk({}, "stop") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

_MODELS = _json_response(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "relay-bench"}]}
)
# The routers ask an engine who it is before they send it anything (paths seen in their requests to this stub:
# sglang-router 0.3.2 and vllm-router 0.1.17).
_INFO = _json_response(
    {
        "model_path": MODEL,
        "served_model_name": MODEL,
        "tokenizer_path": MODEL,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "version": "0.5.0",
        "tp_size": 1,
        "dp_size": 1,
        "max_total_num_tokens": 1_000_000,
        "max_req_input_len": 100_000,
        "max_model_len": 131_072,
    }
)
_GETS = {
    b"/v1/models": _MODELS,
    b"/get_server_info": _INFO,
    b"/server_info": _INFO,
    b"/get_model_info": _INFO,
    b"/model_info": _INFO,
    b"/version": _json_response({"version": "0.11.0"}),
    b"/get_load": _json_response([]),
}
# With its default policy vllm-router asks for a prompt's tokens before it chooses an engine, so it makes two requests
# of each; it sends the first one the whole completion request.
_POSTS = {
    b"/v1/chat/completions/render": _json_response({"request_id": "relay-bench", "token_ids": [1, 2, 3, 4]}),
    b"/tokenize": _json_response({"count": 4, "max_model_len": 131_072, "tokens": [1, 2, 3, 4]}),
}
_OK = _json_response({"status": "ok"})


def report(event: str, identity: str, at_ns: int) -> None:
    """Writes one line to the harness."""
    os.write(1, f"{event} {identity} {at_ns}\n".encode())


class EngineConnection(asyncio.Protocol):
    """One connection of a proxy: requests one after another, each answered by its program."""

    answering: ClassVar[set[EngineConnection]] = set()
    """The connections on which an answer is in progress."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._url = b""
        self._body = b""
        self._expects_continue = False
        self._identity = QUIET
        self._answering = False
        self._program = _DEFAULT_PROGRAM
        self._timer: asyncio.Handle | None = None
        self._lifetime: asyncio.Handle | None = None
        self._chunks_left = 0
        self._next_chunk_at = 0.0
        self._paused = False

    # -- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()
            return
        if self._body and not self._answering:
            self._note_partial_body()

    def eof_received(self) -> None:
        self._gone()

    def connection_lost(self, error: Exception | None) -> None:
        self._gone()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._answering and self._timer is None and self._program.chunk_gap_ms == 0 and self._chunks_left:
            self._timer = self._loop.call_soon(self._send_chunk)

    # -- the parser

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = b""
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect":
            self._expects_continue = True

    def on_headers_complete(self) -> None:
        if self._expects_continue:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() != b"POST":
            self._answer_question(self._url.partition(b"?")[0])
            return
        body, self._body = self._body, b""
        path = self._url.partition(b"?")[0]
        if path == _COMPLETIONS_PATH:
            self._answer(body)
        else:
            self._transport.write(_POSTS.get(path, _OK))

    def _answer_question(self, path: bytes) -> None:
        if path == b"/relay-bench/active":
            self._transport.write(_json_response({"active": len(self.answering)}))
            return
        if path == b"/relay-bench/abort":
            for connection in self.answering:
                connection._transport.abort()
        self._transport.write(_GETS.get(path, _OK))

    # -- one answer

    def _note_partial_body(self) -> None:
        if self._identity != QUIET or self._url != _COMPLETIONS_PATH:
            return
        program = find_program(self._body)
        if program is not None and program.identity != QUIET:
            self._identity = program.identity
            report("began", self._identity, time.monotonic_ns())

    def _answer(self, body: bytes) -> None:
        streaming = bool(json.loads(body or b"{}").get("stream"))
        program = find_program(body)
        if program is None:
            if not streaming:
                self._transport.write(_COMPLETION)
                return
            program = _DEFAULT_PROGRAM
        if program.identity != self._identity:
            self._identity = program.identity
            report("began", program.identity, time.monotonic_ns())
        self._program = program
        self._answering = True
        self.answering.add(self)
        self._lifetime = self._loop.call_later(LIFETIME_SECONDS, self._transport.abort)
        begin = self._begin_stream if streaming else self._send_completion
        if program.headers_after_ms:
            self._timer = self._loop.call_later(program.headers_after_ms / 1000, begin)
        else:
            begin()

    def _send_completion(self) -> None:
        self._timer = None
        self._transport.write(_COMPLETION)
        self._end("finished")

    def _begin_stream(self) -> None:
        self._transport.write(_STREAM_HEAD)
        self._chunks_left = self._program.chunks
        delay_seconds = self._program.first_chunk_after_ms / 1000
        self._next_chunk_at = self._loop.time() + delay_seconds
        self._timer = self._loop.call_at(self._next_chunk_at, self._send_chunk)

    def _send_chunk(self) -> None:
        self._timer = None
        if self._chunks_left == 0:
            self._transport.write(_STREAM_END)
            self._end("finished")
            return
        self._chunks_left -= 1
        self._transport.write(_CHUNKS[self._chunks_left & 15])
        if self._program.chunk_gap_ms:
            # Absolute times, so that a late chunk does not make all later ones late and the offered rate stays fixed.
            self._next_chunk_at += self._program.chunk_gap_ms / 1000
            self._timer = self._loop.call_at(self._next_chunk_at, self._send_chunk)
        elif not self._paused:
            self._timer = self._loop.call_soon(self._send_chunk)

    def _gone(self) -> None:
        if self._answering:
            self._end("closed")
        elif self._identity != QUIET:
            report("closed", self._identity, time.monotonic_ns())
            self._identity = QUIET

    def _end(self, event: str) -> None:
        at_ns = time.monotonic_ns()
        if self._identity != QUIET:
            report(event, self._identity, at_ns)
        self._identity = QUIET
        self._answering = False
        self._chunks_left = 0
        self.answering.discard(self)
        for handle in (self._timer, self._lifetime):
            if handle is not None:
                handle.cancel()
        self._timer = self._lifetime = None


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(EngineConnection, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
