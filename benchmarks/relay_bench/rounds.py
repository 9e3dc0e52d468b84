"""A run: peers are started once; a round takes one measurement after another, and each of it peer by peer.

So the same measurement of two peers is seconds apart, which matters more than anything else on a machine that others
use too: its speed was seen to change twofold within minutes. Ratios are taken inside a round, and the order of the
peers is rotated so that no peer is always measured after the same neighbour or at the same place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.relay_bench import load
from benchmarks.relay_bench.install import PeerUnavailableError
from benchmarks.relay_bench.peers import PEERS, Launch, Peer, Setting, random_key
from benchmarks.relay_bench.processes import ProcessorPlan, Running, free_port
from benchmarks.relay_bench.upstream_watch import UpstreamWatch, fetch
from benchmarks.relay_bench.windows import WINDOWS, Window, WindowFigures, measure_window

CHUNK_GAP_MS = 25
PACED_STREAMS, UNPACED_STREAMS, BACKGROUND_STREAMS = 200, 32, 64
SETTLE_SECONDS = 5.0
WARM_UP_SECONDS = 0.3
OVERLOAD_DIVISOR = 16

Say = Callable[[str], None]
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    peers: tuple[str, ...]
    rounds: int
    seconds: float
    """Of each load."""
    window_samples: int
    processors: ProcessorPlan
    cache: Path
    work: Path


@dataclass(slots=True)
class PeerRound:
    """One peer's figures of one round."""

    figures: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PeerResult:
    """One peer over the whole run; ``reason`` says why it has no figures."""

    name: str
    title: str
    version: str = ""
    reason: str = ""
    rounds: list[PeerRound] = field(default_factory=list)


@dataclass(slots=True)
class _Started:
    peer: Peer
    port: int
    launch: Launch | None = None
    running: Running | None = None
    """None for the direct row, as is ``launch``."""
    overloaded_by: set[str] = field(default_factory=set)
    """Kinds of streams of which this peer could not carry the full number."""

    def processor_seconds(self) -> float:
        return self.running.processor_seconds() if self.running is not None else 0.0


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every measurement needs."""

    plan: Plan
    upstream: UpstreamWatch
    api_key: str
    say: Say


async def run(plan: Plan, say: Say) -> dict[str, PeerResult]:
    """Starts everything, measures ``plan.rounds`` rounds and ends everything it started."""
    bench = _Bench(plan, UpstreamWatch(free_port(), plan.processors.upstream), random_key(), say)
    results = {name: PeerResult(name, PEERS[name].title) for name in plan.peers}
    started: dict[str, _Started] = {}
    try:
        await bench.upstream.listen()
        await _wait_ready(bench.upstream.port, bench.api_key, None, 10)
        for name in plan.peers:
            try:
                await _start(PEERS[name], bench, results[name], started)
            except PeerUnavailableError as error:
                results[name].reason = str(error)
                say(f"{results[name].title}: not measured: {error}")
        for number in range(plan.rounds):
            await _round(number, bench, results, started)
        return results
    finally:
        for one in started.values():
            if one.running is not None:
                one.running.stop()
        bench.upstream.stop()


async def _round(
    number: int, bench: _Bench, results: Mapping[str, PeerResult], started: Mapping[str, _Started]
) -> None:
    for name in started:
        results[name].rounds.append(PeerRound())
    for place, (title, step) in enumerate(_STEPS):
        for name in rotated(list(started), number + place):
            one, outcome = started[name], results[name].rounds[number]
            if one.running is not None and one.running.ended():
                outcome.notes.append(f"{title}: it no longer runs: {one.running.last_words()}")
                continue
            try:
                told = await step(one, bench, outcome)
            except load.MeasurementError as error:
                outcome.notes.append(f"{title}: {error}")
                told = str(error)
            bench.say(f"round {number + 1} of {bench.plan.rounds} · {title} · {one.peer.title}: {told}")
    for name, one in started.items():
        if one.running is not None:
            results[name].rounds[number].figures["resident_mib"] = one.running.resident_bytes() / 2**20
    _add_latency_over_direct(results, number)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """``names`` begun at another place each round."""
    shift = number * max(1, len(names) // 3) % len(names)
    return [*names[shift:], *names[:shift]]


async def _start(peer: Peer, bench: _Bench, result: PeerResult, started: dict[str, _Started]) -> None:
    plan, upstream_port = bench.plan, bench.upstream.port
    if peer.prepare is None:
        started[peer.name] = _Started(peer, upstream_port)
        return
    setting = Setting(free_port(), upstream_port, bench.api_key, plan.cache, plan.work)
    began_at = time.monotonic()
    launch = await asyncio.to_thread(peer.prepare, setting)
    result.version = launch.version
    started[peer.name] = one = _Started(peer, setting.listen_port, launch)
    try:
        await _serve(one, bench)
    except PeerUnavailableError:
        del started[peer.name]
        raise
    bench.say(f"{peer.title} {launch.version}: ready after {time.monotonic() - began_at:.1f} s")


async def _serve(one: _Started, bench: _Bench) -> None:
    """Starts a peer's process, again if it runs already, and waits until it serves both kinds of request."""
    if one.launch is None:
        return
    if one.running is not None:
        one.running.stop()
    log = bench.plan.work / f"{one.peer.name}.log"
    one.running = Running(one.launch.command, log, bench.plan.processors.proxy, one.launch.environment)
    try:
        await _wait_ready(one.port, bench.api_key, one.running, one.peer.ready_seconds)
        await load.check(one.port, bench.api_key)
    except (PeerUnavailableError, load.MeasurementError) as error:
        words = one.running.last_words()
        one.running.stop()
        raise PeerUnavailableError(f"{error}; its last words: {words}") from error


