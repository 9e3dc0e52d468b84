"""Server-sent events out of a byte stream, whatever pieces it comes in.

Only what a resumption needs: whole events, in order, as they came (so that what is not understood can be passed on
unchanged), and an event's data. See https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from __future__ import annotations

import re

from stopguard.errors import LimitReached

__all__ = ["DONE", "EventSplitter", "data_of", "event_of"]

DONE = b"[DONE]"
_END = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Cuts a stream into events. One longer than `limit` bytes is a `LimitReached`."""

    __slots__ = ("_limit", "_rest")

    def __init__(self, limit: int = 4 * 1024 * 1024) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now, each with the empty line that ends it."""
        if self._rest:
            data = self._rest + data
        events: list[bytes] = []
        position = 0
        for match in _END.finditer(data):
            events.append(data[position : match.end()])
            position = match.end()
        self._rest = data[position:] if position else data
        if len(self._rest) > self._limit:
            raise LimitReached("bytes of one event", self._limit, "the engine sent an event without end")
        return events

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not whole yet."""
        return self._rest


def data_of(event: bytes) -> bytes | None:
    """The data of an event, `None` for one that has none (a comment)."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event) - 4:
        return event[6:].rstrip(b"\r\n")
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event_of(data: bytes) -> bytes:
    """An event with this data, which has no line break."""
    return b"data: " + data + b"\n\n"
