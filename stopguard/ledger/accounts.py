"""The chart of accounts: which places a token, a block, a notice or a byte can be in.

Theory
------
Five ledgers say where a request stands. Each is kept in double entry: a movement takes an amount
out of one account (the debit) and puts it in another (the credit) *of the same ledger and unit*, so
that for each unit the sum over all accounts is always zero. An account has one of three roles:

* ``BOUNDARY`` is the world outside: the engine's free pool, the model that makes tokens, the clients
  that connect. It alone may go below zero; minus its balance is what came in and is still somewhere.
* ``OPEN`` holds what the request still owns or owes. A ledger is closed when all its open accounts
  are zero; a request is settled when all five ledgers are closed.
* ``FINAL`` is where a thing ends for good. Nothing leaves a final account, except a correction.

Rule 1: every account that exists is in this file. Rule 2: this file knows no engine.

The KV ledger counts in three units. *Blocks* are exact and come from a probe (an engine that counts
tokens instead of blocks books tokens under the same accounts and says so in its capabilities).
*Slots* are the things beside the blocks that a request can leak: LoRA, encoder cache, grammar,
speculative state. A *claim* is what is known without a probe: a request that was dispatched may hold
KV of unknown size, until some evidence says that it does not.

Account numbers are stored in journals: never renumber, only append (and raise the journal's schema
version).
"""

from __future__ import annotations

import enum

__all__ = [
    "CLOSING_ACCOUNTS",
    "OPEN_ACCOUNT_COUNT",
    "Account",
    "Ledger",
    "Role",
    "Unit",
    "boundary_of",
    "written_off_of",
]


class Ledger(enum.IntEnum):
    """The five books of a request."""

    QUEUE = 0
    KV = 1
    OUTPUT = 2
    LINK = 3
    STREAM = 4

    @property
    def label(self) -> str:
        """The name in metrics, documents and the journal."""
        return self._name_.lower()


class Unit(enum.StrEnum):
    """What a ledger counts in."""

    PLACES = "places"
    BLOCKS = "blocks"
    SLOTS = "slots"
    CLAIMS = "claims"
    TOKENS = "tokens"
    NOTICES = "notices"
    CONNECTIONS = "connections"
    BYTES = "bytes"


class Role(enum.Enum):
    """What a balance in an account means (see the theory above)."""

    BOUNDARY = "boundary"
    OPEN = "open"
    FINAL = "final"


