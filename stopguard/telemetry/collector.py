"""What a scrape reads: the books as they are now, and what was counted since the start.

The collector runs in another thread than the relay, which goes on working. It therefore takes copies that the
interpreter makes in one step, never iterates over a live dictionary, and gives the interpreter away every few
hundred requests, so that a scrape of ten thousand does not keep the relay from a client that leaves.

A counter that is the sum of closed and of open requests can be read while one goes over from the one to the
other. Closed ones are read first, so that such a request may be missed and never counted twice, and what was
reported stays the least that is reported: a counter that fell would look like a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import sleep
from typing import TYPE_CHECKING, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from stopguard import __version__
from stopguard.ledger import Account, Ledger
from stopguard.ledger.accounts import CLOSING_ACCOUNTS
from stopguard.stops import Books, Client, Tracked
from stopguard.telemetry.catalogue import CONTINUED, DISPOSITION, LEDGER, NOT_CONTINUED, STATE, metric
from stopguard.telemetry.preemption import PreemptionNumbers, folded
from stopguard.telemetry.timeline_facts import preemptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopguard.telemetry.cells import Cell, Counters, Distributions
    from stopguard.telemetry.metrics import Telemetry

__all__ = ["BooksCollector", "state_of"]

T = TypeVar("T")
Pair = tuple[str, str]

PAIRS_AT_ZERO = 64
"""How many pairs of engine and model get their series before their first request."""

_VERSION_LENGTH = 64
_CHUNK = 512
_BREATH_SECONDS = 0.00002
_TRIES = 16
_QUEUE, _KV, _OUTPUT, _LINK, _STREAM = (CLOSING_ACCOUNTS[ledger] for ledger in Ledger)
_ADMISSION = Account.QUEUE_ADMISSION
_PREEMPTED, _PAUSED = Account.QUEUE_PREEMPTED, Account.QUEUE_PAUSED
_DELIVERED = Account.OUTPUT_DELIVERED
_STATES = {state: number for number, state in enumerate(STATE.values)}
_FINAL = {
    "delivered": Account.OUTPUT_DELIVERED,
    "discarded": Account.OUTPUT_DISCARDED,
    "stale": Account.OUTPUT_STALE,
}


def state_of(tracked: Tracked) -> str:
    """Where an open request stands, in one of the words of `stopguard_requests`."""
    machine = tracked.machine
    if machine.books is Books.OVERDUE:
        return "overdue"
    ledgers = tracked.ledgers
    stop = ledgers.stop
    if stop is not None and stop.semantics != "preempt":
        return "stopping"
    balances = ledgers.balances
    if balances[_ADMISSION]:
        return "queued"
    if balances[_PREEMPTED] or balances[_PAUSED]:
        return "preempted"
    if not any(balances[_QUEUE]):
        return "settling"
    return "draining" if machine.client is Client.DRAINING else "running"


class _Open:
    """What the open requests of one engine and model add up to."""

    __slots__ = ("delivered", "ledgers", "preemptions", "recomputed", "states")

    def __init__(self) -> None:
        self.ledgers = [0] * len(LEDGER.values)
        self.states = [0] * len(STATE.values)
        self.delivered = 0
        self.recomputed = 0
        self.preemptions: dict[tuple[str, str], int] = {}

    def add(self, tracked: Tracked) -> None:
        ledgers = tracked.ledgers
        balances = ledgers.balances
        row = self.ledgers
        if any(balances[_QUEUE]):
            row[0] += 1
        if any(balances[_KV]):
            row[1] += 1
        if any(balances[_OUTPUT]):
            row[2] += 1
        if any(balances[_LINK]):
            row[3] += 1
        if any(balances[_STREAM]):
            row[4] += 1
        self.states[_STATES[state_of(tracked)]] += 1
        # What passed since the last transition is counted by the hot path and not yet in the totals.
        unbooked = ledgers.tokens_delivered - balances[_DELIVERED]
        if not tracked.discarding and not tracked.probed:
            unbooked += tracked.events - tracked.folded_events
        if unbooked > 0:
            self.delivered += unbooked
        self.recomputed += ledgers.tokens_recomputed
        if tracked.preemptions:
            for one in preemptions(list(ledgers.marks)):
                if one.happened:
                    key = (one.reason, one.mode)
                    self.preemptions[key] = self.preemptions.get(key, 0) + 1


class BooksCollector:
    """The one collector of the registry: `collect` yields every metric of the catalogue, in its order."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._reported: dict[tuple[str, ...], float] = {}

    def collect(self) -> Iterator[Metric]:
        """One scrape. Not to be run in two threads at once."""
        for family in self._families():
            sleep(_BREATH_SECONDS)  # writing one out takes up to a millisecond
            yield family

    def _families(self) -> Iterator[Metric]:
        telemetry = self._telemetry
        self._add_pairs_at_zero()
        cells: list[Cell] = list(telemetry.cells.values())
        # The order matters, see above: closed requests, then the totals, then the open ones.
        recomputed = {id(cell): cell.recomputed for cell in cells}
        preempted = {id(cell): dict(cell.preemptions) for cell in cells}
        totals = self._totals()
        open_rows = self._open_rows()
        fresh = [cell for cell in telemetry.cells.copy().values() if id(cell) not in recomputed]
        for cell in fresh:  # its first request came while the books were read
            recomputed[id(cell)], preempted[id(cell)] = 0, dict.fromkeys(cell.preemptions, 0.0)
        cells += fresh
        nothing = _Open()
        rows = [(cell, open_rows.get((cell.engine, cell.model), nothing)) for cell in cells]

        yield _histograms("stopguard_disconnect_detection_seconds", [((), telemetry.detection)])
        yield _histograms("stopguard_stop_to_abort_sent_seconds", [(_own(cell), cell.abort_sent) for cell in cells])
        yield _histograms("stopguard_abort_to_ack_seconds", [(_own(cell), cell.ack) for cell in cells])
        yield _histograms("stopguard_ack_to_released_seconds", [(_own(cell), cell.released) for cell in cells])
        yield _histograms("stopguard_stop_to_settled_seconds", [(_own(cell), cell.settled) for cell in cells])
        yield _histograms("stopguard_wasted_tokens", [(_own(cell), cell.wasted_tokens) for cell in cells])
        yield self._counters(
            "stopguard_wasted_gpu_seconds_total", ((_own(cell), cell.wasted_gpu_seconds) for cell in cells)
        )
        yield self._counters("stopguard_tokens_total", _tokens(rows, totals))
        yield self._counters("stopguard_leaks_total", _children(cells, lambda cell: cell.leaks))
        yield _gauges(
            "stopguard_ledger_open",
            (
                ((*_own(cell), ledger), row.ledgers[number])
                for cell, row in rows
                for number, ledger in enumerate(LEDGER.values)
            ),
        )
        yield _gauges(
            "stopguard_requests",
            (
                ((*_own(cell), state), row.states[number])
                for cell, row in rows
                for number, state in enumerate(STATE.values)
            ),
        )
        yield self._counters("stopguard_stops_total", _children(cells, lambda cell: cell.stops))
        yield self._counters(
            "stopguard_preemptions_total",
            (
                ((*_own(cell), *key), count + row.preemptions.get((key[0], key[1]), 0))
                for cell, row in rows
                for key, count in preempted[id(cell)].items()
            ),
        )
        yield self._counters(
            "stopguard_recomputed_tokens_total",
            ((_own(cell), recomputed[id(cell)] + row.recomputed) for cell, row in rows),
        )
        yield from self._preempting()
        yield from self._continued()
        yield self._counters("stopguard_abort_retries_total", _children(cells, lambda cell: cell.retries))
        yield from self._compared()
        yield from self._engines()
        anomalies = telemetry.controller.anomalies
        yield self._counters("stopguard_book_errors_total", [((), anomalies.book_error_count)])
        dropped = 0 if telemetry.tracer is None else telemetry.tracer.dropped
        yield self._counters("stopguard_spans_dropped_total", [((), dropped)])
        about = metric("stopguard_build_info")
        yield InfoMetricFamily("stopguard_build", about.help, value={"version": __version__})

    # ---- reading the books -----------------------------------------------------------------------

    def _add_pairs_at_zero(self) -> None:
        """Series for every pair that may come, while there are few: `increase` would miss the first leak of others."""
        telemetry = self._telemetry
        for name in telemetry.profiles:
            for model in list(telemetry.models(name)):
                if len(telemetry.cells) >= PAIRS_AT_ZERO:
                    return
                telemetry.cell(name, model)

    def _totals(self) -> dict[Pair, dict[Account, int]]:
        """The book's totals under our labels. A pair that is new may come in while they are copied."""
        telemetry = self._telemetry
        rows: dict[Pair, dict[Account, int]] = {}
        for (engine, model), accounts in _calmly(telemetry.book.totals).items():
            cell = telemetry.cell(engine, model)
            row = rows.setdefault((cell.engine, cell.model), {})
            for account in _FINAL.values():
                row[account] = row.get(account, 0) + accounts.get(account, 0)
        return rows

    def _open_rows(self) -> dict[Pair, _Open]:
        telemetry = self._telemetry
        rows: dict[Pair, _Open] = {}
        labels: dict[Pair, _Open] = {}
        requests = list(telemetry.controller.tracked.values())
        for start in range(0, len(requests), _CHUNK):
            if start:
                sleep(_BREATH_SECONDS)
            for tracked in requests[start : start + _CHUNK]:
                ledgers = tracked.ledgers
                pair = (ledgers.engine, ledgers.model)
                row = labels.get(pair)
                if row is None:
                    cell = telemetry.cell(*pair)
                    row = labels[pair] = rows.setdefault((cell.engine, cell.model), _Open())
                row.add(tracked)
        return rows

    def _compared(self) -> Iterator[Metric]:
        found: Mapping[str, object] = {}
        telemetry = self._telemetry
        if telemetry.reconciliations is not None:
            found = dict(telemetry.reconciliations())
        orphans: list[tuple[tuple[str, ...], float]] = []
        phantoms: list[tuple[tuple[str, ...], float]] = []
        for engine, comparison in found.items():
            if engine not in telemetry.profiles:
                continue
            for difference in getattr(comparison, "differences", ()):
                if difference.expected is not None and difference.reported is not None:
                    labels = (engine, difference.ledger.label, difference.unit)
                    orphans.append((labels, difference.orphans))
                    phantoms.append((labels, difference.phantoms))
        yield _gauges("stopguard_orphans", orphans)
        yield _gauges("stopguard_phantoms", phantoms)

    def _preempting(self) -> Iterator[Metric]:
        source = self._telemetry.preemption
        numbers = PreemptionNumbers() if source is None else _calmly(source)
        yield self._counters(
            "stopguard_preempted_seconds_total", [((name,), count) for name, count in numbers.away_seconds.items()]
        )
        yield self._counters("stopguard_preemption_victims_total", list(numbers.victims.items()))
        refused = folded(numbers.refusals) if source is not None else {}
        yield self._counters(
            "stopguard_preemption_refusals_total", [((reason,), count) for reason, count in refused.items()]
        )
        yield _gauges("stopguard_queued_requests", [((name,), count) for name, count in numbers.queued.items()])
        for name, value in (
            ("stopguard_parked_longest_seconds", numbers.longest_away_seconds),
            ("stopguard_preemption_guard_closed", float(numbers.guard_closed)),
            ("stopguard_preemption_recomputed_ratio", numbers.recomputed_share),
        ):
            yield _gauges(name, [((), value)] if source is not None else [])
        for name, value in (
            ("stopguard_classes_lowered_total", numbers.lowered),
            ("stopguard_hopeless_deadlines_total", numbers.hopeless),
        ):
            yield self._counters(name, [((), value)] if source is not None else [])

    def _continued(self) -> Iterator[Metric]:
        source = self._telemetry.continuation
        numbers = None if source is None else source()
        for name, label in (
            ("stopguard_streams_continued_total", CONTINUED),
            ("stopguard_streams_not_continued_total", NOT_CONTINUED),
        ):
            counts = [] if numbers is None else [((word,), getattr(numbers, word)) for word in label.values]
            yield self._counters(name, counts)

    def _engines(self) -> Iterator[Metric]:
        telemetry = self._telemetry
        yield self._counters(
            "stopguard_probe_gaps_total", [((name,), count) for name, count in telemetry.probe_gaps.items()]
        )
        probes = {} if telemetry.probes is None else telemetry.probes()
        yield _gauges("stopguard_probes", [((name,), row[0]) for name, row in probes.items()])
        yield _gauges("stopguard_probes_in_gap", [((name,), row[1]) for name, row in probes.items()])
        yield self._counters(
            "stopguard_probe_frames_dropped_total", [((name,), row[3]) for name, row in probes.items()]
        )
        lag = HistogramMetricFamily("stopguard_probe_lag_seconds", metric("stopguard_probe_lag_seconds").help)
        _add_histogram(lag, (), telemetry.probe_lag.row(), metric("stopguard_probe_lag_seconds").bounds, {})
        yield lag
        healthy = telemetry.healthy
        names = () if healthy is None else tuple(telemetry.profiles)
        yield _gauges("stopguard_engine_up", (((name,), float(healthy(name))) for name in names if healthy is not None))
        identified = {} if telemetry.identities is None else telemetry.identities()
        about = metric("stopguard_engine_info")
        information = InfoMetricFamily("stopguard_engine", about.help, labels=["engine"])
        for name, (kind, version) in identified.items():
            information.add_metric([name], {"kind": kind, "version": version[:_VERSION_LENGTH]})
        yield information
        yield _gauges(
            "stopguard_engine_step_seconds",
            (
                ((name,), clock.step_seconds)
                for name, clock in telemetry.steps.items()
                if clock.step_seconds is not None
            ),
        )

    def _counters(self, name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
        about = metric(name)
        family = CounterMetricFamily(name, about.help, labels=[label.name for label in about.labels])
        reported = self._reported
        for labels, value in values:
            key = (name, *labels)
            reported[key] = max(value, reported.get(key, 0.0))
            family.add_metric(labels, reported[key])
        return family


# ---- small things ------------------------------------------------------------------------------------


def _calmly(read: Callable[[], T]) -> T:
    """Call `read` again when a dictionary grew under it: that is rare, and bounded by the book's limits."""
    for _ in range(_TRIES - 1):
        try:
            return read()
        except RuntimeError:
            continue
    return read()


def _own(cell: Cell) -> tuple[str, str]:
    return cell.engine, cell.model


def _children(cells: list[Cell], counters: Callable[[Cell], Counters]) -> Iterator[tuple[tuple[str, ...], float]]:
    for cell in cells:
        for values, count in counters(cell).copy().items():
            yield (*_own(cell), *values), count


def _tokens(
    rows: list[tuple[Cell, _Open]], totals: dict[Pair, dict[Account, int]]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for cell, row in rows:
        accounts = totals.get(_own(cell), {})
        for disposition in DISPOSITION.values:
            unbooked = row.delivered if disposition == "delivered" else 0
            yield (*_own(cell), disposition), accounts.get(_FINAL[disposition], 0) + unbooked


def _gauges(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    about = metric(name)
    family = GaugeMetricFamily(name, about.help, labels=[label.name for label in about.labels])
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _histograms(name: str, groups: Iterable[tuple[tuple[str, ...], Distributions]]) -> Metric:
    about = metric(name)
    family = HistogramMetricFamily(name, about.help, labels=[label.name for label in about.labels])
    for own, children in groups:
        for values, child in list(children.items()):
            _add_histogram(family, (*own, *values), child.row(), about.bounds, child.exemplars.copy())
    return family


def _add_histogram(
    family: HistogramMetricFamily,
    labels: tuple[str, ...],
    row: list[float],
    bounds: tuple[float, ...],
    exemplars: Mapping[int, Exemplar],
) -> None:
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    cumulated = 0.0
    for number, count in enumerate(row[:-1]):
        cumulated += count
        bound = repr(float(bounds[number])) if number < len(bounds) else "+Inf"
        exemplar = exemplars.get(number)
        buckets.append((bound, cumulated) if exemplar is None else (bound, cumulated, exemplar))
    family.add_metric(labels, buckets, row[-1])
