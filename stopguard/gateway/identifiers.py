"""Request ids: ours, unguessable, all of one length, none the prefix of another.

SGLang matches an abort by prefix (`Scheduler.abort_request` uses `startswith`) and vLLM lets two live
requests bear the same header, so an id that a client chose could stop a neighbour. Ids are therefore
always made here: ``sg-`` and 32 hexadecimal digits, 128 random bits from the operating system.
"""

from __future__ import annotations

import os

from stopguard.engines.ids import OUR_ID

__all__ = ["ID_LENGTH", "IdSource", "is_request_id"]

_DIGITS = 32
_PREFIX = "sg-"
_IDS_PER_BLOCK = 256
ID_LENGTH = len(_PREFIX) + _DIGITS


class IdSource:
    """Makes ids. One system call for 256 of them, so that an id costs a slice of a string."""

    __slots__ = ("_at", "_block")

    def __init__(self) -> None:
        self._block = ""
        self._at = 0

    def next(self) -> str:
        """A new id."""
        at = self._at
        if at >= len(self._block):
            self._block = os.urandom(_DIGITS // 2 * _IDS_PER_BLOCK).hex()
            at = 0
        self._at = at + _DIGITS
        return _PREFIX + self._block[at : at + _DIGITS]


def is_request_id(text: str) -> bool:
    """Whether `text` has the shape of an id that StopGuard makes."""
    return OUR_ID.fullmatch(text) is not None
