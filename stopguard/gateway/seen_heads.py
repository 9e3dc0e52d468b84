"""Heads that were seen before: the same bytes are parsed once.

Nearly all requests on a connection, and nearly all responses of an engine, begin with the same head but for
one number, the Content-Length. Parsing, sorting and checking a head costs as much as everything else that the
relay does for a request, so the result is kept under the head's exact bytes, with that number cut out.

This adds no second parser. A head is only found if httptools and `head` accepted the very same bytes before,
and the one thing that may differ is a run of digits in a header line that was a valid Content-Length then. A
head with two such lines was refused the first time and is not here. What is kept must start with its request
or status line, must have as many lines as the parser saw, and is bounded in number and size.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["SeenHeads", "cut_length"]

_HEAD_BYTES = 4096
_NAMES = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_NAME_BYTES = len(_NAMES[0])
_DIGITS_MAX = 15
_ONCE_PER_KEPT = 4

H = TypeVar("H")


def cut_length(raw: bytes) -> tuple[bytes, int]:
    """`raw` without the digits of its first Content-Length, and their value.

    The value is -1 without such a line, and -2 if the line is not plain digits: then the head must be parsed.
    """
    start = raw.find(_NAMES[0])
    if start < 0:
        start = raw.find(_NAMES[1])
        if start < 0:
            return raw, -1
    start += _NAME_BYTES
    end = raw.find(b"\r", start)
    digits = raw[start:end]
    if not digits.isdigit() or len(digits) > _DIGITS_MAX:
        return raw, -2
    return raw[:start] + raw[end:], int(digits)


class SeenHeads(Generic[H]):
    """At most `limit` heads, the oldest forgotten first."""

    __slots__ = ("_heads", "_limit", "_once", "_order")

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._heads: dict[bytes, H] = {}
        self._order: deque[bytes] = deque()
        # Hashes of heads that were seen once. Most that carry something of their own (a trace, a key) never come again,
        # and must not push out the ones that do.
        self._once: set[int] = set()

    def find(self, key: bytes) -> H | None:
        """The head that was kept under `key` (see `cut_length`)."""
        return self._heads.get(key)

    def keep(self, raw: bytes, lines: int, head: H) -> None:
        """Keep `head` when it comes for the second time.

        It is the result of parsing `raw` (up to the empty line), which had `lines` header lines.
        """
        key, length = cut_length(raw)
        if length == -2 or len(key) > _HEAD_BYTES or raw.count(b"\r\n") != lines + 2 or key in self._heads:
            return
        mark = hash(key)
        if mark not in self._once:
            if len(self._once) >= self._limit * _ONCE_PER_KEPT:
                self._once.clear()
            self._once.add(mark)
            return
        self._once.discard(mark)
        if len(self._order) >= self._limit:
            del self._heads[self._order.popleft()]
        self._heads[key] = head
        self._order.append(key)

    def __len__(self) -> int:
        return len(self._heads)
