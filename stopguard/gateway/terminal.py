"""What StopGuard itself says to a client: errors, and the end of a stopped stream, in the shape of the API.

A client that is still connected is never cut silently. If its response has not begun it gets an error
body; if a stream is under way it gets a last event in the form that its API uses for an end, with a
`stopguard` object that says why, by whom, and whether the request may be sent again.

A stream that was *stopped* (the cancel API, a deadline, a shutdown) ends with a finish reason and the API's
end marker. A stream that *broke* (the engine was lost) ends with an error event and without any end
marker, so that nobody can take what came for the whole answer.

OpenAI's and Anthropic's clients retry errors by themselves unless `x-should-retry` says otherwise
(openai-python `_base_client.py: _should_retry`); it is sent where a retry would be wrong.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from stopguard.gateway.routes import RouteKind
from stopguard.stops import RetryAdvice, Semantics, Source, StopCause

__all__ = [
    "CONTINUE",
    "Notice",
    "error_body",
    "error_response",
    "json_response",
    "notice_of_stop",
    "stream_error",
    "stream_stopped",
]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FINISH_REASON = "abort"
_encode = msgspec.json.Encoder().encode
_REASONS = {499: "Request Cancelled"}
#: Anthropic's name for an error of each status; the others are `api_error`.
_MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said: the HTTP status, a stable code, one line for people, and the retry advice."""

    status: int
    code: str
    message: str
    advice: RetryAdvice | None = None
    should_retry: bool | None = None
    retry_after_seconds: int = 0
    close: bool = False

    def details(self, request_id: str) -> dict[str, object]:
        """The `stopguard` object beside the API's own fields."""
        details: dict[str, object] = {"code": self.code}
        if request_id:
            details["id"] = request_id
        if self.advice is not None:
            details["retry"] = "safe" if self.advice.safe else "unsafe"
            details["retry_reason"] = self.advice.reason
        return details


def notice_of_stop(cause: StopCause, advice: RetryAdvice, detail: str = "") -> Notice:
    """What a client is told whose request was stopped for `cause`. `detail` says more of a failure, for people."""
    if cause.source is Source.DEADLINE:
        kind = cause.reason.removesuffix("_deadline").replace("_", " ")
        return Notice(
            status=504,
            code=cause.reason,
            message=f"stopped: the {kind} deadline of this request has passed",
            advice=advice,
            should_retry=False,
        )
    if cause.source is Source.SUPERSEDED:
        message = "stopped: a newer request with the same Idempotency-Key took its place"
        return Notice(status=409, code="superseded", message=message, advice=advice, should_retry=False)
    if cause.semantics is Semantics.CANCEL:
        by = f" by {cause.actor}" if cause.actor else ""
        message = f"stopped: this request was cancelled{by}"
        return Notice(status=499, code="cancelled", message=message, advice=advice, should_retry=False)
    if cause.reason.startswith("resume_"):
        message = f"the stream was interrupted and cannot be continued: {detail or cause.reason.replace('_', ' ')}"
        return Notice(status=502, code=cause.reason, message=message, advice=advice, should_retry=advice.safe)
    if cause.source is Source.ENGINE:
        code = "engine_unreachable" if cause.reason == "unreachable" else "engine_lost"
        message = f"the engine failed before the response was complete: {detail or cause.reason.replace('_', ' ')}"
        return Notice(status=502, code=code, message=message, advice=advice, should_retry=advice.safe)
    if cause.reason == "queue_full":
        message = "the queue is full and others go first: try again later"
        return Notice(status=429, code=cause.reason, message=message, advice=advice, retry_after_seconds=1)
    message = f"the request was stopped: {detail or cause.reason.replace('_', ' ')}"
    return Notice(status=503, code=cause.reason, message=message, advice=advice, should_retry=advice.safe, close=True)


def error_body(kind: RouteKind, notice: Notice, request_id: str = "") -> bytes:
    """The JSON body of an error, in the shape of the API."""
    details = notice.details(request_id)
    if kind is RouteKind.MESSAGES:
        name = _MESSAGES_TYPES.get(notice.status, "api_error")
        error: dict[str, object] = {"type": name, "message": notice.message}
        return _encode({"type": "error", "error": error, "request_id": request_id or None, "stopguard": details})
    error = {
        "message": notice.message,
        "type": "invalid_request_error" if notice.status in (400, 404, 413) else "stopguard_error",
        "param": None,
        "code": notice.code,
    }
    return _encode({"error": error, "stopguard": details})


