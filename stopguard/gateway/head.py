"""Heads of requests and responses: what is let through, what is ours, and why nothing can be smuggled.

Theory
------
A head is parsed once, by httptools (llhttp in its strict mode), and what goes on to the other side is
written anew from the parsed parts, with a framing that we compute ourselves. Two parties therefore never
read the same bytes with two parsers, which is what every smuggling attack needs. What llhttp 9 already
refuses (seen in `tests/unit/gateway/test_smuggling.py`): bare LF and CR, folded lines, a space before the
colon, empty or odd names, control characters and NUL in values, repeated or odd Content-Length,
Content-Length beside Transfer-Encoding, chunk sizes with signs, spaces or ``0x``. What it lets through and
is refused here: other protocol versions, Transfer-Encoding other than exactly ``chunked`` or in HTTP/1.0,
no Host or several, fragments in targets, too much of anything.

Header names are sorted into a few kinds, and a bounded cache remembers the spelling that clients use:

* *hop-by-hop* headers, and those that `Connection` names, end here;
* *owned* headers (ids, engine-side routing, everything ``X-StopGuard-``) are read by us or dropped, and
  only we write them: an id or a routing header chosen by a client could stop a neighbour's request;
* names with an underscore are dropped, since CGI-like servers read ``_`` as ``-`` and would take
  ``X_Request_Id`` for a header of ours;
* everything else is passed on as it came, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from stopguard.errors import ClientError, EngineError
from stopguard.gateway.settings import Limits

__all__ = [
    "HeadRejected",
    "HeaderRules",
    "RequestHead",
    "ResponseHead",
    "ResponseHeadError",
    "read_request",
    "read_response",
]

Headers = list[tuple[bytes, bytes]]

(
    _FORWARD,
    _DROP,
    _HOST,
    _LENGTH,
    _TRANSFER,
    _CONNECTION,
    _EXPECT,
    _CREDENTIAL,
    _TYPE,
    _ALIAS,
    _UPGRADE,
    _IDEMPOTENCY,
    _GROUP,
    _TOTAL,
    _FIRST_TOKEN,
    _ENCODING,
    _CLASS,
    _RESUME,
) = range(18)

_REQUEST_KINDS: dict[bytes, int] = {
    b"host": _HOST,
    b"content-length": _LENGTH,
    b"transfer-encoding": _TRANSFER,
    b"connection": _CONNECTION,
    b"expect": _EXPECT,
    b"authorization": _CREDENTIAL,
    b"x-api-key": _CREDENTIAL,
    b"api-key": _CREDENTIAL,
    b"content-type": _TYPE,
    b"x-request-id": _ALIAS,
    b"upgrade": _UPGRADE,
    b"idempotency-key": _IDEMPOTENCY,
    b"x-stopguard-group": _GROUP,
    b"x-stopguard-timeout": _TOTAL,
    b"x-stopguard-first-token-timeout": _FIRST_TOKEN,
    b"x-stopguard-class": _CLASS,
    b"x-stopguard-resume": _RESUME,
    # Hop-by-hop (RFC 9110 section 7.6.1), and those that older software still sends.
    b"keep-alive": _DROP,
    b"proxy-connection": _DROP,
    b"proxy-authorization": _DROP,
    b"proxy-authenticate": _DROP,
    b"te": _DROP,
    b"trailer": _DROP,
    b"http2-settings": _DROP,
    # Engine-side control: llama.cpp ties a request with X-Conversation-Id to a conversation and then ignores
    # disconnects; the others choose a replica or a request's identity.
    b"x-conversation-id": _DROP,
    b"x-data-parallel-rank": _DROP,
    b"rid": _DROP,
    b"x-rid": _DROP,
}
_RESPONSE_KINDS: dict[bytes, int] = {
    b"content-length": _LENGTH,
    b"transfer-encoding": _TRANSFER,
    b"connection": _CONNECTION,
    b"content-type": _TYPE,
    b"content-encoding": _ENCODING,
    b"upgrade": _DROP,
    b"keep-alive": _DROP,
    b"proxy-connection": _DROP,
    b"proxy-authenticate": _DROP,
    b"trailer": _DROP,
    b"te": _DROP,
    b"x-request-id": _DROP,
    b"x-conversation-id": _DROP,
}
_OWNED_PREFIX = b"x-stopguard-"
_KNOWN_NAMES = 4096

_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
_WITH_LENGTH = frozenset({b"POST", b"PUT", b"PATCH"})
_ABSOLUTE = re.compile(rb"https?://[^/?#]+(?=([/?]|$))", re.IGNORECASE)
_DIGITS = re.compile(rb"[0-9]{1,18}")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ALIAS_SHAPE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_LABEL_SHAPE = re.compile(rb"[!-~]{1,256}")
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_RESUME_WORDS = ("exact", "approximate", "never")
_CLASS_SHAPE = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class HeadRejected(ClientError):
    """The request's head cannot be served. `status` is the HTTP status; the connection is closed after it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = self.status_hint = status


