"""HTTP messages over raw ASGI: a request that has been read, a response that has not been sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from stopguard.refengine.http_styles import HttpProblem

__all__ = ["Receive", "Request", "Response", "Scope", "Send", "json_response", "read_request"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Request(msgspec.Struct):
    """One request with its whole body. Header names are in lower case; of a repeated one the last counts."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; an empty body is an empty object. `HttpProblem` 400 otherwise."""
        if not self.body.strip():
            return {}
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HttpProblem(400, f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise HttpProblem(400, "the body must be a JSON object")
        return value


class Response(msgspec.Struct):
    """What goes back when nothing is streamed."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def start(self, extra: tuple[tuple[bytes, bytes], ...]) -> dict[str, Any]:
        """The first ASGI message."""
        headers = [*extra, *self.headers, (b"content-length", b"%d" % len(self.body))]
        if self.body:
            headers.append((b"content-type", self.content_type.encode()))
        return {"type": "http.response.start", "status": self.status, "headers": headers}


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(status, msgspec.json.encode(value))


def head_of(scope: Scope) -> Request:
    """The request without its body."""
    return Request(
        method=scope["method"],
        path=scope["path"],
        query=dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)),
        headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]},
    )


async def read_request(scope: Scope, receive: Receive, body_bytes_max: int) -> Request | None:
    """The whole request; None when the client left during its upload. `HttpProblem` 413 when it is too large."""
    request = head_of(scope)
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > body_bytes_max:
        raise HttpProblem(413, f"the body has {announced} bytes; at most {body_bytes_max} are accepted")
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        length += len(part)
        if length > body_bytes_max:
            raise HttpProblem(413, f"the body is longer than {body_bytes_max} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            request.body = b"".join(parts)
            return request