async def _wait_ready(port: int, api_key: str, running: Running | None, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    problem = "nothing listened"
    while time.monotonic() < deadline:
        if running is not None and running.ended():
            raise PeerUnavailableError("it ended by itself")
        try:
            async with asyncio.timeout(5):
                await fetch(port, "/v1/models", api_key)
            return
        except (OSError, TimeoutError) as error:
            problem = str(error) or "no answer"
        await asyncio.sleep(0.2)
    raise PeerUnavailableError(f"not ready after {seconds:.0f} s: {problem}")


async def _measure_requests(one: _Started, bench: _Bench, outcome: PeerRound, *, connections: int) -> str:
    cpu = one.processor_seconds
    await load.measure_requests(one.port, bench.api_key, connections, WARM_UP_SECONDS, cpu)
    requests = await load.measure_requests(one.port, bench.api_key, connections, bench.plan.seconds, cpu)
    name = f"requests_{connections}"
    outcome.figures[f"{name}_per_second"] = requests.per_second
    outcome.figures[f"{name}_p50_ms"] = requests.p50_ms
    outcome.figures[f"{name}_p99_ms"] = requests.p99_ms
    told = f"{requests.per_second:,.0f} requests/s, p50 {requests.p50_ms:.3f} ms"
    if one.running is not None:
        outcome.figures[f"{name}_processor_us"] = requests.processor_us
        outcome.figures[f"{name}_busy_share"] = requests.busy_share
        told += f", {requests.processor_us:.0f} µs/request"
    return told


async def _measure_streams(one: _Started, bench: _Bench, outcome: PeerRound, *, paced: bool) -> str:
    kind, full, gap_ms = ("paced", PACED_STREAMS, CHUNK_GAP_MS) if paced else ("unpaced", UNPACED_STREAMS, 0)

    async def measure(count: int) -> load.StreamFigures:
        return await load.measure_streams(
            one.port, bench.api_key, count, gap_ms, bench.plan.seconds, one.processor_seconds
        )

    count, streams = await _carried(one, bench, outcome, kind, full, measure)
    if paced:
        outcome.figures["paced_delivered_share"] = streams.delivered_share * count / full
    else:
        outcome.figures["unpaced_chunks_per_second"] = streams.chunks_per_second
    told = f"{streams.chunks_per_second:,.0f} chunks/s"
    if one.running is not None:
        outcome.figures[f"{kind}_processor_us"] = streams.processor_us
        told += f", {streams.processor_us:.1f} µs/chunk"
    return told


async def _measure_window(one: _Started, bench: _Bench, outcome: PeerRound, *, window: Window) -> str:
    figures = outcome.figures

    async def measure(count: int) -> tuple[WindowFigures, float, int]:
        async with load.Streams(one.port, bench.api_key, count, CHUNK_GAP_MS) as background:
            chunks, began_at = background.chunks, time.perf_counter()
            found = await measure_window(window, one.port, bench.api_key, bench.upstream, bench.plan.window_samples)
            due = BACKGROUND_STREAMS * (time.perf_counter() - began_at) * 1000 / CHUNK_GAP_MS
            return found, (background.chunks - chunks) / due, background.lost

    count, (found, share, lost) = await _carried(one, bench, outcome, "background", BACKGROUND_STREAMS, measure)
    if lost:
        outcome.notes.append(f"{window.title}: {lost} of the {count} background streams broke off")
    figures["background_delivered_share"] = min(share, figures.get("background_delivered_share", share))
    outcome.outcomes[window.name] = dict(found.outcomes)
    told = ", ".join(f"{kind} {count}" for kind, count in found.outcomes.items())
    if found.latencies_ms:
        ordered = sorted(found.latencies_ms)
        p50, p99 = load.quantile(ordered, 0.50), load.quantile(ordered, 0.99)
        figures[f"{window.name}_p50_ms"], figures[f"{window.name}_p99_ms"] = p50, p99
        told += f", p50 {p50:.2f} ms, p99 {p99:.2f} ms"
    return told


async def _carried(
    one: _Started,
    bench: _Bench,
    outcome: PeerRound,
    kind: str,
    full: int,
    measure: Callable[[int], Awaitable[_Found]],
) -> tuple[int, _Found]:
    """Measures with ``full`` streams or, where the peer cannot carry them, with a sixteenth of them.

    Returns how many it carried and what was measured. Raises OverloadedError when it cannot carry even the sixteenth.
    """
    if kind not in one.overloaded_by:
        try:
            found = await measure(full)
        except load.OverloadedError as error:
            one.overloaded_by.add(kind)
            outcome.notes.append(f"{error}; {kind} streams measured with 1/{OVERLOAD_DIVISOR} of them")
            # What it has taken on would go on for long, at the cost of the peers that come next.
            await _serve_again(one, bench, outcome)
        else:
            await _settle(one, bench, outcome, f"{full} {kind} streams")
            return full, found
    count = max(1, full // OVERLOAD_DIVISOR)
    try:
        return count, await measure(count)
    finally:
        await _settle(one, bench, outcome, f"{count} {kind} streams")


async def _settle(one: _Started, bench: _Bench, outcome: PeerRound, what: str) -> None:
    """Waits until the upstream answers nobody, by force where need be."""
    left = await bench.upstream.settled(SETTLE_SECONDS)
    if not left:
        return
    outcome.notes.append(f"{left} upstream answers still ran {SETTLE_SECONDS:.0f} s after {what} were closed")
    await bench.upstream.break_off()
    if await bench.upstream.settled(SETTLE_SECONDS):
        await _serve_again(one, bench, outcome)


async def _serve_again(one: _Started, bench: _Bench, outcome: PeerRound) -> None:
    outcome.notes.append("started anew")
    try:
        await _serve(one, bench)
    except PeerUnavailableError as error:
        raise load.MeasurementError(f"it did not start again: {error}") from error
    await bench.upstream.break_off()


_Step = Callable[[_Started, _Bench, PeerRound], Awaitable[str]]
"""One measurement of one peer: puts its figures in the round and returns what to tell."""

_STEPS: tuple[tuple[str, _Step], ...] = (
    ("small requests, 1 connection", partial(_measure_requests, connections=1)),
    ("small requests, 32 connections", partial(_measure_requests, connections=32)),
    (f"{UNPACED_STREAMS} unpaced streams", partial(_measure_streams, paced=False)),
    (f"{PACED_STREAMS} paced streams", partial(_measure_streams, paced=True)),
    *((f"client leaves: {window.title}", partial(_measure_window, window=window)) for window in WINDOWS),
)


def _add_latency_over_direct(results: Mapping[str, PeerResult], number: int) -> None:
    """Adds ``added_p50_ms`` and ``added_p99_ms``: a peer's latency at one connection less the direct one's."""
    direct = _round_of(results.get("direct"), number)
    if direct is None:
        return
    for name, result in results.items():
        one = _round_of(result, number)
        if name == "direct" or one is None:
            continue
        for part in ("p50", "p99"):
            key = f"requests_1_{part}_ms"
            if key in one.figures and key in direct.figures:
                one.figures[f"added_{part}_ms"] = one.figures[key] - direct.figures[key]


def _round_of(result: PeerResult | None, number: int) -> PeerRound | None:
    return result.rounds[number] if result is not None and number < len(result.rounds) else None