class ResponseHeadError(EngineError):
    """The engine's response does not begin as HTTP/1.1 says."""


class RequestHead:
    """One request's head, sorted. Shared by all requests with the same head: never changed once it is made.

    `forward` has the header lines that go on to an engine, written out; credentials stand apart in
    `credential_lines`, since an engine may have its own. `path` is the target without its query. `length` is
    what this head's own Content-Length said, -1 without one. `standing` belongs to the gateway.
    """

    __slots__ = (
        "alias",
        "chunked",
        "content_type",
        "credential",
        "credential_lines",
        "expects_continue",
        "first_token_seconds",
        "forward",
        "group",
        "http_1_1",
        "idempotency_key",
        "keep_alive",
        "length",
        "method",
        "path",
        "resume",
        "standing",
        "target",
        "total_seconds",
        "upgrade",
        "wanted_class",
    )

    def __init__(self, method: bytes, target: bytes, http_1_1: bool) -> None:
        self.method = method
        self.target = target
        self.http_1_1 = http_1_1
        query = target.find(b"?")
        self.path = (target if query < 0 else target[:query]).decode("ascii")
        self.keep_alive = http_1_1
        self.length = -1
        self.chunked = False
        self.expects_continue = False
        self.content_type = b""
        self.credential = b""
        self.credential_lines = b""
        self.forward = b""
        self.alias = ""
        self.upgrade = b""
        self.idempotency_key = b""
        self.group = ""
        self.total_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.wanted_class = ""
        self.resume = ""
        self.standing: Any = None

    @property
    def has_body(self) -> bool:
        """Whether the client said that a body follows."""
        return self.chunked or self.length > 0

    @property
    def repeats(self) -> bool:
        """Whether a request with the same bytes means the same but for its length."""
        return not self.chunked and not self.expects_continue and not self.upgrade

    def opening(
        self, authority: bytes, prefix: bytes, extra: bytes, *, keep_alive: bool, target: bytes | None = None
    ) -> bytes:
        """The head as an engine gets it, up to what differs between requests: `ending` follows.

        `prefix` comes before the path, `extra` are whole header lines of ours with their CRLFs. `target` is the
        client's own unless another one is given.
        """
        if not keep_alive:
            extra += b"connection: close\r\n"
        return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b%b" % (
            self.method,
            prefix,
            self.target if target is None else target,
            authority,
            self.forward,
            extra,
        )

    def ending(self, body_length: int) -> bytes:
        """The rest of the head: our own framing."""
        if body_length or self.method in _WITH_LENGTH:
            return b"content-length: %d\r\n\r\n" % body_length
        return b"\r\n"


class HeaderRules:
    """Which header is of which kind. `owned` are further headers that clients may not set, for the engines' sake.

    `request_names` and `response_names` remember the spellings that were seen, up to a limit.
    """

    __slots__ = ("_request_kinds", "request_names", "response_names")

    def __init__(self, owned: Iterable[str] = ()) -> None:
        self._request_kinds = dict(_REQUEST_KINDS)
        for name in owned:
            self._request_kinds.setdefault(name.lower().encode("ascii"), _DROP)
        self.request_names: dict[bytes, int] = {}
        self.response_names: dict[bytes, int] = {}

    def of_request(self, name: bytes) -> int:
        """The kind of a request's header name that is not in `request_names` yet."""
        return _classify(name, self._request_kinds, self.request_names)

    def of_response(self, name: bytes) -> int:
        """The kind of a response's header name that is not in `response_names` yet."""
        return _classify(name, _RESPONSE_KINDS, self.response_names)


