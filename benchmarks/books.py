"""What the books cost: CPU a request, CPU a counter, memory an open request, memory after a million.

    python -m benchmarks.books                      a minute
    python -m benchmarks.books --settled 1000000    also resident memory over a million settled requests
    python -m benchmarks.books --json               the same as one JSON document

CPU is measured with the kernel's clocks of CPU time, never wall time: `thread` is the calling thread
(what an event loop would lose), `process` all threads, the journal's writer and the time the kernel
spends writing for it included. Each figure is the median over rounds, with the lowest and the highest.

A scenario is a function `(book, journal | None, request_id, at) -> None` that plays one whole request;
add one to `SCENARIOS` to have it measured in every mode.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import secrets
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from stopguard.ledger import Account, Book, BookLimits, Evidence, RequestLedgers
from stopguard.ledger.journal import Journal

ENGINE, MODEL = "local", "small"
REQUEST_MICROSECONDS_MAX = 40.0
COUNTER_MICROSECONDS_MAX = 0.3
OPEN_REQUEST_BYTES_MAX = 4096
GROWTH_MAX = 0.01

Scenario = Callable[[Book, Journal | None, str, float], None]


class Figure(msgspec.Struct, frozen=True):
    """One measured figure: median, lowest and highest over the rounds, and the target if there is one."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.median <= self.target


# ---- scenarios -------------------------------------------------------------------------------------


def begin(book: Book, request_id: str, at: float) -> RequestLedgers:
    """A request that arrived, was dispatched, and runs."""
    request = book.open(request_id, at, engine=ENGINE, model=MODEL)
    post = request.post
    post(Account.STREAM_CLIENTS, Account.STREAM_CONNECTED, 1, at)
    post(Account.QUEUE_ARRIVALS, Account.QUEUE_WAITING, 1, at)
    post(Account.KV_CLAIMABLE, Account.KV_CLAIMED, 1, at)
    post(Account.QUEUE_WAITING, Account.QUEUE_RUNNING, 1, at)
    return request


def end(book: Book, request: RequestLedgers, at: float) -> None:
    """Its last byte has gone out: four movements that the hot path counted are folded, and every ledger closes."""
    request.tokens_computed += 32
    request.tokens_delivered += 32
    request.bytes_received += 4096
    request.bytes_sent += 4096
    request.fold(at)
    post = request.post
    post(Account.QUEUE_RUNNING, Account.QUEUE_GONE, 1, at, Evidence.STREAM_CLOSED)
    post(Account.KV_CLAIMED, Account.KV_CLAIMABLE, 1, at, Evidence.STREAM_CLOSED)
    post(Account.STREAM_CONNECTED, Account.STREAM_CLOSED, 1, at)
    if not book.settle(request, at):
        raise SystemExit(f"the scenario does not settle: {request!r}")


def normal(book: Book, journal: Journal | None, request_id: str, at: float) -> None:
    """A normal request: 12 entries over all five ledgers (the link has a notice that became moot)."""
    request = begin(book, request_id, at)
    if journal is not None:
        journal.opened(request)
    request.post(Account.LINK_STOPS, Account.LINK_AWAITING, 1, at + 0.5, Evidence.SENT)
    request.post(Account.LINK_AWAITING, Account.LINK_MOOT, 1, at + 1.0)
    end(book, request, at + 1.0)
    if journal is not None:
        journal.settled(request)


SCENARIOS: dict[str, Scenario] = {"normal": normal}


# ---- measurements ------------------------------------------------------------------------------------