class Account(enum.IntEnum):
    """One place where something can be. The number is its index in every list of balances.

    The open accounts come first and those of one ledger stand together, so that "is this ledger
    closed" is one slice.
    """

    ledger: Ledger
    unit: Unit
    role: Role

    def __new__(cls, number: int, ledger: Ledger, unit: Unit, role: Role) -> Account:
        member = int.__new__(cls, number)
        member._value_ = number
        member.ledger = ledger
        member.unit = unit
        member.role = role
        return member

    @property
    def label(self) -> str:
        """The name within its ledger: ``held``, ``in_flight``, ``waiting``."""
        return self._name_.lower().removeprefix(f"{self.ledger.label}_")

    # Open: what a request still owns or owes.
    QUEUE_ADMISSION = 0, Ledger.QUEUE, Unit.PLACES, Role.OPEN
    QUEUE_WAITING = 1, Ledger.QUEUE, Unit.PLACES, Role.OPEN
    QUEUE_RUNNING = 2, Ledger.QUEUE, Unit.PLACES, Role.OPEN
    QUEUE_PREEMPTED = 3, Ledger.QUEUE, Unit.PLACES, Role.OPEN
    QUEUE_PAUSED = 4, Ledger.QUEUE, Unit.PLACES, Role.OPEN
    QUEUE_TRANSFERRING = 5, Ledger.QUEUE, Unit.PLACES, Role.OPEN
    KV_CLAIMED = 6, Ledger.KV, Unit.CLAIMS, Role.OPEN
    KV_HELD = 7, Ledger.KV, Unit.BLOCKS, Role.OPEN
    KV_FENCED = 8, Ledger.KV, Unit.BLOCKS, Role.OPEN
    KV_HOST = 9, Ledger.KV, Unit.BLOCKS, Role.OPEN
    KV_LORA = 10, Ledger.KV, Unit.SLOTS, Role.OPEN
    KV_ENCODER = 11, Ledger.KV, Unit.SLOTS, Role.OPEN
    KV_GRAMMAR = 12, Ledger.KV, Unit.SLOTS, Role.OPEN
    KV_SPECULATIVE = 13, Ledger.KV, Unit.SLOTS, Role.OPEN
    OUTPUT_IN_FLIGHT = 14, Ledger.OUTPUT, Unit.TOKENS, Role.OPEN
    LINK_AWAITING = 15, Ledger.LINK, Unit.NOTICES, Role.OPEN
    STREAM_CONNECTED = 16, Ledger.STREAM, Unit.CONNECTIONS, Role.OPEN
    STREAM_BUFFERED = 17, Ledger.STREAM, Unit.BYTES, Role.OPEN
    # Boundary: the world outside.
    QUEUE_ARRIVALS = 18, Ledger.QUEUE, Unit.PLACES, Role.BOUNDARY
    KV_CLAIMABLE = 19, Ledger.KV, Unit.CLAIMS, Role.BOUNDARY
    KV_POOL = 20, Ledger.KV, Unit.BLOCKS, Role.BOUNDARY
    KV_SLOT_POOL = 21, Ledger.KV, Unit.SLOTS, Role.BOUNDARY
    OUTPUT_MODEL = 22, Ledger.OUTPUT, Unit.TOKENS, Role.BOUNDARY
    LINK_STOPS = 23, Ledger.LINK, Unit.NOTICES, Role.BOUNDARY
    STREAM_CLIENTS = 24, Ledger.STREAM, Unit.CONNECTIONS, Role.BOUNDARY
    STREAM_ENGINE = 25, Ledger.STREAM, Unit.BYTES, Role.BOUNDARY
    # Final: where a thing ends for good.
    QUEUE_GONE = 26, Ledger.QUEUE, Unit.PLACES, Role.FINAL
    OUTPUT_DELIVERED = 27, Ledger.OUTPUT, Unit.TOKENS, Role.FINAL
    OUTPUT_DISCARDED = 28, Ledger.OUTPUT, Unit.TOKENS, Role.FINAL
    OUTPUT_STALE = 29, Ledger.OUTPUT, Unit.TOKENS, Role.FINAL
    LINK_ACKNOWLEDGED = 30, Ledger.LINK, Unit.NOTICES, Role.FINAL
    LINK_MOOT = 31, Ledger.LINK, Unit.NOTICES, Role.FINAL
    STREAM_CLOSED = 32, Ledger.STREAM, Unit.CONNECTIONS, Role.FINAL
    STREAM_SENT = 33, Ledger.STREAM, Unit.BYTES, Role.FINAL
    STREAM_DROPPED = 34, Ledger.STREAM, Unit.BYTES, Role.FINAL
    # Final: given up on, by an explicit correction after a leak was reported. Never a success.
    QUEUE_WRITTEN_OFF = 35, Ledger.QUEUE, Unit.PLACES, Role.FINAL
    KV_CLAIMS_WRITTEN_OFF = 36, Ledger.KV, Unit.CLAIMS, Role.FINAL
    KV_BLOCKS_WRITTEN_OFF = 37, Ledger.KV, Unit.BLOCKS, Role.FINAL
    KV_SLOTS_WRITTEN_OFF = 38, Ledger.KV, Unit.SLOTS, Role.FINAL
    OUTPUT_WRITTEN_OFF = 39, Ledger.OUTPUT, Unit.TOKENS, Role.FINAL
    LINK_WRITTEN_OFF = 40, Ledger.LINK, Unit.NOTICES, Role.FINAL
    STREAM_CONNECTIONS_WRITTEN_OFF = 41, Ledger.STREAM, Unit.CONNECTIONS, Role.FINAL
    STREAM_BYTES_WRITTEN_OFF = 42, Ledger.STREAM, Unit.BYTES, Role.FINAL


OPEN_ACCOUNT_COUNT = sum(account.role is Role.OPEN for account in Account)

#: The open accounts of each ledger, as a slice of a list of balances, indexed by ledger.
CLOSING_ACCOUNTS: tuple[slice, ...] = tuple(
    slice(
        min(account for account in Account if account.ledger is ledger and account.role is Role.OPEN),
        max(account for account in Account if account.ledger is ledger and account.role is Role.OPEN) + 1,
    )
    for ledger in Ledger
)

_BOUNDARY: dict[Unit, dict[Ledger, Account]] = {}
_WRITTEN_OFF: dict[Unit, dict[Ledger, Account]] = {}
for _account in Account:
    if _account.role is Role.BOUNDARY:
        _BOUNDARY.setdefault(_account.unit, {})[_account.ledger] = _account
    elif _account.name.endswith("WRITTEN_OFF"):
        _WRITTEN_OFF.setdefault(_account.unit, {})[_account.ledger] = _account


def boundary_of(account: Account) -> Account:
    """The account of the outside world that `account`'s unit comes from."""
    return _BOUNDARY[account.unit][account.ledger]


def written_off_of(account: Account) -> Account:
    """Where the amount in `account` goes when it is given up on."""
    return _WRITTEN_OFF[account.unit][account.ledger]


def _movement_table() -> bytes:
    """For each (debit, credit) pair one byte: 1 when the movement is legal.

    Legal: the same ledger, the same unit, two different accounts, and the debit is not final. A
    final account can only be corrected, and a correction says what it is (`EntryState.CORRECTION`).
    """
    size = len(Account)
    table = bytearray(size * size)
    for debit in Account:
        for credit in Account:
            same = debit.ledger is credit.ledger and debit.unit is credit.unit and debit is not credit
            table[debit * size + credit] = same and debit.role is not Role.FINAL
    return bytes(table)


ACCOUNTS: tuple[Account, ...] = tuple(Account)
ACCOUNT_COUNT = len(ACCOUNTS)
LEGAL_MOVEMENT = _movement_table()
