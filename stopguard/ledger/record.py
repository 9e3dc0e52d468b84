"""The finished story of one request, as a value that can be stored, sent and read back.

A record holds all five ledgers with their entries, the marks of its timeline, the summary of its
stop if it was stopped, and its leaks. It is what the journal keeps and what `stopguard explain`
prints. Times are seconds on the monotonic clock of the run that wrote it; the journal keeps, for
each run, what that clock was worth in wall time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stopguard.ledger.accounts import Account
from stopguard.ledger.entries import Entry, Evidence
from stopguard.ledger.leaks import Leak

__all__ = ["Mark", "RequestRecord", "StopSummary", "decode_record", "encode_record"]

#: A moment in the timeline that moved nothing: when, and one phrase.
Mark = tuple[float, str]


class StopSummary(msgspec.Struct, kw_only=True, gc=False):
    """How the request ended: why, by whom, in which steps, and how surely.

    `semantics` is cancel, preempt, finish or fail. `outcome` is pending, confirmed, unconfirmed,
    raced_finish (it had finished before the stop could matter) or failed. The four steps of a stop
    are instants, `None` until they have happened: `notified_at` (the abort left for the engine),
    `output_settled_at` (no token in flight any more), `released_at` (no KV held), `settled_at`.
    `acked_at` is the engine's own word. `retry` is the answer to "is it safe to try again".
    """

    semantics: str
    source: str
    reason: str
    observed_at: float
    occurred_at: float | None = None
    actor: str = ""
    outcome: str = "pending"
    evidence: Evidence = Evidence.NONE
    attempts: int = 0
    notified_at: float | None = None
    acked_at: float | None = None
    output_settled_at: float | None = None
    released_at: float | None = None
    settled_at: float | None = None
    retry: str = ""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request, whole. `closed_at` is `None` while it is open."""

    request_id: str
    engine: str
    model: str
    opened_at: float
    closed_at: float | None
    written_off: bool
    tokens_computed: int
    tokens_delivered: int
    tokens_recomputed: int
    stop: StopSummary | None
    entries: list[Entry]
    marks: list[Mark]
    leaks: list[Leak]
    labels: dict[str, str] = {}

    def balances(self) -> dict[Account, int]:
        """Every account that is not zero, derived from the entries."""
        balances: dict[Account, int] = {}
        for entry in self.entries:
            if entry.state.moves:
                balances[entry.debit] = balances.get(entry.debit, 0) - entry.amount
                balances[entry.credit] = balances.get(entry.credit, 0) + entry.amount
        return {account: amount for account, amount in sorted(balances.items()) if amount}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestRecord)

encode_record: Callable[[RequestRecord], bytes] = _encoder.encode


def decode_record(data: bytes) -> RequestRecord:
    """The record in `data`; `msgspec.DecodeError` (of which `ValidationError` is a kind) when it is not one."""
    record: Any = _decoder.decode(data)
    assert isinstance(record, RequestRecord)
    return record
