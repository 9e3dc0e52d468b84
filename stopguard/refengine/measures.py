"""Staged runs of one policy in virtual time, and what was measured in them.

Each stage puts an engine into one state, stops (or preempts) something, and reads the events: nothing
here looks at the policy's own data. Times are seconds, distances are boundaries (ends of steps) and
amounts are tokens and blocks. `compare` turns the measures into words.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Literal

import msgspec

from stopguard.probe import wire
from stopguard.refengine.driver import VirtualDriver
from stopguard.refengine.engine import ReferenceEngine
from stopguard.refengine.interface import (
    EngineConfig,
    NotSupported,
    RequestRejected,
    RequestSpec,
    RequestView,
    SamplingParameters,
)

__all__ = [
    "Detection",
    "Measures",
    "Preemptions",
    "Release",
    "Stop",
    "measure",
]

_CONFIG = EngineConfig(blocks=512, max_running=8, max_batch_tokens=256, prefill_chunk_tokens=128)
#: Moments, in seconds after the submission, at which the client leaves; across two periods of the slowest poll.
_LEAVING_SECONDS = (0.31, 0.77, 1.21, 2.6, 4.6)
_LONG = 600


class Stop(msgspec.Struct, frozen=True):
    """One abort: when it acted, and what became of the tokens that were computed after it was given."""

    applied: bool
    #: Ends of steps between the abort and its effect; 0 is "in the call".
    boundaries: int = 0
    seconds: float = 0.0
    #: Applied before the results of the step that had ended were processed.
    before_outputs: bool = False
    refusals: int = 0
    answer: str = ""
    tokens_emitted: int = 0
    tokens_discarded: int = 0
    tokens_stale: int = 0
    #: Of those emitted, how many came with the final output, and how many boundaries later the final output came.
    emitted_with_final: int = 0
    final_output_boundaries: int = 0
    finish_reason: str = ""
    #: The usage in the final output counts exactly the delivered tokens.
    usage_frozen: bool = False


class Release(msgspec.Struct, frozen=True):
    """How the blocks of an aborted, running request came back."""

    blocks: int
    fenced: int
    #: Ends of steps between the effect of the abort and the return of the last block.
    boundaries: int
    #: The final output went out before the blocks came back.
    after_final_output: bool
    #: Blocks that stayed in the cache; those that are not full as well, where all of them stayed.
    kept_in_cache: int


class Detection(msgspec.Struct, frozen=True):
    """When an abort reached the scheduler after the client had left at each of several moments."""

    left_seconds: tuple[float, ...]
    noticed_seconds: tuple[float, ...]

    @property
    def delays(self) -> tuple[float, ...]:
        """Seconds from leaving to noticing."""
        return tuple(noticed - left for left, noticed in zip(self.left_seconds, self.noticed_seconds, strict=True))


class Preemptions(msgspec.Struct, frozen=True):
    """What a full pool led to."""

    count: int
    #: The rules of choice that explain every victim.
    rules: tuple[str, ...]
    place: str
    #: Where victims stood in the queue, seen from when they came back: before those who had been waiting, or behind.
    goes: Literal["front", "back", ""]
    recomputed_tokens: int
    structured_finished: int
    structured_recomputed: int
    requests: int
    finished_whole: int


class Measures(msgspec.Struct, frozen=True):
    """Everything that was measured for one policy."""

    policy: str
    pipeline_depth: int
    running: Stop
    waiting: Stop
    prefill: Stop
    transfer: Stop | None
    queue_order: Literal["ahead", "in order"]
    release: Release
    detection_stream: Detection
    detection_no_stream: Detection
    detection_queued: Detection
    #: The same beside a neighbour that streams, for the first moment of leaving.
    starved_seconds: float
    preemptions: Preemptions
    #: Preempted on command: blocks in the prefix cache before and after; None where there is no such command.
    cached_around_preempt: tuple[int, int] | None


def measure(policy: str, seed: int = 0) -> Measures:
    """Run all stages for one policy."""
    engine = ReferenceEngine(_CONFIG, policy, seed=seed)
    running, release = _stop_running(policy, seed)
    return Measures(
        policy=policy,
        pipeline_depth=engine.pipeline_depth,
        running=running,
        waiting=_stop_waiting(policy, seed),
        prefill=_stop_prefill(policy, seed),
        transfer=_stop_transfer(policy, seed),
        queue_order=_queue_order(policy, seed),
        release=release,
        detection_stream=_detection(policy, seed, stream=True, queued=False),
        detection_no_stream=_detection(policy, seed, stream=False, queued=False),
        detection_queued=_detection(policy, seed, stream=True, queued=True),
        starved_seconds=_starvation(policy, seed),
        preemptions=_preemptions(policy, seed),
        cached_around_preempt=_cached_around_preempt(policy, seed),
    )


# Stops ----------------------------------------------------------------------------------------------


def _driver(policy: str, seed: int, config: EngineConfig = _CONFIG) -> VirtualDriver:
    return VirtualDriver(ReferenceEngine(config, policy, seed=seed))


def _submit(driver: VirtualDriver, name: str, prompt_tokens: int = 40, max_tokens: int = _LONG, **more: object) -> None:
    seed = sum(map(ord, name))
    prompt = tuple(300 + (seed * 31 + position * 7) % 150 for position in range(prompt_tokens))
    sampling = SamplingParameters(max_tokens=max_tokens, ignore_eos=True)
    spec = msgspec.structs.replace(RequestSpec(name, prompt, sampling), **more)
    driver.engine.submit(spec, driver.now)


def _to_the_middle_of_a_step(driver: VirtualDriver) -> None:
    """Half-way to the next event, which is the end of a step in flight."""
    ends_at = driver.engine.next_event_at(driver.now)
    if ends_at is not None:
        driver.now += (ends_at - driver.now) / 2


def _fill(driver: VirtualDriver, count: int) -> None:
    for number in range(count):
        _submit(driver, f"neighbour-{number}")
    driver.run_while(lambda: not all(driver.sequence(f"neighbour-{number}").tokens for number in range(count)))


def _abort(driver: VirtualDriver, name: str) -> Stop:
    """Abort from inside, so that no detection is in the way; then run until the request has ended."""
    at = driver.now
    frames_before = len(driver.frames)
    answer = driver.engine.abort(name, at, "inside").kind
    driver.run_while(lambda: driver.sequence(name).finish_reason is None)
    for _ in range(4):  # late output
        driver.advance()
    return _read_stop(driver, name, at, frames_before, answer)


def _read_stop(driver: VirtualDriver, name: str, at: float, frames_before: int, answer: str) -> Stop:
    frames = driver.frames[frames_before:]
    step_before = driver.frames[frames_before - 1].step if frames_before else 0
    applied_step = applied_at = finished_step = None
    before_outputs = False
    counts = {"emitted": 0, "discarded": 0, "stale": 0, "with_final": 0, "refusals": 0}
    for frame in frames:
        outputs_booked = False
        emitted_here = 0
        for event in frame.events:
            if isinstance(event, wire.TokensComputed) and event.request_id != name:
                outputs_booked = True
            if event.request_id != name:
                continue
            match event:
                case wire.AbortApplied():
                    # An effect between two steps counts from the step that had ended then.
                    applied_step = frame.step if event.at >= frame.at else step_before
                    applied_at = event.at
                    before_outputs = not outputs_booked
                case wire.AbortRefused():
                    counts["refusals"] += 1
                case wire.TokensEmitted():
                    counts["emitted"] += event.tokens
                    emitted_here += event.tokens
                case wire.TokensDropped():
                    counts["stale" if event.stale else "discarded"] += event.tokens
                case wire.Finished():
                    finished_step = frame.step
                    counts["with_final"] = emitted_here
    sequence = driver.sequence(name)
    usage = sequence.usage
    return Stop(
        applied=applied_step is not None,
        boundaries=(applied_step or 0) - step_before if applied_step is not None else 0,
        seconds=(applied_at if applied_at is not None else at) - at,
        before_outputs=before_outputs,
        refusals=counts["refusals"],
        answer=answer,
        tokens_emitted=counts["emitted"],
        tokens_discarded=counts["discarded"],
        tokens_stale=counts["stale"],
        emitted_with_final=counts["with_final"],
        final_output_boundaries=(finished_step or 0) - (applied_step or 0) if applied_step is not None else 0,
        finish_reason=sequence.finish_reason or "",
        usage_frozen=usage is not None and usage.completion_tokens == len(sequence.tokens),
    )


def _stop_running(policy: str, seed: int) -> tuple[Stop, Release]:
    driver = _driver(policy, seed)
    _fill(driver, 3)
    # Aborted in its fifth block of 16 tokens, so that whether a part of a block is kept can be seen.
    _submit(driver, "victim", prompt_tokens=64)
    driver.run_while(lambda: len(driver.sequence("victim").tokens) < 9)
    _to_the_middle_of_a_step(driver)
    before = driver.engine.gauges()
    frames_before = len(driver.frames)
    stop = _abort(driver, "victim")
    return stop, _read_release(driver, frames_before, before.blocks_cached)


def _read_release(driver: VirtualDriver, frames_before: int, cached_before: int) -> Release:
    blocks = fenced = 0
    applied_step = returned_step = driver.frames[frames_before - 1].step
    finished_first = finished = False
    cached_after = cached_before
    for frame in driver.frames[frames_before:]:
        for event in frame.events:
            if event.request_id != "victim":
                continue
            match event:
                case wire.AbortApplied():
                    applied_step = frame.step if event.at >= frame.at else applied_step
                case wire.Finished():
                    finished = True
                case wire.BlocksFenced():
                    fenced += event.blocks
                case wire.BlocksReturned():
                    blocks += event.blocks
                    returned_step = frame.step
                    finished_first = finished
                    cached_after = frame.blocks_cached_now
    return Release(blocks, fenced, returned_step - applied_step, finished_first, cached_after - cached_before)


def _stop_waiting(policy: str, seed: int) -> Stop:
    driver = _driver(policy, seed)
    _fill(driver, _CONFIG.max_running)
    _submit(driver, "victim")
    driver.run_until(driver.now + 0.05)
    _to_the_middle_of_a_step(driver)
    return _abort(driver, "victim")


def _stop_prefill(policy: str, seed: int) -> Stop:
    driver = _driver(policy, seed)
    _fill(driver, 2)
    _submit(driver, "victim", prompt_tokens=900, max_tokens=20)
    driver.run_while(lambda: not any(isinstance(event, wire.BlocksHeld) for event in driver.events("victim")))
    for _ in range(2):
        driver.advance()
    _to_the_middle_of_a_step(driver)
    return _abort(driver, "victim")


def _stop_transfer(policy: str, seed: int) -> Stop | None:
    driver = _driver(policy, seed)
    _fill(driver, 2)
    try:
        _submit(driver, "victim", prompt_tokens=100, max_tokens=20, transfer_steps=4)
    except RequestRejected:
        return None
    driver.run_while(lambda: not any(isinstance(event, wire.BlocksHeld) for event in driver.events("victim")))
    _to_the_middle_of_a_step(driver)
    return _abort(driver, "victim")


def _queue_order(policy: str, seed: int) -> Literal["ahead", "in order"]:
    """Is an abort read before commands that were posted before it?"""
    driver = _driver(policy, seed)
    _fill(driver, 2)
    _submit(driver, "victim")
    driver.run_while(lambda: not driver.sequence("victim").tokens)
    _to_the_middle_of_a_step(driver)
    for number in range(4):
        _submit(driver, f"later-{number}")
    _abort(driver, "victim")
    names: list[str] = []
    for event in driver.events():
        if isinstance(event, wire.Added) and event.request_id.startswith("later"):
            names.append(event.request_id)
        elif isinstance(event, wire.AbortArrived):
            names.append("abort")
    return "ahead" if names[0] == "abort" else "in order"


# Detection ------------------------------------------------------------------------------------------


def _detection(policy: str, seed: int, *, stream: bool, queued: bool) -> Detection:
    noticed = [_noticed(policy, seed, left, stream=stream, queued=queued) for left in _LEAVING_SECONDS]
    return Detection(_LEAVING_SECONDS, tuple(noticed))


def _noticed(
    policy: str, seed: int, left: float, *, stream: bool, queued: bool = False, neighbour_tokens: int = 0
) -> float:
    """Seconds after the submission at which the abort reached the scheduler (or the end of the request)."""
    slots = 1 if queued else 8
    config = msgspec.structs.replace(_CONFIG, max_running=slots, max_model_tokens=8192, blocks=1024)
    driver = _driver(policy, seed, config)
    if queued:
        # Whoever is ahead must not stream: only the watched request's own wait is to be seen.
        driver.engine.submit(
            RequestSpec("ahead", (300,) * 8, SamplingParameters(max_tokens=2000, ignore_eos=True), stream=False), 0.0
        )
        driver.run_until(0.0)
    started = driver.now
    if neighbour_tokens:
        _submit(driver, "neighbour", max_tokens=neighbour_tokens)
    _submit(driver, "victim", max_tokens=2000, stream=stream)
    driver.run_until(started + left)
    driver.engine.client_gone("victim", started + left)

    def pending() -> bool:
        return driver.sequence("victim").finish_reason is None and not any(
            isinstance(event, wire.AbortArrived) for frame in driver.frames[-1:] for event in frame.events
        )

    driver.run_while(pending)
    return driver.now - started


def _starvation(policy: str, seed: int) -> float:
    """The delay of a client that does not stream and leaves at the first moment, beside a neighbour that streams."""
    left = _LEAVING_SECONDS[0]
    return _noticed(policy, seed, left, stream=False, neighbour_tokens=500) - left


# Preemption -----------------------------------------------------------------------------------------


def _with(views: list[RequestView], computed: Counter[str]) -> list[RequestView]:
    """The picture from before the step, with the tokens that its results added."""
    return [
        msgspec.structs.replace(view, output_tokens=view.output_tokens + computed[view.request_id]) for view in views
    ]


_RULES: dict[str, Callable[[list[RequestView]], RequestView]] = {
    "last of the running queue": lambda running: running[-1],
    "first of the running queue": lambda running: running[0],
    "fewest output tokens, then longest prompt": lambda running: min(
        running, key=lambda view: (view.output_tokens, -view.prompt_tokens)
    ),
    "longest output first": lambda running: max(running, key=lambda view: view.output_tokens),
    "longest prompt first": lambda running: max(running, key=lambda view: view.prompt_tokens),
    "most blocks first": lambda running: max(running, key=lambda view: view.blocks_held),
}


def _preemptions(policy: str, seed: int) -> Preemptions:
    """Several seeded loads on a pool that cannot hold what it has admitted."""
    numbers = random.Random(seed)
    rules = set(_RULES)
    totals = {"count": 0, "recomputed": 0, "structured": 0, "structured_lost": 0, "requests": 0, "whole": 0}
    front = back = 0
    places: set[str] = set()
    for _ in range(6):
        run = _FullPool(policy, seed, numbers)
        rules &= run.rules
        for key, value in run.totals.items():
            totals[key] += value
        front, back = front + run.front, back + run.back
        places |= run.places
    return Preemptions(
        count=totals["count"],
        rules=tuple(rule for rule in _RULES if rule in rules) if totals["count"] else (),
        place=", ".join(sorted(places)),
        goes="" if front == back == 0 else "front" if front > back else "back",
        recomputed_tokens=totals["recomputed"],
        structured_finished=totals["structured"],
        structured_recomputed=totals["structured_lost"],
        requests=totals["requests"],
        finished_whole=totals["whole"],
    )


class _FullPool:
    """One load: requests of many shapes arrive over time; every choice of a victim is held against the rules."""

    def __init__(self, policy: str, seed: int, numbers: random.Random) -> None:
        config = EngineConfig(
            blocks=40,
            block_tokens=8,
            max_running=10,
            max_batch_tokens=64,
            prefill_chunk_tokens=32,
            max_model_tokens=200,
        )
        self.driver = driver = _driver(policy, seed, config)
        self.rules = set(_RULES)
        self.totals = {"count": 0, "recomputed": 0, "structured": 0, "structured_lost": 0, "requests": 0, "whole": 0}
        self.front = self.back = 0
        self.places: set[str] = set()
        self._structured: set[str] = set()
        self._order: list[str] = []
        self._waiting_since: dict[str, list[str]] = {}
        arrivals = sorted((numbers.uniform(0.0, 0.8), number) for number in range(16))
        for at, number in arrivals:
            while driver.engine.next_event_at(driver.now) is not None and self._advance(at):
                pass
            driver.now = max(driver.now, at)
            name = f"load-{number:02d}"
            grammar = "json" if number % 4 == 3 else ""
            if grammar:
                self._structured.add(name)
            _submit(driver, name, numbers.randint(8, 60), numbers.randint(20, 90), grammar=grammar)
        while self._advance(1e9):
            pass
        self.totals["requests"] = len(driver.sequences)
        self.totals["whole"] = sum(sequence.finish_reason == "length" for sequence in driver.sequences.values())

    def _advance(self, until: float) -> bool:
        driver = self.driver
        before = driver.engine.snapshot(driver.now).requests
        order = list(self._order)
        if not driver.advance(until):
            return False
        ended: set[str] = set()
        computed: Counter[str] = Counter()
        chosen = False
        for event in driver.frames[-1].events:
            name = event.request_id
            match event:
                case wire.TokensComputed():
                    computed[name] += event.tokens
                case wire.Finished() if event.reason != "preempted":
                    ended.add(name)
                case wire.Finished() | wire.Preempted():
                    self._victim(name, event, _with(before, computed), order, ended, first=not chosen)
                    chosen = True
                case wire.Moved(place="running"):
                    self._order.append(name)
                    self._came(name)
                case wire.Moved(place=place) if name in self._order:
                    self._order.remove(name)
                    if place != "gone":
                        self.places.add(place)
        return True

    def _victim(
        self,
        name: str,
        event: wire.Finished | wire.Preempted,
        before: list[RequestView],
        order: list[str],
        ended: set[str],
        *,
        first: bool,
    ) -> None:
        views = {view.request_id: view for view in before}
        self.totals["count"] += 1
        if isinstance(event, wire.Preempted):
            self.totals["recomputed"] += event.recompute_tokens
            self.totals["structured_lost"] += name in self._structured
            self._waiting_since[name] = [
                view.request_id for view in before if view.place == "waiting" and view.request_id not in self._order
            ]
        else:
            self.totals["structured"] += 1
        if not first:
            return  # the picture from before the step no longer holds
        running = [views[other] for other in order if other in views and other not in ended]
        if name in order:
            self.rules = {rule for rule in self.rules if _RULES[rule](running).request_id == name}

    def _came(self, name: str) -> None:
        """Somebody runs (again): did victims come back before those who had been waiting when they lost their room?"""
        waited = self._waiting_since.pop(name, None)
        if waited:
            overtaken = any(other not in self._seen_running() for other in waited)
            self.front += overtaken
            self.back += not overtaken

    def _seen_running(self) -> set[str]:
        return {
            event.request_id
            for event in self.driver.events()
            if isinstance(event, wire.Moved) and event.place in {"running", "gone"}
        }


def _cached_around_preempt(policy: str, seed: int) -> tuple[int, int] | None:
    """Does a preemption leave the prefixes in the cache that others may want?"""
    driver = _driver(policy, seed)
    _submit(driver, "earlier", prompt_tokens=100, max_tokens=4)
    driver.run()
    _submit(driver, "victim", prompt_tokens=64)
    driver.run_while(lambda: len(driver.sequence("victim").tokens) < 5)
    before = driver.engine.gauges().blocks_cached
    try:
        driver.engine.preempt("victim", driver.now)
    except NotSupported:
        return None
    driver.run_while(lambda: not any(isinstance(event, wire.Preempted) for event in driver.events("victim")))
    for _ in range(2):  # fences
        driver.advance()
    return before, driver.engine.gauges().blocks_cached
