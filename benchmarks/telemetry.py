"""What telemetry costs: CPU a request on the relay's thread, a scrape, and how long a scrape keeps the relay.

    python -m benchmarks.telemetry              half a minute
    python -m benchmarks.telemetry --json       the same as one JSON document

*A request* is what the observer adds to the effects of one request: one that runs to its end, one that is
stopped and acknowledged, the latter with an exemplar, and with a tracer. CPU is the calling thread's own. *A
scrape* is `Telemetry.render` with open requests in the book. *The relay's wait* is how late a thread that wants
to run every half millisecond gets to run, while another thread scrapes all the time, under the switch interval
that `stopguard serve` sets; the same without scrapes stands beside it, and the difference is what counts.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable

import click
import msgspec
from rich.console import Console
from rich.table import Table

from stopguard.ledger import Book, Evidence
from stopguard.stops import Controller, Door, DoorKind, Effect, EngineProfile
from stopguard.telemetry import Telemetry, create_telemetry

OPEN_REQUESTS = 10_000
REQUEST_MICROSECONDS_MAX = 15.0
SCRAPE_MILLISECONDS_MAX = 50.0
WAIT_MILLISECONDS_MAX = 5.0
SWITCH_SECONDS = 0.001
"""As `stopguard serve` sets it."""

_TICK_SECONDS = 0.0005
_ROUND = 2000
_ROUNDS = 7
_TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ENGINE = EngineProfile(
    name="local",
    doors=(Door(name="abort", kind=DoorKind.CALL, worth=Evidence.PROBE),),
    best_evidence=Evidence.PROBE,
)


class Figure(msgspec.Struct, frozen=True):
    """One measured figure: median, lowest and highest, and the most that it may be, if there is such a limit."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.median <= self.target


class _Relay:
    """A controller with telemetry; `play` runs one request through it and returns its effects."""

    def __init__(self) -> None:
        self.book = Book()
        self.controller = Controller(self.book)
        self.telemetry: Telemetry = create_telemetry(self.book, self.controller, [ENGINE], lambda _: ("small",))
        self.number = 0

    def admit(self, at: float) -> tuple[str, float]:
        self.number += 1
        return f"sg-{self.number:032d}", at + self.number

    def finish(self) -> list[tuple[Effect, float]]:
        request_id, at = self.admit(1.0)
        tracked = self.controller.admit(request_id, at, model="small")
        self.controller.dispatch(tracked, at, ENGINE)
        self.controller.output_started(tracked, at)
        tracked.events = 32
        seen = [*self.controller.engine_finished(tracked, at + 0.5), *self.controller.client_served(tracked, at + 0.5)]
        return [(effect, at + 0.5) for effect in seen]

    def stop(self, labels: dict[str, str] | None = None) -> list[tuple[Effect, float]]:
        request_id, at = self.admit(1.0)
        tracked = self.controller.admit(request_id, at, model="small")
        tracked.ledgers.labels = labels
        self.controller.dispatch(tracked, at, ENGINE)
        self.controller.output_started(tracked, at)
        tracked.events = 32
        began = self.controller.client_left(tracked, at + 0.5, "eof", occurred_at=at + 0.4)
        tracked.events = 34
        ended = self.controller.acknowledged(tracked, at + 0.6, Evidence.PROBE)
        return [(effect, at + 0.5) for effect in (*began, *ended)]


def request_cost(name: str, play: Callable[[_Relay], list[tuple[Effect, float]]], relay: _Relay) -> Figure:
    """Microseconds of the relay's thread that the observer takes for one request."""
    observe = relay.telemetry
    rounds = []
    for _ in range(_ROUNDS):
        requests = [play(relay) for _ in range(_ROUND)]
        gc.collect()
        gc.disable()
        begun = time.thread_time_ns()
        for seen in requests:
            for effect, at in seen:
                observe(effect, at)
        rounds.append((time.thread_time_ns() - begun) / _ROUND / 1000)
        gc.enable()
    return _figure(f"a request: {name}", "us", rounds, REQUEST_MICROSECONDS_MAX)


