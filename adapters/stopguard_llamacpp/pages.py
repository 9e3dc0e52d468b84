"""What llama.cpp's pages say: `/slots`, `/metrics`, `/props`. Pure functions of their texts.

`/slots` keeps the figures of a slot's last request after it has gone; only `is_processing` says whether they are live.
What a slot keeps of an ended request is a cache that the next one may use or overwrite, so it is not counted as used.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

__all__ = ["Slot", "SlotsPage", "metric", "read_props", "read_slots"]

_SAMPLE: Final = re.compile(r"^llamacpp:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class _NextToken(msgspec.Struct):
    n_decoded: int = 0


class Slot(msgspec.Struct):
    """One slot. Tokens in tokens; `task` is the request that has it, or had it last."""

    id: int
    is_processing: bool
    n_ctx: int = 0
    id_task: int = -1
    n_prompt_tokens: int = 0
    # A list in newer versions, an object in older ones.
    next_token: Any = None

    @property
    def tokens(self) -> int:
        """Tokens that the request in it holds now: its prompt, and what was generated; 0 when it is free."""
        if not self.is_processing:
            return 0
        last = self.next_token[0] if isinstance(self.next_token, list) and self.next_token else self.next_token
        decoded = last.get("n_decoded", 0) if isinstance(last, dict) else 0
        return self.n_prompt_tokens + (decoded if isinstance(decoded, int) else 0)


class SlotsPage(msgspec.Struct, frozen=True):
    """All slots at one moment."""

    slots: tuple[Slot, ...]

    @property
    def processing(self) -> int:
        return sum(slot.is_processing for slot in self.slots)

    @property
    def tokens_used(self) -> int:
        return sum(slot.tokens for slot in self.slots)

    @property
    def tokens_total(self) -> int:
        """Room in all slots. With one cache for all (`--kv-unified`) each slot says the whole of it."""
        return sum(slot.n_ctx for slot in self.slots)


class Props(msgspec.Struct):
    """The part of `/props` that is used."""

    total_slots: int = 0
    build_info: str = ""
    endpoint_slots: bool = True
    endpoint_metrics: bool = True


def read_slots(content: bytes) -> SlotsPage:
    """`/slots`. Raises `msgspec.MsgspecError` when it is none."""
    return SlotsPage(tuple(msgspec.json.decode(content, type=list[Slot])))


def read_props(content: bytes) -> Props:
    """`/props`. Raises `msgspec.MsgspecError` when it is none."""
    return msgspec.json.decode(content, type=Props)


def metric(text: str) -> dict[str, float]:
    """The samples of `/metrics` by their names without the prefix."""
    found = {}
    for name, value in _SAMPLE.findall(text):
        try:
            found[name] = float(value)
        except ValueError:
            continue
    return found