def error_response(
    kind: RouteKind,
    notice: Notice,
    *,
    request_id: str = "",
    alias: str = "",
    keep_alive: bool,
    head_only: bool = False,
    http_1_1: bool = True,
) -> bytes:
    """A whole response that says `notice`."""
    lines = b""
    if request_id:
        lines = b"x-stopguard-id: %b\r\nx-request-id: %b\r\n" % (request_id.encode(), (alias or request_id).encode())
    if notice.advice is not None:
        lines += b"x-stopguard-retry: %b\r\n" % notice.advice.header().encode("ascii", "replace")
    if notice.should_retry is not None:
        lines += b"x-should-retry: true\r\n" if notice.should_retry else b"x-should-retry: false\r\n"
    if notice.retry_after_seconds:
        lines += b"retry-after: %d\r\n" % notice.retry_after_seconds
    body = error_body(kind, notice, request_id)
    return json_response(
        notice.status,
        body,
        extra=lines,
        keep_alive=keep_alive and not notice.close,
        head_only=head_only,
        http_1_1=http_1_1,
    )


def json_response(
    status: int,
    body: bytes,
    *,
    extra: bytes = b"",
    keep_alive: bool,
    head_only: bool = False,
    http_1_1: bool = True,
) -> bytes:
    """A whole response with a JSON body. `extra` are whole header lines with their CRLFs."""
    reason = _REASONS.get(status) or HTTPStatus(status).phrase
    if not keep_alive:
        extra += b"connection: close\r\n"
    elif not http_1_1:
        extra += b"connection: keep-alive\r\n"
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n" % (
        status,
        reason.encode(),
        len(body),
        extra,
    )
    return head if head_only else head + body


def stream_stopped(kind: RouteKind, notice: Notice, request_id: str, model: str, choices: int, created: int) -> bytes:
    """The last events of a stream that was stopped: a finish reason, then the API's end marker."""
    details = notice.details(request_id)
    if kind in (RouteKind.CHAT, RouteKind.COMPLETIONS):
        chunk: dict[str, object] = {
            "id": request_id,
            "object": "chat.completion.chunk" if kind is RouteKind.CHAT else "text_completion",
            "created": created,
            "model": model,
            "choices": [_last_choice(kind, index) for index in range(choices)],
            "stopguard": {**details, "message": notice.message},
        }
        return b"data: %b\n\ndata: [DONE]\n\n" % _encode(chunk)
    if kind is RouteKind.RESPONSES:
        response = {
            "id": request_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "status": "incomplete",
            "incomplete_details": {"reason": FINISH_REASON},
            "output": [],
        }
        event = {"type": "response.incomplete", "response": response, "stopguard": details}
        return b"event: response.incomplete\ndata: %b\n\n" % _encode(event)
    if kind is RouteKind.MESSAGES:
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": FINISH_REASON, "stop_sequence": None},
            "usage": {"output_tokens": 0},
            "stopguard": {**details, "message": notice.message},
        }
        stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        return b"event: message_delta\ndata: %b\n\n%b" % (_encode(delta), stop)
    event = {"finish_reason": FINISH_REASON, "message": notice.message, "stopguard": details}
    return b"data: %b\n\ndata: [DONE]\n\n" % _encode(event)


def stream_error(kind: RouteKind, notice: Notice, request_id: str) -> bytes:
    """An error event for a stream that broke. No end marker follows it."""
    if kind is RouteKind.RESPONSES:
        event = {
            "type": "error",
            "code": notice.code,
            "message": notice.message,
            "param": None,
            "stopguard": notice.details(request_id),
        }
        return b"event: error\ndata: %b\n\n" % _encode(event)
    prefix = b"event: error\n" if kind is RouteKind.MESSAGES else b""
    return b"%bdata: %b\n\n" % (prefix, error_body(kind, notice, request_id))


def _last_choice(kind: RouteKind, index: int) -> dict[str, object]:
    if kind is RouteKind.CHAT:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": FINISH_REASON}
    return {"index": index, "text": "", "logprobs": None, "finish_reason": FINISH_REASON}
