"""One moment of everything, from a `View`: what the live page and `stopguard top` show.

One walk over the open requests, one over those remembered, and lists that are cut. Nothing is counted here that
the books do not say: run it again and it says the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from time import sleep

from stopguard.admin import answers
from stopguard.admin.models import LeakLine, State
from stopguard.admin.page_models import EngineNow, Overview, Stage, StepTimes, StopNow, StopPoint
from stopguard.admin.view import EngineFacts, View
from stopguard.ledger import Account, Leak, Ledger, RequestLedgers, StopSummary
from stopguard.ledger.accounts import CLOSING_ACCOUNTS
from stopguard.stops import Tracked

__all__ = ["ENDED_MAX", "LEAKS_MAX", "POINTS_MAX", "REQUESTS_MAX", "STOPS_MAX", "overview", "stage_of"]

REQUESTS_MAX = 100
ENDED_MAX = 20
STOPS_MAX = 50
LEAKS_MAX = 20
POINTS_MAX = 200
ENGINES_MAX = 100
POINTS_SECONDS = 120.0
RATE_SECONDS = 60.0

_STEPS: tuple[Stage, ...] = ("notify", "ack", "in-flight output", "release", "settle")
_CHUNK = 256
_BREATH_SECONDS = 0.00002
_IN_QUEUE, _KV, _OUTPUT, _LINK, _ = (CLOSING_ACCOUNTS[ledger] for ledger in Ledger)


def overview(
    view: View,
    *,
    requests_max: int = REQUESTS_MAX,
    ended_max: int = ENDED_MAX,
    points_max: int = POINTS_MAX,
) -> Overview:
    """Everything now. The lists have their own limits, which can be lowered."""
    now, counts, signs = view.now(), view.statistics(), view.signs()
    tracked = view.open_requests()
    closed = view.closed_requests()
    books = _Open(tracked)
    ended = _Ended(closed, now, since=signs.started_at, forgotten=counts.settled + counts.written_off > len(closed))
    wasted = _wasted(view)
    leaks = list(view.leaks())
    return Overview(
        time=datetime.fromtimestamp(view.wall(now), tz=UTC),
        version=signs.version,
        uptime_seconds=round(now - signs.started_at, 3),
        draining=signs.draining,
        reasons=list(signs.reasons),
        warnings=list(signs.warnings),
        states=books.states,
        open_requests=counts.open_requests,
        overdue_requests=counts.overdue_requests,
        opened=counts.opened,
        settled=counts.settled,
        written_off=counts.written_off,
        leaks_found=counts.leaks_found,
        closed_late=counts.closed_late,
        stops_per_minute=ended.per_minute(),
        tokens_wasted=sum(wasted.values()),
        engines=[
            _engine(facts, books, ended, wasted.get(facts.name, 0), sum(leak.engine == facts.name for leak in leaks))
            for facts in view.engines()[:ENGINES_MAX]
        ],
        stops=[
            StopNow(request=answers.line(view, one), stage=stage_of(one.ledgers)) for one in books.stopping[:STOPS_MAX]
        ],
        stops_total=len(books.stopping),
        steps=ended.steps(),
        points=list(ended.points(points_max)),
        requests=[answers.line(view, one) for one in tracked[:requests_max]],
        ended=[answers.line(view, one) for one in closed[: -ended_max - 1 : -1]] if ended_max else [],
        leaks=_leaks(view, now),
    )


def stage_of(ledgers: RequestLedgers) -> Stage:
    """The step that a stop in progress waits for, by the ledgers that are open."""
    stop, balances = ledgers.stop, ledgers.balances
    if stop is None or stop.notified_at is None:
        return "notify"
    if any(balances[_LINK]):
        return "ack"
    if any(balances[_OUTPUT]):
        return "in-flight output"
    return "release" if any(balances[_KV]) else "settle"


# ---- private ---------------------------------------------------------------------------------------------------


class _Open:
    """What one walk over the open requests finds: states, stops in progress, and who runs where."""

    def __init__(self, requests: Iterable[Tracked]) -> None:
        self.states: dict[State, int] = {}
        self.running: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.overdue: dict[str, int] = {}
        self.stops: dict[str, int] = {}
        stopping: list[tuple[float, Tracked]] = []
        for number, request in enumerate(requests):
            if number % _CHUNK == _CHUNK - 1:
                sleep(_BREATH_SECONDS)  # the relay shares the interpreter with this walk
            ledgers = request.ledgers
            state = answers.state_of(ledgers)
            self.states[state] = self.states.get(state, 0) + 1
            stop, engine, balances = ledgers.stop, ledgers.engine, ledgers.balances
            if stop is not None and answers.is_stop(stop):
                stopping.append((stop.observed_at, request))
                self.stops[engine] = self.stops.get(engine, 0) + 1
            if balances[Account.QUEUE_RUNNING]:
                self.running[engine] = self.running.get(engine, 0) + 1
            elif any(balances[_IN_QUEUE]) and not balances[Account.QUEUE_ADMISSION]:
                self.waiting[engine] = self.waiting.get(engine, 0) + 1
            if state == "overdue":
                self.overdue[engine] = self.overdue.get(engine, 0) + 1
        stopping.sort(key=lambda one: one[0])
        self.stopping = [request for _, request in stopping]


class _Ended:
    """The stops among the requests remembered. `since` is when counting began; `forgotten`, that more have ended."""

    def __init__(self, closed: Sequence[RequestLedgers], now: float, *, since: float, forgotten: bool) -> None:
        self._now = now
        if forgotten and closed and closed[0].closed_at is not None:
            since = max(since, closed[0].closed_at)
        self._span_seconds = min(RATE_SECONDS, now - since)
        self._stops = [
            (request.closed_at, request.engine, request.stop)
            for request in closed
            if request.closed_at is not None and request.stop is not None and answers.is_stop(request.stop)
        ]

    def per_minute(self, engine: str | None = None) -> float:
        """Stops that ended, a minute, over the last one."""
        if self._span_seconds <= 0.0:
            return 0.0
        begin = self._now - self._span_seconds
        count = sum(at >= begin and engine in (None, name) for at, name, _ in self._stops)
        # In the first seconds a rate would be a guess from one or two stops.
        return round(count * 60.0 / max(self._span_seconds, 10.0), 1)

    def settle_times(self, engine: str) -> list[float]:
        return sorted(
            stop.settled_at - stop.observed_at
            for _, name, stop in self._stops
            if name == engine and stop.settled_at is not None and stop.outcome != "raced_finish"
        )

    def steps(self) -> list[StepTimes]:
        rows = [_after(stop) for _, _, stop in self._stops if stop.outcome != "raced_finish"]
        result = []
        for number, name in enumerate(_STEPS):
            times = sorted(after for row in rows if (after := row[number]) is not None)
            result.append(
                StepTimes(
                    name=name, stops=len(times), p50_seconds=_percentile(times, 50), p99_seconds=_percentile(times, 99)
                )
            )
        return result

    def points(self, limit: int) -> Iterator[StopPoint]:
        """The newest first."""
        for at, _, stop in self._stops[: -limit - 1 : -1] if limit else ():
            if self._now - at > POINTS_SECONDS:
                return
            if stop.outcome == "raced_finish":
                continue
            rounded = [None if after is None else round(after, 6) for after in _after(stop)]
            notify, ack, output, release, settle = rounded
            yield StopPoint(
                ago_seconds=round(self._now - at, 3),
                semantics=stop.semantics,
                notify=notify,
                ack=ack,
                output=output,
                release=release,
                settle=settle,
            )


def _after(stop: StopSummary) -> tuple[float | None, ...]:
    """How long after its observation each of the steps had happened, in seconds."""
    instants = (stop.notified_at, stop.acked_at, stop.output_settled_at, stop.released_at, stop.settled_at)
    return tuple(None if at is None else max(0.0, at - stop.observed_at) for at in instants)


def _engine(facts: EngineFacts, books: _Open, ended: _Ended, wasted: int, leaks_found: int) -> EngineNow:
    name = facts.name
    times = ended.settle_times(name)
    used = None
    if facts.blocks_used is not None and facts.blocks_total:
        used = round(facts.blocks_used / facts.blocks_total, 4)
    return EngineNow(
        name=name,
        kind=facts.kind,
        healthy=facts.healthy,
        running=books.running.get(name, 0),
        queued=books.waiting.get(name, 0) + facts.waiting_for_connection,
        stopping=books.stops.get(name, 0),
        kv_used=used,
        stops_per_minute=ended.per_minute(name),
        settle_p50_seconds=_percentile(times, 50),
        settle_p99_seconds=_percentile(times, 99),
        tokens_wasted=wasted,
        leaks_found=leaks_found,
        leaks_open=books.overdue.get(name, 0),
        best_evidence=facts.best_evidence,
        probed=facts.probed,
    )


def _leaks(view: View, now: float) -> list[LeakLine]:
    """The leaks that are still open, the oldest first, then the newest of the others."""
    wall_zero = view.wall(0.0)
    still_open: list[Leak] = []
    over: list[Leak] = []
    for leak in view.leaks():
        tracked = view.find_open(leak.request_id)
        is_open = tracked is not None and bool(tracked.ledgers.balances[leak.account])
        (still_open if is_open else over).append(leak)
    chosen = [(leak, True) for leak in still_open[:LEAKS_MAX]]
    chosen += [(leak, False) for leak in reversed(over)][: LEAKS_MAX - len(chosen)]
    return [answers.leak_line(leak, wall_zero=wall_zero, now=now, still_open=is_open) for leak, is_open in chosen]


def _wasted(view: View) -> dict[str, int]:
    """Tokens computed for nobody, by engine."""
    wasted: dict[str, int] = {}
    for (engine, _), balances in view.totals().items():
        tokens = balances.get(Account.OUTPUT_DISCARDED, 0) + balances.get(Account.OUTPUT_STALE, 0)
        wasted[engine] = wasted.get(engine, 0) + tokens
    return wasted


def _percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The nearest rank; `None` of nothing."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 6)
