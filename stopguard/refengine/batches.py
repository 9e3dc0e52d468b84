"""What one step computes: a batch of entries, each a run of positions of one sequence."""

from __future__ import annotations

from stopguard.refengine.request import Request

__all__ = ["Batch", "Entry"]


class Entry:
    """`count` positions from `start`, after which `samples` tokens are sampled.

    A prefill entry knows its tokens at launch; a decode entry (`decodes`) computes the token that the
    step before it sampled, and any it samples itself but the last. `table` is the request's block
    table, kept here because a stop takes it away from the request while the step goes on.
    """

    __slots__ = ("count", "decodes", "epoch", "places", "request", "sampled", "samples", "start", "table")

    def __init__(self, request: Request, start: int, count: int, samples: int, *, decodes: bool) -> None:
        self.request = request
        self.start = start
        self.count = count
        self.samples = samples
        self.decodes = decodes
        self.epoch = request.epoch
        self.table: list[int] = []
        #: Where a decode entry writes: (block, slot, generation of the block at launch).
        self.places: list[tuple[int, int, int]] = []
        self.sampled: list[int] = []


class Batch:
    """One step in flight."""

    __slots__ = ("decode_sequences", "ends_at", "entries", "launched_at", "prefill_tokens", "step")

    def __init__(self, step: int, entries: list[Entry]) -> None:
        self.step = step
        self.entries = entries
        self.launched_at = 0.0
        self.ends_at = 0.0
        self.prefill_tokens = sum(entry.count for entry in entries if not entry.decodes)
        self.decode_sequences = sum(entry.decodes for entry in entries)