def request_cost(name: str, mode: str, folder: Path, *, requests: int, rounds: int) -> list[Figure]:
    """CPU of whole requests through book and journal. The process's figure includes the flushing of everything."""
    scenario = SCENARIOS[name]
    book = Book(BookLimits(recent=256))
    journal = None
    if mode != "off":
        journal = Journal.open(folder / f"{name}-{mode}.journal", policy=mode)
    thread, process = [], []
    at = time.monotonic()
    # What a busy gateway does in a flush interval; more would only measure a queue that is full.
    burst = min(requests, 5000)
    for number in range(rounds + 1):
        ids = [f"sg-{secrets.token_hex(12)}" for _ in range(requests)]
        in_thread = 0.0
        process_before = time.process_time()
        for first in range(0, requests, burst):
            thread_before = time.thread_time()
            for request_id in ids[first : first + burst]:
                at += 1e-4
                scenario(book, journal, request_id, at)
            in_thread += time.thread_time() - thread_before
            at += 1.0
            if journal is not None and not journal.flush(30.0):
                raise SystemExit(f"the journal does not keep up: {journal.statistics()}")
        if number:  # the first round warms up
            thread.append(in_thread / requests * 1e6)
            process.append((time.process_time() - process_before) / requests * 1e6)
    if journal is not None:
        counts = journal.statistics()
        journal.close(30.0)
        if counts.dropped:
            raise SystemExit(f"the journal dropped: {counts.dropped}")
    return [
        figure(f"{name} request, journal {mode}, calling thread", "µs", thread, REQUEST_MICROSECONDS_MAX),
        figure(f"{name} request, journal {mode}, whole process", "µs", process, REQUEST_MICROSECONDS_MAX),
    ]


def held_request_cost(folder: Path, *, requests: int, rounds: int) -> list[Figure]:
    """As `request_cost` in mode all, but every request is open across a flush, so that its open book is written too."""
    book = Book(BookLimits(recent=256))
    process = []
    at = time.monotonic()
    with Journal.open(folder / "held.journal", policy="all") as journal:
        for number in range(rounds + 1):
            ids = [f"sg-{secrets.token_hex(12)}" for _ in range(requests)]
            before = time.process_time()
            open_requests = []
            for request_id in ids:
                request = begin(book, request_id, at)
                journal.opened(request)
                open_requests.append(request)
            journal.flush(30.0)
            for request in open_requests:
                end(book, request, at + 1.0)
                journal.settled(request)
            journal.flush(30.0)
            at += 2.0
            if number:
                process.append((time.process_time() - before) / requests * 1e6)
    return [figure("request open across a flush, journal all, whole process", "µs", process)]


def hand_over_cost(folder: Path, *, rounds: int) -> list[Figure]:
    """CPU of `opened` and `settled` together in the calling thread, without any writing beside them."""
    calls = 4000
    costs = []
    request = Book().open("sg-hand-over", 0.0, engine=ENGINE, model=MODEL)
    with Journal.open(folder / "hand-over.journal", policy="stops", flush_seconds=3600.0) as journal:
        request.closed_at = 1.0
        for _ in range(rounds + 1):
            before = time.thread_time()
            for _ in range(calls):
                journal.opened(request)
                journal.settled(request)
            costs.append((time.thread_time() - before) / calls * 1e6)
            journal.flush(30.0)
    return [figure("handing a request to the journal, calling thread", "µs", costs[1:], 4.0)]


