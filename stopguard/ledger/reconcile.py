"""Reconciliation: our books against the engine's own gauges.

The sum over our requests says what the engine should be doing; its gauges say what it does. Each
difference has a side:

* *orphans*: work in the engine that no known request owns;
* *phantoms*: work that we believe in and the engine does not have.

Neither is an error by itself (a gauge is sampled, a request is under way between the two books), so
a difference is only reported as `persistent` when it was there, on the same side, in every one of
the last `confirmations` comparisons. What one side cannot say is `None`, never zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from stopguard.ledger.accounts import Account, Ledger
from stopguard.ledger.request import RequestLedgers

__all__ = ["Difference", "EngineGauges", "Reconciler", "Reconciliation", "reconcile", "reconcile_inside"]


class EngineGauges(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself at `at` (book seconds). `None` where it does not say.

    `blocks_used` counts blocks that a request holds or that are behind a fence; what the prefix
    cache keeps and would give away is not used. `request_ids` are the ids that the engine knows,
    where it lists them (a probe's snapshot). `holds_since` is for gauges that are behind (those of an engine's last
    step): the latest moment of which it is known that the numbers are not older. `None`: they are of `at`.
    `block_tokens` is how many tokens a block has.
    """

    at: float
    running: int | None = None
    waiting: int | None = None
    blocks_used: int | None = None
    blocks_total: int | None = None
    block_tokens: int | None = None
    slots_used: int | None = None
    request_ids: frozenset[str] | None = None
    holds_since: float | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One ledger's comparison: what we expect, what the engine reports, and who has too much."""

    ledger: Ledger
    unit: str
    expected: int | None
    reported: int | None
    orphans: int = 0
    phantoms: int = 0
    orphan_ids: tuple[str, ...] = ()
    phantom_ids: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether neither side has too much (or one of them is silent)."""
        return not self.orphans and not self.phantoms


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """All comparisons of one moment."""

    at: float
    differences: tuple[Difference, ...]

    @property
    def agrees(self) -> bool:
        """Whether no comparison found an orphan or a phantom."""
        return all(difference.agrees for difference in self.differences)


_IN_ENGINE = (
    Account.QUEUE_WAITING,
    Account.QUEUE_RUNNING,
    Account.QUEUE_PREEMPTED,
    Account.QUEUE_PAUSED,
    Account.QUEUE_TRANSFERRING,
)
_QUEUED = (Account.QUEUE_WAITING, Account.QUEUE_RUNNING, Account.QUEUE_PREEMPTED)
_ASIDE = (Account.QUEUE_PAUSED, Account.QUEUE_TRANSFERRING)
_SLOTS = (Account.KV_LORA, Account.KV_ENCODER, Account.KV_GRAMMAR, Account.KV_SPECULATIVE)


def reconcile(requests: Iterable[RequestLedgers], gauges: EngineGauges) -> Reconciliation:
    """Compare the requests of one engine with its gauges.

    Blocks are compared exactly when every request that has a claim also has its blocks booked (a
    probe speaks). With claims of unknown size only "somebody holds blocks although nobody should"
    can be said: used blocks without any claim are orphans.
    """
    places = blocks = slots = claims = 0
    sized = True
    ids: set[str] = set()
    for request in requests:
        balances = request.balances
        in_engine = sum(balances[account] for account in _IN_ENGINE)
        places += in_engine
        if in_engine:
            ids.add(request.request_id)
        held = balances[Account.KV_HELD] + balances[Account.KV_FENCED]
        blocks += held
        slots += sum(balances[account] for account in _SLOTS)
        if balances[Account.KV_CLAIMED]:
            claims += 1
            sized = sized and held > 0
    reported_places = None
    if gauges.running is not None and gauges.waiting is not None:
        reported_places = gauges.running + gauges.waiting
    elif gauges.request_ids is not None:
        reported_places = len(gauges.request_ids)
    expected_blocks = blocks if sized or not claims else None
    differences = [
        _compare(Ledger.QUEUE, "places", places, reported_places, ids, gauges.request_ids),
        _compare(Ledger.KV, "blocks", expected_blocks, gauges.blocks_used, set(), None),
        _compare(Ledger.KV, "slots", slots, gauges.slots_used, set(), None),
    ]
    return Reconciliation(at=gauges.at, differences=tuple(differences))


def reconcile_inside(
    requests: Iterable[RequestLedgers],
    gauges: EngineGauges,
    orphan_ids: tuple[str, ...] = (),
    phantom_ids: tuple[str, ...] = (),
) -> Reconciliation:
    """Compare the requests that an engine's scheduler has reported with its own totals (both from a probe).

    Two things are no difference. Engines disagree on whether one that is held or in transfer is in a queue. And
    the books count references to blocks, of which several can go to one block of a shared prefix: more references
    than blocks in use are as it should be, fewer are blocks that nobody owns. `orphan_ids` and `phantom_ids` were
    found by name (an engine's list against ours at the same moment).
    """
    queued = aside = references = slots = 0
    for request in requests:
        balances = request.balances
        queued += sum(balances[account] for account in _QUEUED)
        aside += sum(balances[account] for account in _ASIDE)
        references += request.blocks_held + balances[Account.KV_FENCED]
        slots += sum(balances[account] for account in _SLOTS)
    places: int | None = None
    expected = queued
    if gauges.running is not None and gauges.waiting is not None:
        places = gauges.running + gauges.waiting
        expected = min(max(queued, places), queued + aside)
    queue = _compare(Ledger.QUEUE, "places", expected, places, set(), None)
    if orphan_ids or phantom_ids:
        queue = msgspec.structs.replace(
            queue,
            orphans=max(queue.orphans, len(orphan_ids)),
            phantoms=max(queue.phantoms, len(phantom_ids)),
            orphan_ids=orphan_ids,
            phantom_ids=phantom_ids,
        )
    used = gauges.blocks_used
    shared = used is not None and 0 < used < references
    blocks = _compare(Ledger.KV, "blocks", used if shared else references, used, set(), None)
    taken = _compare(Ledger.KV, "slots", slots, gauges.slots_used, set(), None)
    return Reconciliation(at=gauges.at, differences=(queue, blocks, taken))


def _compare(
    ledger: Ledger,
    unit: str,
    expected: int | None,
    reported: int | None,
    our_ids: set[str],
    their_ids: frozenset[str] | None,
) -> Difference:
    if expected is None or reported is None:
        return Difference(ledger=ledger, unit=unit, expected=expected, reported=reported)
    orphan_ids = phantom_ids = frozenset[str]()
    orphans, phantoms = max(0, reported - expected), max(0, expected - reported)
    if their_ids is not None:
        # Names beat numbers: one orphan and one phantom cancel out in the sums.
        orphan_ids, phantom_ids = their_ids - our_ids, frozenset(our_ids) - their_ids
        orphans, phantoms = max(orphans, len(orphan_ids)), max(phantoms, len(phantom_ids))
    return Difference(
        ledger=ledger,
        unit=unit,
        expected=expected,
        reported=reported,
        orphans=orphans,
        phantoms=phantoms,
        orphan_ids=tuple(sorted(orphan_ids)),
        phantom_ids=tuple(sorted(phantom_ids)),
    )


class Reconciler:
    """Comparisons over time: tells a lasting difference from one that was only under way."""

    def __init__(self, confirmations: int = 3) -> None:
        if confirmations < 1:
            raise ValueError("a difference must be seen at least once")
        self._history: deque[Reconciliation] = deque(maxlen=confirmations)

    def add(self, reconciliation: Reconciliation) -> None:
        """Remember one comparison."""
        self._history.append(reconciliation)

    def persistent(self) -> list[Difference]:
        """The newest differences that were there, on the same side, in every remembered comparison."""
        if len(self._history) < (self._history.maxlen or 1):
            return []
        result = []
        for index, newest in enumerate(self._history[-1].differences):
            seen = [comparison.differences[index] for comparison in self._history]
            if all(difference.orphans for difference in seen) or all(difference.phantoms for difference in seen):
                result.append(newest)
        return result
