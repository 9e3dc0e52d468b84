"""Where a response's body ends, without copying it: three scanners over the bytes that pass.

A relay that passes bytes through must know three things of them: where the body ends (what follows
would be read by the client as its next response), whether it ended properly (a truncated body must not
look complete), and whether something may be put in between at this point. A scanner answers these from
the framing alone. It never changes a byte; for clients that know no chunks, `feed` can also collect the
payload.

Strict on purpose: what is not exactly the grammar of RFC 9112 section 7.1 raises `FramingError`, since
bytes that two parsers may read differently must not be passed on.
"""

from __future__ import annotations

import re
from typing import Protocol

from stopguard.errors import EngineError

__all__ = ["ChunkedBody", "FramingError", "NoBody", "Scanner", "SizedBody", "UntilCloseBody"]

_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]*;[^\r\n\x00]*)?")
_LINE_BYTES = 4096
_TRAILER_BYTES = 16_384
_KNOWN_SIZES = 4096
_sizes: dict[bytes, int] = {}


class FramingError(EngineError):
    """The engine's response is not framed as HTTP/1.1 says; nothing after this point can be trusted."""


class Scanner(Protocol):
    """What the relay asks of a body's framing."""

    done: bool

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """Scan `data`; returns how many of its bytes belong to the body. The payload is added to `payload`."""
        ...

    def is_one_chunk(self, data: bytes) -> bool:
        """Whether `data` is exactly one whole chunk; if so it counts as fed."""
        ...

    @property
    def between_pieces(self) -> bool:
        """Whether another piece of body may be put in at this point."""
        ...

    @property
    def complete_at_end(self) -> bool:
        """Whether the end of the connection would be a proper end of the body."""
        ...


class _Unchunked:
    """What bodies without chunks have in common."""

    __slots__ = ()

    def is_one_chunk(self, data: bytes) -> bool:
        return False


class NoBody(_Unchunked):
    """The response has no body (HEAD, 204, 304, Content-Length 0)."""

    __slots__ = ()
    done = True
    between_pieces = False
    complete_at_end = True

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        return 0


class SizedBody(_Unchunked):
    """A body of a known number of bytes."""

    __slots__ = ("done", "left")
    between_pieces = False
    complete_at_end = False

    def __init__(self, size: int) -> None:
        self.left = size
        self.done = size == 0

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        taken = len(data)
        if taken >= self.left:
            taken = self.left
            self.done = True
        self.left -= taken
        if payload is not None and taken:
            payload.append(data[:taken])
        return taken


class UntilCloseBody(_Unchunked):
    """A body that ends with its connection (HTTP/1.0 style): a truncation cannot be told from an end."""

    __slots__ = ("done",)
    between_pieces = True
    complete_at_end = True

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        if payload is not None:
            payload.append(data)
        return len(data)


class ChunkedBody:
    """A chunked body. `left` counts what is missing of the present chunk, its closing CRLF included."""

    __slots__ = ("_line", "_trailer_bytes", "done", "left")
    complete_at_end = False

    def __init__(self) -> None:
        self.done = False
        self.left = 0
        self._line = b""
        self._trailer_bytes = -1

    @property
    def between_pieces(self) -> bool:
        return self.left == 0 and not self._line and self._trailer_bytes < 0 and not self.done

    def is_one_chunk(self, data: bytes) -> bool:
        """Whether `data` is exactly one whole chunk; if so it counts as fed.

        That is how engines send an event and how it arrives, so it is the path of nearly every streamed chunk.
        """
        end = data.find(b"\r\n", 0, 20)
        size = _sizes.get(data[:end])
        return (
            size is not None
            and size > 0
            and end + size + 4 == len(data)
            and not self.left
            and not self._line
            and self._trailer_bytes < 0
            and data.endswith(b"\r\n")
        )

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        position, size = 0, len(data)
        if self._line:
            # A size line or a trailer was cut by the edge of a read: rare, so it may cost a copy.
            kept = len(self._line)
            data = self._line + data
            self._line = b""
            return self._scan(data, 0, size + kept, payload) - kept
        left = self.left
        if left:
            if size < left:
                self._take(data, 0, size, payload)
                return size
            self._take(data, 0, left, payload)
            position = left
        return self._scan(data, position, size, payload)

    def _scan(self, data: bytes, position: int, size: int, payload: list[bytes] | None) -> int:
        """From the start of a line at `position`: size lines and chunks, then the trailer."""
        while position < size and not self.done:
            end = data.find(b"\r\n", position)
            if end < 0:
                self._line = data[position:]
                if len(self._line) > _LINE_BYTES or b"\n" in self._line:
                    raise FramingError("it sent a chunk whose size line does not end as it must")
                return size
            line = data[position:end]
            if self._trailer_bytes >= 0:
                position = end + 2
                self._trailer_bytes += len(line) + 2
                if self._trailer_bytes > _TRAILER_BYTES:
                    raise FramingError("it sent a trailer without end")
                self.done = not line
                continue
            chunk = _sizes.get(line)
            if chunk is None:
                chunk = _read_size(line)
            position = end + 2
            if chunk == 0:
                self._trailer_bytes = 0
                continue
            self.left = chunk + 2
            taken = min(self.left, size - position)
            self._take(data, position, taken, payload)
            position += taken
        return position

    def _take(self, data: bytes, start: int, taken: int, payload: list[bytes] | None) -> None:
        """Account for `taken` bytes of the present chunk, and check the CRLF that closes it."""
        left = self.left
        if payload is not None and left > 2:
            payload.append(data[start : start + min(taken, left - 2)])
        closing = taken - max(left - 2, 0)
        if closing > 0 and data[start + taken - closing : start + taken] != b"\r\n"[2 - min(left, 2) :][:closing]:
            raise FramingError("it sent a chunk that is longer than it says")
        self.left = left - taken


def _read_size(line: bytes) -> int:
    match = _SIZE_LINE.fullmatch(line)
    if match is None:
        raise FramingError(f"it sent a chunk with the size {line[:40]!r}, which is none")
    size = int(match[1], 16)
    if len(_sizes) < _KNOWN_SIZES and len(line) <= 8:
        _sizes[line] = size
    return size