def read_request(
    method: bytes, target: bytes, version: str, headers: Headers, limits: Limits, rules: HeaderRules
) -> RequestHead:
    """Sort and check the parsed parts of a request's head; `HeadRejected` if it cannot be served."""
    if version not in {"1.1", "1.0"}:
        raise HeadRejected(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    if method not in _METHODS:
        raise HeadRejected(501, "this method is not supported")
    if len(headers) > limits.header_count:
        raise HeadRejected(431, f"more than {limits.header_count} header lines")
    if len(target) > limits.target_bytes:
        raise HeadRejected(414, f"the request target is longer than {limits.target_bytes} bytes")
    head = RequestHead(method, _checked_target(method, target), version == "1.1")
    lines: list[bytes] = []
    hosts = 0
    named: bytes = b""
    known = rules.request_names
    for name, value in headers:
        kind = known.get(name)
        if kind is None:
            kind = rules.of_request(name)
        if kind == _FORWARD:
            lines += (name, b": ", value, b"\r\n")
        elif kind == _DROP:
            continue
        elif kind == _CONNECTION:
            named = named + b"," + value if named else value
        elif kind == _HOST:
            hosts += 1
        elif kind == _TYPE:
            head.content_type = value
            lines += (name, b": ", value, b"\r\n")
        elif kind == _LENGTH:
            _set_length(head, value)
        elif kind == _CREDENTIAL:
            _add_credential(head, name, value)
        else:
            _read_special(head, kind, value)
    if hosts != 1 and (hosts or head.http_1_1):
        raise HeadRejected(400, "a request needs exactly one Host header")
    if head.chunked and head.length >= 0:
        raise HeadRejected(400, "Content-Length and Transfer-Encoding exclude each other")
    if named:
        lines = _apply_connection(head, named, lines)
    head.forward = b"".join(lines)
    return head


def _checked_target(method: bytes, target: bytes) -> bytes:
    if not target.startswith(b"/"):
        if target == b"*" and method == b"OPTIONS":
            return target
        absolute = _ABSOLUTE.match(target)
        if absolute is None:
            raise HeadRejected(400, "the request target must be a path")
        target = target[absolute.end() :]
        if not target.startswith(b"/"):
            target = b"/" + target
    if b"#" in target:
        raise HeadRejected(400, "a request target has no fragment")
    return target


def _set_length(head: RequestHead, value: bytes) -> None:
    value = value.strip(b" \t")
    if head.length >= 0 or _DIGITS.fullmatch(value) is None:
        raise HeadRejected(400, "Content-Length is repeated or not a number")
    head.length = int(value)


def _add_credential(head: RequestHead, name: bytes, value: bytes) -> None:
    head.credential_lines += b"%b: %b\r\n" % (name, value)
    if head.credential:
        # Several credentials: all of them together are the identity, in the order in which they came.
        head.credential += b"\n"
    secret = value.strip(b" \t")
    head.credential += secret[7:].strip() if secret[:7].lower() == b"bearer " else secret


def _read_special(head: RequestHead, kind: int, value: bytes) -> None:
    value = value.strip(b" \t")
    if kind == _TRANSFER:
        if head.chunked or value.lower() != b"chunked" or not head.http_1_1:
            status = 501 if head.http_1_1 else 400
            raise HeadRejected(status, "the only Transfer-Encoding is chunked, once, in HTTP/1.1")
        head.chunked = True
    elif kind == _EXPECT:
        if value.lower() != b"100-continue":
            raise HeadRejected(417, "the only expectation that can be met is 100-continue")
        head.expects_continue = head.http_1_1
    elif kind == _UPGRADE:
        head.upgrade = value.lower()
    elif kind == _ALIAS:
        # Kept as an alias only if it is harmless to write back; the id of a request is always ours.
        if _ALIAS_SHAPE.fullmatch(value) is not None:
            head.alias = value.decode("ascii")
    elif kind == _IDEMPOTENCY:
        if _LABEL_SHAPE.fullmatch(value) is None:
            raise HeadRejected(400, "Idempotency-Key must be 1 to 256 printable characters")
        head.idempotency_key = value
    elif kind == _GROUP:
        if _LABEL_SHAPE.fullmatch(value) is None:
            raise HeadRejected(400, "X-StopGuard-Group must be 1 to 256 printable characters")
        head.group = value.decode("ascii")
    elif kind == _TOTAL:
        head.total_seconds = _seconds(value, "X-StopGuard-Timeout")
    elif kind == _FIRST_TOKEN:
        head.first_token_seconds = _seconds(value, "X-StopGuard-First-Token-Timeout")
    elif kind == _CLASS:
        if _CLASS_SHAPE.fullmatch(value) is None:
            raise HeadRejected(400, "X-StopGuard-Class must be the name of a class")
        head.wanted_class = value.decode("ascii")
    elif kind == _RESUME:
        head.resume = value.decode("ascii", "replace").lower()
        if head.resume not in _RESUME_WORDS:
            raise HeadRejected(400, f"X-StopGuard-Resume must be one of {', '.join(_RESUME_WORDS)}")


def _seconds(value: bytes, name: str) -> float:
    seconds = float(value) if _SECONDS.fullmatch(value) is not None else 0.0
    if not seconds > 0:
        raise HeadRejected(400, f"{name} must be a number of seconds above zero, such as 2.5")
    return seconds


def _apply_connection(head: RequestHead, named: bytes, lines: list[bytes]) -> list[bytes]:
    tokens = {token.strip(b" \t") for token in named.lower().split(b",")}
    tokens.discard(b"")
    if b"close" in tokens:
        head.keep_alive = False
    elif b"keep-alive" in tokens:
        head.keep_alive = True
    if b"upgrade" not in tokens:
        head.upgrade = b""
    return _without(lines, tokens - {b"close", b"keep-alive", b"upgrade", b"te", b"http2-settings"})


def _without(lines: list[bytes], names: set[bytes]) -> list[bytes]:
    """The header lines (four pieces each) whose name is not in `names`, which are in lower case."""
    if not names:
        return lines
    kept: list[bytes] = []
    for at in range(0, len(lines), 4):
        if lines[at].lower() not in names:
            kept += lines[at : at + 4]
    return kept


def _classify(name: bytes, kinds: dict[bytes, int], known: dict[bytes, int]) -> int:
    """The kind of a header name, whatever its case; remembered while there is room."""
    lower = name.lower()
    kind = kinds.get(lower)
    if kind is None:
        if _TOKEN.fullmatch(name) is None:
            raise HeadRejected(400, "a header name has a character that none may have")
        kind = _DROP if lower.startswith(_OWNED_PREFIX) or b"_" in lower else _FORWARD
    if len(known) < _KNOWN_NAMES:
        known[name] = kind
    return kind


class ResponseHead:
    """One response's head, sorted. Shared by all responses with the same head: never changed once it is made.

    `opening` is the status line with the header lines that go on to the client, written out.
    """

    __slots__ = ("chunked", "encoded", "event_stream", "keep_alive", "length", "opening", "reason", "status")

    def __init__(self, status: int, reason: bytes) -> None:
        self.status = status
        self.reason = reason
        self.length = -1
        self.chunked = False
        self.keep_alive = True
        self.event_stream = False
        self.encoded = False
        self.opening = b""


def read_response(
    status: int, reason: bytes, headers: Headers, rules: HeaderRules, *, keep_alive: bool
) -> ResponseHead:
    """Sort and check the parsed parts of a response's head; `ResponseHeadError` if it is not framed properly."""
    head = ResponseHead(status, reason)
    head.keep_alive = keep_alive
    lines: list[bytes] = []
    named = b""
    known = rules.response_names
    for name, value in headers:
        kind = known.get(name)
        if kind is None:
            try:
                kind = rules.of_response(name)
            except HeadRejected:
                raise ResponseHeadError("its response has an impossible header name") from None
        if kind == _FORWARD:
            lines += (name, b": ", value, b"\r\n")
        elif kind == _TYPE:
            head.event_stream = value.lstrip()[:17].lower() == b"text/event-stream"
            lines += (name, b": ", value, b"\r\n")
        elif kind == _LENGTH:
            digits = value.strip(b" \t")
            if head.length >= 0 or _DIGITS.fullmatch(digits) is None:
                raise ResponseHeadError("its response has a Content-Length that is no number")
            head.length = int(digits)
        elif kind == _TRANSFER:
            if head.chunked or value.strip(b" \t").lower() != b"chunked":
                raise ResponseHeadError("its response has a Transfer-Encoding other than chunked")
            head.chunked = True
        elif kind == _CONNECTION:
            named = named + b"," + value if named else value
        elif kind == _ENCODING:
            head.encoded = value.strip().lower() != b"identity"
            lines += (name, b": ", value, b"\r\n")
    if head.chunked and head.length >= 0:
        raise ResponseHeadError("its response has both Content-Length and Transfer-Encoding")
    if named:
        tokens = {token.strip(b" \t") for token in named.lower().split(b",")}
        if b"close" in tokens:
            head.keep_alive = False
        lines = _without(lines, tokens - {b"close", b"keep-alive", b""})
    head.opening = b"HTTP/1.1 %d %b\r\n%b" % (status, reason, b"".join(lines))
    return head