def counter_cost(*, rounds: int) -> list[Figure]:
    """A token and its bytes pass: four counters, as the relay bumps them; the loop itself is taken off."""
    request = Book().open("sg-counter", 0.0, engine=ENGINE, model=MODEL)
    updates = 400_000
    costs = []
    for _ in range(rounds + 1):
        before = time.thread_time()
        for _ in range(updates // 4):
            pass
        empty = time.thread_time() - before
        before = time.thread_time()
        for _ in range(updates // 4):
            request.tokens_computed += 1
            request.tokens_delivered += 1
            request.bytes_received += 210
            request.bytes_sent += 210
        costs.append((time.thread_time() - before - empty) / updates * 1e6)
    return [figure("hot-path counter update", "µs", costs[1:], COUNTER_MICROSECONDS_MAX)]


def memory_of_open_requests(*, requests: int) -> list[Figure]:
    """Bytes an open request, mid-stream, by the allocator's account and by the kernel's."""
    ids = [f"sg-{secrets.token_hex(12)}" for _ in range(requests)]

    def open_all() -> Book:
        book = Book(BookLimits(open_requests=requests))
        for number, request_id in enumerate(ids):
            request = begin(book, request_id, float(number))
            request.tokens_computed += 3
            request.fold(float(number))
        return book

    process = psutil.Process()
    gc.collect()
    resident_before = process.memory_info().rss
    book = open_all()
    gc.collect()
    resident = (process.memory_info().rss - resident_before) / requests
    del book
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    book = open_all()
    gc.collect()
    traced = (tracemalloc.get_traced_memory()[0] - before) / requests
    tracemalloc.stop()
    del book
    return [
        figure("memory of an open request, traced", "bytes", [traced], OPEN_REQUEST_BYTES_MAX),
        figure("memory of an open request, resident", "bytes", [resident], OPEN_REQUEST_BYTES_MAX),
    ]


def memory_after_settling(folder: Path, mode: str, *, settled: int) -> list[Figure]:
    """Growth of resident memory while `settled` requests come and go, from after a warm-up to the end."""
    book = Book()
    process = psutil.Process()
    resident: list[int] = []
    checks = 20
    step = max(1, settled // checks)
    at = time.monotonic()
    with Journal.open(folder / f"settled-{mode}.journal", policy=mode) as journal:
        # The warm-up fills what is bounded: the recent requests, the pages that SQLite keeps, the allocator's pools.
        for count in range(1, settled + step * 2 + 1):
            at += 1e-4
            normal(book, journal, f"sg-{secrets.token_hex(12)}", at)
            if count % 2000 == 0 and not journal.flush(30.0):
                raise SystemExit(f"the journal does not keep up: {journal.statistics()}")
            if count % step == 0:
                resident.append(process.memory_info().rss)
        counts = journal.statistics()
    if counts.dropped:
        raise SystemExit(f"the journal dropped: {counts.dropped}")
    measured = resident[1:]
    growth = (max(measured[-3:]) - measured[0]) / measured[0]
    return [
        figure(f"resident memory after warm-up, journal {mode}", "MiB", [measured[0] / 2**20]),
        figure(f"its growth over {settled:,} settled requests, journal {mode}", "of it", [growth], GROWTH_MAX),
    ]


def in_a_fresh_process(measure: Callable[..., list[Figure]], *arguments: Any, **options: Any) -> list[Figure]:
    """Memory is measured in a process of its own: what another measurement freed would hide growth."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments, **options).result()


def figure(name: str, unit: str, values: list[float], target: float | None = None) -> Figure:
    return Figure(name, unit, statistics.median(values), min(values), max(values), target)


# ---- the command -------------------------------------------------------------------------------------


def table(figures: list[Figure]) -> Table:
    result = Table(title="What the books cost", title_justify="left")
    for column in ("what", "median", "lowest", "highest", "unit", "target", ""):
        result.add_column(column, justify="left" if column in {"what", "unit", ""} else "right", no_wrap=True)
    for row in figures:
        digits = 4 if row.unit == "of it" else 3 if row.median < 1 else 1
        numbers = [f"{value:,.{digits}f}" for value in (row.median, row.low, row.high)]
        target = "" if row.target is None else f"≤ {row.target:,g}"
        word = {None: "", True: "[green]met[/]", False: "[red]MISSED[/]"}[row.met]
        result.add_row(row.name, *numbers, row.unit, target, word)
    return result


@click.command(help=__doc__.split("\n", maxsplit=1)[0])
@click.option("--requests", default=20_000, show_default=True, help="Requests a round.")
@click.option("--rounds", default=5, show_default=True, help="Rounds after the warm-up.")
@click.option("--open", "open_requests", default=50_000, show_default=True, help="Requests open at once, for memory.")
@click.option("--settled", default=0, help="Also settle this many and watch resident memory.")
@click.option("--settled-mode", default="all", show_default=True, help="The journal's policy for --settled.")
@click.option("--modes", default="off,stops,all,0.01", show_default=True, help="Journal policies, with commas.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
def main(
    requests: int, rounds: int, open_requests: int, settled: int, settled_mode: str, modes: str, as_json: bool
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="stopguard-books-"))
    figures: list[Figure] = []
    try:
        figures += in_a_fresh_process(memory_of_open_requests, requests=open_requests)
        for name in SCENARIOS:
            for mode in modes.split(","):
                figures += request_cost(name, mode, folder, requests=requests, rounds=rounds)
        figures += held_request_cost(folder, requests=min(requests, 10_000), rounds=rounds)
        figures += hand_over_cost(folder, rounds=rounds)
        figures += counter_cost(rounds=rounds)
        if settled:
            figures += in_a_fresh_process(memory_after_settling, folder, settled_mode, settled=settled)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        document: dict[str, Any] = {
            "schema_version": 1,
            "figures": [{**msgspec.to_builtins(f), "met": f.met} for f in figures],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        Console(width=None if Console().is_terminal else 150).print(table(figures))
    if any(row.met is False for row in figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
