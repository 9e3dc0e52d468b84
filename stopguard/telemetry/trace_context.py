"""The client's W3C trace context, read from the head lines that go on to the engine.

It is only ever read: `traceparent` and `tracestate` pass through the relay byte for byte, so that the engine's
own spans hang where the client's do.
"""

from __future__ import annotations

import re

import msgspec

__all__ = ["TraceContext", "find", "parse"]

_SHAPE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_LINE = re.compile(rb"(?:^|\r\n)traceparent: *([!-~]{1,128})\r\n", re.IGNORECASE)


class TraceContext(msgspec.Struct, frozen=True):
    """Whose trace a request belongs to, as lower-case hexadecimal, and whether that trace is kept."""

    trace_id: str
    span_id: str
    sampled: bool


def parse(value: str) -> TraceContext | None:
    """The context in a `traceparent` header's value; `None` if it is not one (W3C Trace Context, section 3.2)."""
    match = _SHAPE.fullmatch(value.strip())
    if match is None or value.startswith("ff") or (value.startswith("00") and len(value.strip()) != 55):
        return None
    trace_id, span_id, flags = match.groups()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def find(head_lines: bytes) -> str:
    """The valid `traceparent` value among written-out head lines, or nothing."""
    match = _LINE.search(head_lines)
    if match is None:
        return ""
    value = match.group(1).decode("ascii")
    return value if parse(value) is not None else ""