def with_tracer() -> Figure:
    """The same with spans; they are made and sent by a thread of their own, to nobody here."""
    from types import SimpleNamespace

    from stopguard.telemetry.otel_spans import builder
    from stopguard.telemetry.tracing import Tracer

    exporter = SimpleNamespace(export=lambda _: SimpleNamespace(name="SUCCESS"), shutdown=lambda: None)
    relay = _Relay()
    tracer = Tracer(exporter, builder("benchmark"), ratio=1.0, queue_max=1_000_000)
    relay.telemetry.tracer = tracer
    labels = {"traceparent": _TRACEPARENT, "trace_id": _TRACEPARENT[3:35]}
    try:
        return request_cost("stopped, traced", lambda one: one.stop(dict(labels)), relay)
    finally:
        tracer.close()


def _full_relay(requests: int) -> _Relay:
    """A relay with so many requests open, a fifth of which are being stopped."""
    relay = _Relay()
    for number in range(requests):
        request_id, at = relay.admit(1.0)
        tracked = relay.controller.admit(request_id, at, model="small")
        relay.controller.dispatch(tracked, at, ENGINE)
        relay.controller.output_started(tracked, at)
        tracked.events = 10
        if number % 5 == 0:
            relay.controller.client_left(tracked, at, "eof")
    return relay


def scrape_cost(relay: _Relay) -> Figure:
    """Milliseconds of wall time of one scrape with nothing beside it."""
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        relay.telemetry.render()
        times.append((time.perf_counter() - begun) * 1000)
    return _figure(f"a scrape with {len(relay.book):,} open requests", "ms", times, SCRAPE_MILLISECONDS_MAX)


def relay_wait(relay: _Relay, *, scrapes: bool, seconds: float = 3.0) -> Figure:
    """How late a thread runs that wants to run every half millisecond: median, lowest, and 99.9th percentile."""
    done = threading.Event()
    scraped = 0

    def scrape() -> None:
        nonlocal scraped
        while not done.is_set():
            relay.telemetry.render()
            scraped += 1
            time.sleep(0.01)

    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    thread = threading.Thread(target=scrape)
    if scrapes:
        thread.start()
    late = []
    try:
        ends_at = time.perf_counter() + seconds
        while (now := time.perf_counter()) < ends_at:
            time.sleep(_TICK_SECONDS)
            late.append((time.perf_counter() - now - _TICK_SECONDS) * 1000)
    finally:
        done.set()
        if scrapes:
            thread.join()
        sys.setswitchinterval(switch_seconds)
    late.sort()
    name = f"the relay's wait beside {scraped} scrapes" if scrapes else "the relay's wait without scrapes"
    return Figure(name, "ms", statistics.median(late), late[0], late[int(len(late) * 0.999)])


def _figure(name: str, unit: str, values: list[float], target: float | None) -> Figure:
    return Figure(name, unit, statistics.median(values), min(values), max(values), target)


def measure() -> list[Figure]:
    """All figures, in the order of the table."""
    labels = {"traceparent": _TRACEPARENT, "trace_id": _TRACEPARENT[3:35]}
    figures = [
        request_cost("ran to its end", _Relay.finish, _Relay()),
        request_cost("stopped", _Relay.stop, _Relay()),
        request_cost("stopped, with exemplars", lambda relay: relay.stop(dict(labels)), _Relay()),
        with_tracer(),
    ]
    relay = _full_relay(OPEN_REQUESTS)
    gc.collect()
    gc.freeze()
    figures.append(scrape_cost(relay))
    pairs = [(relay_wait(relay, scrapes=False), relay_wait(relay, scrapes=True)) for _ in range(3)]
    gc.unfreeze()
    figures += pairs[-1]
    # On a machine that does other things as well both are late; the difference is what a scrape does.
    added = [max(0.0, beside.high - alone.high) for alone, beside in pairs]
    figures.append(_figure("what scrapes add to its 99.9th percentile", "ms", added, WAIT_MILLISECONDS_MAX))
    return figures


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def main(as_json: bool) -> None:
    """Measure, print, and fail if a limit was passed."""
    figures = measure()
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(figure) for figure in figures], indent=1))
    else:
        table = Table("figure", "unit", "median", "low", "high", "limit", "")
        for one in figures:
            limit = "" if one.target is None else f"{one.target:g}"
            mark = {True: "met", False: "MISSED", None: ""}[one.met]
            table.add_row(one.name, one.unit, f"{one.median:.2f}", f"{one.low:.2f}", f"{one.high:.2f}", limit, mark)
        Console().print(table)
        click.echo("high: the highest of all rounds; of the relay's wait, the 99.9th percentile")
    sys.exit(any(one.met is False for one in figures))


if __name__ == "__main__":
    main()
