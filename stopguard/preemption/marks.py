"""Marks: what has been delivered of a stream, and where it can be cut so that nothing is lost or doubled.

Theory
------
A *clean mark* is a chunk of exactly one token with text. Engines hold back text while a character or a stop string
may still be unfinished, so after such a chunk ids and text agree: nothing is in between. A cut anywhere else may lie
inside a character. The ids would be right there and the text not: a detokenizer that begins anew inside a
character drops it, or prints the prompt (vLLM 0.32.0, SGLang 0.5.23).

So a stream never goes on from where it was cut but from a mark before that, and the tokens since are generated
again. That is not only a cure: they must come out the same, and their text too, which proves that the
continuation is the stream that it claims to be. For that proof never to be empty the mark *before* the last one
is taken, so that the overlap has at least one whole token with text. The end of the prompt is a mark as
well: whatever was delivered, the whole request can be run again and its beginning be compared.

Some engines leave the ids of an unfinished character out of their chunks. Those places are kept as `UNREPORTED`
and must be filled before the ids can be sent (`Transcript.gap`).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import msgspec

from stopguard.errors import LimitReached

__all__ = ["UNREPORTED", "Mark", "Overlap", "Transcript"]

UNREPORTED = -1
_MARKS_KEPT = 8


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A place between two tokens at which ids and text agree: so many tokens, so many characters."""

    tokens: int
    characters: int


START = Mark(0, 0)


class Overlap(msgspec.Struct, frozen=True, gc=False):
    """What was delivered after `mark`, and will be generated again."""

    mark: Mark
    token_ids: Sequence[int]
    text: str


class Transcript:
    """The ids and the end of the text of one answer, as its client has them.

    `tokens_limit` bounds what is kept; a longer answer is not resumable any more (`LimitReached`).
    """

    __slots__ = ("_characters", "_marks", "_spoken", "_tail", "_tail_from", "prompt_ids", "token_ids", "tokens_limit")

    def __init__(self, tokens_limit: int) -> None:
        self.tokens_limit = tokens_limit
        self.prompt_ids: Sequence[int] | None = None
        self.token_ids: array[int] = array("i")
        self._characters = 0
        # Only the text since the oldest mark that is kept can be compared again.
        self._tail = ""
        self._tail_from = 0
        self._marks: deque[Mark] = deque([START], maxlen=_MARKS_KEPT)
        # The end of the text: with sampling the only place that a continuation can begin at.
        self._spoken = START

    def deliver(self, token_ids: Sequence[int], text: str, position: int | None = None) -> None:
        """The client gets this now. `position` is the engine's own count of tokens, these included."""
        ids = self.token_ids
        missing = 0 if position is None else position - len(ids) - len(token_ids)
        if len(ids) + len(token_ids) + max(missing, 0) > self.tokens_limit:
            raise LimitReached("tokens of a resumable answer", self.tokens_limit, "it is passed on but not resumed")
        if missing > 0:
            ids.extend([UNREPORTED] * missing)
        ids.extend(token_ids)
        if not text:
            return
        self._tail += text
        self._characters += len(text)
        self._spoken = Mark(len(ids), self._characters)
        if len(token_ids) == 1 and not text.endswith("\ufffd"):
            self._mark(self._spoken)

    def _mark(self, mark: Mark) -> None:
        self._marks.append(mark)
        oldest = self._marks[0]
        if oldest.characters > self._tail_from:
            self._tail = self._tail[oldest.characters - self._tail_from :]
            self._tail_from = oldest.characters

    @property
    def tokens(self) -> int:
        """How many tokens the client has, those not reported included."""
        return len(self.token_ids)

    @property
    def last_mark(self) -> Mark:
        return self._marks[-1]

    def overlap(self, *, steps_back: int = 0) -> Overlap:
        """Where to go on from: the mark before the last one, or `steps_back` further."""
        marks = self._marks
        mark = marks[max(0, len(marks) - 2 - steps_back)]
        return self._since(mark)

    def end_of_text(self) -> Overlap:
        """Where a sampled stream goes on from: nothing after the end of the text can be compared."""
        mark = self._spoken
        return Overlap(mark, (), "")

    def _since(self, mark: Mark) -> Overlap:
        return Overlap(mark, list(self.token_ids[mark.tokens :]), self._tail[mark.characters - self._tail_from :])

    def cut_back(self, mark: Mark) -> int:
        """Forget what came after `mark`, where it shall not be compared; returns how many tokens that were."""
        dropped = len(self.token_ids) - mark.tokens
        del self.token_ids[mark.tokens :]
        return dropped

    def gap(self, before: int) -> tuple[int, int] | None:
        """The first run of ids that were not reported, among the first `before`: where it begins and ends."""
        try:
            begin = self.token_ids.index(UNREPORTED)
        except ValueError:
            return None
        if begin >= before:
            return None
        end = begin
        while end < before and self.token_ids[end] == UNREPORTED:
            end += 1
        return begin, end

    def fill(self, begin: int, token_ids: Sequence[int]) -> bool:
        """Put in what was not reported; False if an id that is known is another one."""
        known = self.token_ids[begin : begin + len(token_ids)]
        if any(have not in (UNREPORTED, token) for have, token in zip(known, token_ids, strict=True)):
            return False
        self.token_ids[begin : begin + len(token_ids)] = array("i", token_ids)
        return True
