"""The five ledgers of a request, in double entry. Pure: no clock, no I/O (only the journal has a disk).

Start at `accounts` (what can be counted), then `entries` (what can happen), `request` (one
request's books) and `book` (all of them).
"""

from stopguard.ledger.accounts import Account, Ledger, Role, Unit
from stopguard.ledger.book import Book
from stopguard.ledger.entries import Entry, EntryState, Evidence
from stopguard.ledger.errors import (
    DuplicateRequest,
    IllegalMovement,
    InvalidAmount,
    NotPending,
    Overdraft,
    RequestClosed,
    TimeWentBackwards,
    UnknownRequest,
)
from stopguard.ledger.leaks import Leak
from stopguard.ledger.limits import BookLimits, BookStatistics
from stopguard.ledger.obligations import Obligation
from stopguard.ledger.reconcile import Difference, EngineGauges, Reconciler, Reconciliation, reconcile, reconcile_inside
from stopguard.ledger.record import Mark, RequestRecord, StopSummary, decode_record, encode_record
from stopguard.ledger.request import RequestLedgers

__all__ = [
    "Account",
    "Book",
    "BookLimits",
    "BookStatistics",
    "Difference",
    "DuplicateRequest",
    "EngineGauges",
    "Entry",
    "EntryState",
    "Evidence",
    "IllegalMovement",
    "InvalidAmount",
    "Leak",
    "Ledger",
    "Mark",
    "NotPending",
    "Obligation",
    "Overdraft",
    "Reconciler",
    "Reconciliation",
    "RequestClosed",
    "RequestLedgers",
    "RequestRecord",
    "Role",
    "StopSummary",
    "TimeWentBackwards",
    "Unit",
    "UnknownRequest",
    "decode_record",
    "encode_record",
    "reconcile",
    "reconcile_inside",
]
