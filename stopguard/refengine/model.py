"""The model and its tokenizer: readable words, real UTF-8, and a next token that depends on the KV content.

The vocabulary is: two special tokens, the 256 bytes, then words (with and without a leading space).
Text outside the words is spelled in bytes, so `decode(encode(text)) == text` for any text. The other
direction does not hold, on purpose: as on real engines, only token ids resume a request exactly.

The model sometimes writes a character of two to four bytes, one token a byte. A stop can therefore
fall inside a character, and a front end has to hold bytes back.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

__all__ = ["BOS", "EOS", "VOCABULARY", "TextAssembler", "decode", "encode", "next_token"]

EOS = 0
BOS = 1
_FIRST_BYTE = 2
_FIRST_WORD = _FIRST_BYTE + 256

_WORD_TEXT = """
the a of and to in is was he for it with as his on be at by had not are but from or have an they which one you were
her all she there would their we him been has when who will more no if out so said what up its about into than them
can only other new some could time these two may then do first any my now such like our over man me even most made
after also did many before must through back years where much your way well down should because each just those people
how too little state good very make world still own see men work long get here between both life being under never day
same another know while last might us great old year off come since against go came right used take three water light
night hand small house river stone paper letter window garden winter summer morning evening street city field forest
mountain ocean bridge engine block queue token step stream record journal ledger book page table number count clock
minute second signal answer question reason order measure balance account owner guest door road map story song word
green blue red white black bright quiet quick slow early late open closed empty full deep high low warm cold sharp soft
"""
_WORDS = list(dict.fromkeys(_WORD_TEXT.split()))
_DIGITS = [str(digit) for digit in range(10)]
_MARKS = [",", ".", ";", "\n"]
_PIECES = [f" {word}" for word in _WORDS] + _MARKS + _WORDS + _DIGITS

#: Every token's bytes, by id.
VOCABULARY: tuple[bytes, ...] = (
    b"",
    b"",
    *(bytes([value]) for value in range(256)),
    *(piece.encode() for piece in _PIECES),
)
_TEXT: tuple[str, ...] = tuple(
    piece.decode() if number >= _FIRST_WORD else "" for number, piece in enumerate(VOCABULARY)
)
_IDS = {piece: _FIRST_WORD + number for number, piece in enumerate(_PIECES)}
_SPLIT = re.compile(r" ?[A-Za-z]+|.", re.DOTALL)

_SPELLED = ("é", "→", "🙂")  # no byte of these is followed by two different ones
_NEXT_BYTE = {
    _FIRST_BYTE + first: _FIRST_BYTE + second
    for character in _SPELLED
    for first, second in zip(character.encode(), character.encode()[1:], strict=False)
}
_LEADS = [_FIRST_BYTE + character.encode()[0] for character in _SPELLED]
_PLAIN = [_IDS[f" {word}"] for word in _WORDS][:232] + [_IDS[mark] for mark in _MARKS]
_CHOICES = (_PLAIN + _LEADS * 7)[: 256 - 3] + _LEADS
while len(_CHOICES) < 256:
    _CHOICES.append(_PLAIN[len(_CHOICES) % len(_PLAIN)])
_STRUCTURED = [_IDS[digit] for digit in _DIGITS] + [_IDS[","]] * 6

_MASK = (1 << 64) - 1


def encode(text: str) -> list[int]:
    """Token ids of `text`; any text can be encoded."""
    ids: list[int] = []
    for piece in _SPLIT.findall(text):
        known = _IDS.get(piece)
        if known is not None:
            ids.append(known)
        else:
            ids.extend(_FIRST_BYTE + value for value in piece.encode("utf-8", "surrogatepass"))
    return ids


def decode(ids: Iterable[int]) -> str:
    """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
    return b"".join([VOCABULARY[token] for token in ids]).decode("utf-8", "replace")


def next_token(value: int, length: int, last_token: int, salt: int, eos_threshold: int, structured: bool) -> int:
    """The token after a context of `length` tokens whose content is `value` and that ends in `last_token`.

    `eos_threshold` of 65,536 contexts end here; `structured` keeps to digits and commas.
    """
    follower = _NEXT_BYTE.get(last_token)
    if follower is not None and not structured:
        return follower
    state = (value * 0x9E3779B97F4A7C15 + length * 0xD1B54A32D192ED03 + salt * 0x8CB92BA72F3D8DD7) & _MASK
    state = ((state ^ (state >> 29)) * 0xBF58476D1CE4E5B9) & _MASK
    state ^= state >> 32
    if eos_threshold and (state >> 16) & 0xFFFF < eos_threshold:
        return EOS
    return _STRUCTURED[state & 15] if structured else _CHOICES[state & 255]


class TextAssembler:
    """Turns one sequence's tokens into text, piece by piece; holds back what may still change.

    Held back are the bytes of an unfinished character and, with stop strings, the last characters that
    could begin one. `stopped` is true once a stop string has been seen; the text ends before it.
    """

    __slots__ = ("_bytes", "_decoder", "_held", "_stop", "_stop_length", "stopped")

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._bytes = False
        self._held = ""
        self._stop = stop
        self._stop_length = max(map(len, stop), default=0)
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after one more token."""
        text = _TEXT[token]
        if not text or self._bytes:
            if self._decoder is None:
                self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
            text = self._decoder.decode(VOCABULARY[token])
            self._bytes = bool(self._decoder.getstate()[0])
        return self._release(text) if self._stop else text

    def flush(self) -> str:
        """What is still held back, at the end of the sequence."""
        if self.stopped:
            return ""
        text, self._held = self._held, ""
        if self._bytes and self._decoder is not None:
            text += self._decoder.decode(b"", final=True)
        self._bytes = False
        return text

    def _release(self, text: str) -> str:
        self._held += text
        ends = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            released, self._held = self._held[: min(ends)], ""
            return released
        keep = self._stop_length - 1
        cut = max(0, len(self._held) - keep)
        released, self._held = self._held[:cut], self._held[cut:]
        return released
