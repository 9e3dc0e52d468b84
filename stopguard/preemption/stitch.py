"""Stitching: the continuation of a stream is checked against what its client has, and goes on in the same voice.

`Seam` compares the beginning of a continuation with the overlap (`marks`) and lets through only what is new. One
token or one character that differs is a `SeamMismatch`: the stream must end with an error, since whatever came
after it would be text of another answer.

`Voice` remembers how the first incarnation spoke (id, created, model, system fingerprint, the form of its chunks)
and says what later ones have to say in the same way, whatever route of the engine they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stopguard.engines.resumption import Ask, AskKind, EngineUsage, Piece
from stopguard.errors import EngineError
from stopguard.preemption.marks import UNREPORTED, Overlap

__all__ = ["Fresh", "Seam", "SeamMismatch", "Voice"]

Json = dict[str, Any]
_NOT_CONSTANT = ("choices", "usage", "timings", "prompt_token_ids", "prompt_text")


class SeamMismatch(EngineError):
    """A continuation differs from what its client has. `text_only`: the ids agree, their text does not."""

    def __init__(self, message: str, *, text_only: bool = False) -> None:
        super().__init__(message)
        self.text_only = text_only


class Fresh(msgspec.Struct, gc=False):
    """What a piece has beyond the overlap. `position` is the count of the whole answer's tokens, where known."""

    token_ids: Sequence[int]
    text: str
    logprobs: list[Any] | None = None
    position: int | None = None


class Seam:
    """The beginning of one continuation."""

    __slots__ = ("_heard", "_matched", "_overlap", "_seen", "mark")

    def __init__(self, overlap: Overlap) -> None:
        self.mark = overlap.mark
        self._overlap = overlap
        self._seen = 0
        self._heard = 0
        self._matched = not overlap.token_ids and not overlap.text

    @property
    def closed(self) -> bool:
        """Whether all of the overlap has come again."""
        return self._matched

    def feed(self, piece: Piece) -> Fresh:
        """What of `piece` is new. Raises `SeamMismatch`."""
        position = None if piece.position is None else self.mark.tokens + piece.position
        if self._matched:
            return Fresh(piece.token_ids, piece.text, piece.logprobs, position)
        new_from = self._compare_ids(piece)
        text = self._compare_text(piece.text)
        overlap = self._overlap
        if self._seen >= len(overlap.token_ids) and self._heard >= len(overlap.text):
            self._matched = True
        elif piece.finish_reason is not None:
            raise SeamMismatch(
                f"it ended after {self._seen} of the {len(overlap.token_ids)} tokens that had been delivered already"
            )
        logprobs = None if piece.logprobs is None else piece.logprobs[new_from:]
        return Fresh(piece.token_ids[new_from:], text, logprobs, position)

    def _compare_ids(self, piece: Piece) -> int:
        """Check the ids of `piece`; returns the index of the first new one."""
        wanted = self._overlap.token_ids
        if piece.position is not None:
            self._seen = max(self._seen, piece.position - len(piece.token_ids))
        new_from = len(piece.token_ids)
        for number, token in enumerate(piece.token_ids):
            if self._seen >= len(wanted):
                new_from = min(new_from, number)
            elif wanted[self._seen] not in (UNREPORTED, token):
                raise SeamMismatch(
                    f"token {self.mark.tokens + self._seen + 1} is {token} now and was {wanted[self._seen]}"
                )
            self._seen += 1
        return new_from

    def _compare_text(self, text: str) -> str:
        """Check `text`; returns what of it is new."""
        wanted = self._overlap.text
        left = wanted[self._heard : self._heard + len(text)]
        if not text.startswith(left):
            raise SeamMismatch(f"the text {text[:20]!r} comes where {left[:20]!r} had been delivered", text_only=True)
        self._heard += len(left)
        return text[len(left) :]


def _fingerprint(piece: Piece) -> Json:
    """Some engines sign only their last chunk."""
    event = piece.event or {}
    return {"system_fingerprint": event["system_fingerprint"]} if event.get("system_fingerprint") else {}


