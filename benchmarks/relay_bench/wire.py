"""What travels between the client, the proxy under test and the upstream stub.

A request carries its own *program* (when the stub answers, how fast, how long) in the text of its message, because that
is the one free-form place that every peer passes on: several drop unknown headers, and sglang-router 0.3.2 rebuilds the
body from a typed model that has no ``user``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import httptools

MODEL = "relay-bench"
PATH = "/v1/chat/completions"

CHUNK_MARK = b"~"
"""One such byte is in every streamed chunk and nowhere else in a response, so counting it counts chunks, however the
proxy splits or joins them."""

QUIET = "-"
"""The identity of requests whose life the stub does not report."""

_PROGRAM = re.compile(rb"relay-bench/([A-Za-z0-9-]+)/(\d+)/(\d+)/(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Program:
    """How the stub answers one request. Times are milliseconds.

    ``headers_after_ms`` is the whole working time of a non-streaming request; ``first_chunk_after_ms`` counts from
    the headers; ``chunk_gap_ms`` zero means as fast as the reader takes them.
    """

    identity: str = QUIET
    headers_after_ms: int = 0
    first_chunk_after_ms: int = 0
    chunk_gap_ms: int = 0
    chunks: int = 16

    def encode(self) -> str:
        """The text that the request's message begins with."""
        return (
            f"relay-bench/{self.identity}/{self.headers_after_ms}/{self.first_chunk_after_ms}"
            f"/{self.chunk_gap_ms}/{self.chunks}"
        )


def find_program(body: bytes) -> Program | None:
    """The program in ``body``, which may be the beginning of a body only; None where there is none."""
    found = _PROGRAM.search(body)
    if found is None:
        return None
    identity, headers, first, gap, chunks = found.groups()
    return Program(identity.decode(), int(headers), int(first), int(gap), int(chunks))


def chat_body(*, stream: bool, program: Program | None = None, padding_bytes: int = 0) -> bytes:
    """A chat completion's JSON body; the message comes first so that a half-sent body already names its request."""
    text = "hi" if program is None else program.encode()
    content = f"{text} {'.' * padding_bytes}" if padding_bytes else text
    fields = {
        "messages": [{"role": "user", "content": content}],
        "model": MODEL,
        "stream": stream,
        "max_tokens": 16,
    }
    return json.dumps(fields).encode()


def request_head(path: str, body_bytes: int, api_key: str, method: str = "POST") -> bytes:
    """The head of a keep-alive HTTP/1.1 request."""
    return (
        f"{method} {path} HTTP/1.1\r\nhost: relay-bench.local\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {api_key}\r\ncontent-length: {body_bytes}\r\n\r\n"
    ).encode()


def chat_request(api_key: str, *, stream: bool, program: Program | None = None) -> bytes:
    """A whole chat completion request."""
    body = chat_body(stream=stream, program=program)
    return request_head(PATH, len(body), api_key) + body


class ResponseReader:
    """Feeds bytes to a parser and calls ``on_response(status)`` at the end of each response.

    ``body`` holds the current response's body only when ``keep_body`` is set.
    """

    __slots__ = ("_keep_body", "_on_response", "_parser", "body")

    def __init__(self, on_response: Callable[[int], None], *, keep_body: bool = False) -> None:
        self._on_response = on_response
        self._keep_body = keep_body
        self._parser = httptools.HttpResponseParser(self)
        self.body = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes bytes from the wire. Raises httptools.HttpParserError on bytes that are no response."""
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Parser callback."""
        if self._keep_body:
            self.body += data

    def on_message_complete(self) -> None:
        """Parser callback."""
        self._on_response(self._parser.get_status_code())