class Voice:
    """One answer's chunks, whoever makes them."""

    __slots__ = ("_ask", "_choice", "_constants", "_next_offset", "opened")

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._constants: Json = {}
        self._choice: Json | None = None
        # Where the text of the next token begins, by the engine's `text_offset`.
        self._next_offset = 0
        self.opened = False

    def hear(self, piece: Piece) -> None:
        """Learn from a chunk of the first incarnation how this answer is written."""
        event = piece.event
        if event is None or piece.error:
            return
        if not self._constants:
            self._constants = {name: value for name, value in event.items() if name not in _NOT_CONSTANT}
        if piece.logprobs and self._ask.kind is AskKind.COMPLETIONS:
            self._note_offset(piece.logprobs)
        if piece.opening:
            self.opened = True
        elif self._choice is None and (piece.text or piece.token_ids) and event.get("choices"):
            self._choice = {**event["choices"][0]}

    def repeat(self, event: Json) -> Json:
        """A chunk that is in the client's form already, with the constants of this answer."""
        return {**event, **self._constants}

    def say(self, fresh: Fresh, piece: Piece) -> Json | None:
        """The chunk for what is new, `None` if nothing is."""
        reason = piece.finish_reason
        if not fresh.text and not fresh.token_ids and reason is None:
            return None
        template = self._choice
        if template is None:
            # Nothing was heard of this answer but its opening: the continuation is the first call again.
            if piece.event is None or not piece.event.get("choices"):
                return None
            self.hear(piece)
            template = self._choice = {**piece.event["choices"][0]}
        choice = {**template, "finish_reason": reason}
        if self._ask.kind is AskKind.CHAT:
            choice["delta"] = {"content": fresh.text} if fresh.text or reason is None else {}
        else:
            choice["text"] = fresh.text
        if "logprobs" in template or fresh.logprobs:
            choice["logprobs"] = self._logprobs(fresh)
        if reason is not None:
            choice |= piece.stop_detail
        if self._ask.wants("return_token_ids"):
            choice["token_ids"] = list(fresh.token_ids)
        if choice.get("prompt_token_ids"):
            choice["prompt_token_ids"] = None
        return {**_fingerprint(piece), **self._constants, "choices": [choice]}

    def usage(self, usage: EngineUsage, tokens_before: int) -> Json:
        """The usage of the whole answer, from that of a continuation after `tokens_before` tokens.

        What was found in a cache is left out: a continuation finds nearly everything there, which says nothing of
        the request.
        """
        prompt = usage.prompt_tokens - tokens_before
        completion = usage.completion_tokens + tokens_before
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def usage_event(self, usage: Json, piece: Piece) -> Json:
        """The chunk that has only the usage."""
        return {**_fingerprint(piece), **self._constants, "choices": [], "usage": usage}

    def _note_offset(self, entries: Sequence[Any]) -> None:
        last = entries[-1]
        offset, token = last.get("text_offset"), last.get("tokens")
        if isinstance(offset, int) and isinstance(token, str):
            self._next_offset = offset + len(token)

    def _logprobs(self, fresh: Fresh) -> Any:
        entries = fresh.logprobs
        if not entries:
            return None
        if self._ask.kind is AskKind.CHAT:
            return {"content": entries}
        names = dict.fromkeys(name for entry in entries for name in entry)
        columns: Json = {name: [entry.get(name) for entry in entries] for name in names}
        offsets = columns.get("text_offset")
        if offsets and all(isinstance(offset, int) for offset in offsets):
            # They count the characters of the tokens' own texts from the beginning of the answer; a continuation
            # counts from its own. Each begins where the one before ended.
            shift = self._next_offset - offsets[0]
            columns["text_offset"] = [offset + shift for offset in offsets]
            self._next_offset = columns["text_offset"][-1] + len(str(columns["tokens"][-1]))
        return columns
