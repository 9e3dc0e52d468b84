"""Probes at a gateway that does not listen: whose they are, what they are worth, and what they say into the books."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from stopguard.admin.live import LiveView
from stopguard.admin.view import StopWanted
from stopguard.engines import OpenAIEngine
from stopguard.gateway.inside_way import InsideWay
from stopguard.gateway.probing import ProbeSettings, Probing
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings
from stopguard.ledger import BookLimits, Evidence, Ledger
from stopguard.ledger.book import Book
from stopguard.preemption.ways import Exactness, Gone, Parked, Refused, Running
from stopguard.probe import wire
from stopguard.stops import DoorKind, Engine, Semantics, Source, StopCause, Tracked, preemptions
from tests.unit.probe.rig import TOKEN, RawProbe, snapshot

pytestmark = pytest.mark.anyio


class Scene:
    """A gateway, its probing, and the kinds of its engines. `heard` is set whenever a frame was booked."""

    def __init__(self, kinds: dict[str, str], *, bystander: bool = False, limits: BookLimits | None = None) -> None:
        engines = [(OpenAIEngine(name, "http://127.0.0.1:1"), EngineSettings()) for name in kinds]
        self.gateway = Gateway(engines, book=Book(limits))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        settings = ProbeSettings(listen=(self.address,), token=TOKEN, gone_seconds=0.01)
        self.lags: list[float | None] = []
        self.probing = Probing(
            self.gateway, settings, kinds, bystander=bystander, on_frame=lambda name, one, lag: self.lags.append(lag)
        )
        self.member = self.gateway.fleet.members[0]

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Let the loop turn until `condition` holds: everything here happens in it."""
        async with asyncio.timeout(10):
            while not (found := condition()):  # noqa: ASYNC110 (no event stands for every condition)
                await asyncio.sleep(0)
        return found

    async def probe(self, instance: str = "i1", *, first: int = 0, **hello: Any) -> RawProbe:
        """A probe that is connected, and whose first snapshot has come."""
        hello.setdefault("engine", "kind0")
        hello.setdefault("commands", ("abort", "snapshot", "preempt", "resume"))
        probe = await RawProbe.attached(self.address, instance, **hello)
        source = await self.until(
            lambda: next((each for each in self.probing.collector.sources if each.hello.instance == instance), None)
        )
        if source.keeps_books:
            command = await probe.hear(wire.Command)
            probe.say(snapshot(command.command_id, first))
            await self.until(lambda: source.gap_since is None)
        return probe

    async def say(self, probe: RawProbe, number: int, *events: wire.Event, **totals: int) -> None:
        sources = self.probing.collector.sources
        numbers = {"running_now": 0, "waiting_now": 0, "blocks_free_now": 8, "blocks_cached_now": 0, **totals}
        probe.say(wire.Frame(number, number, monotonic(), list(events), *numbers.values()))
        await self.until(lambda: any(source.frame and source.frame.sequence == number for source in sources))

    def dispatched(self, name: str = "sg-1") -> Tracked:
        controller, at = self.gateway.controller, monotonic()
        tracked = controller.admit(name, at, model="m")
        controller.dispatch(tracked, at, self.member.profile)
        return tracked


@asynccontextmanager
async def scene(**kinds: str) -> AsyncIterator[Scene]:
    one = Scene(kinds or {"e0": "kind0"})
    await one.probing.start()
    try:
        yield one
    finally:
        await one.probing.close()


@asynccontextmanager
async def watching(limits: BookLimits | None = None) -> AsyncIterator[Scene]:
    one = Scene({"e0": "kind0"}, bystander=True, limits=limits)
    await one.probing.start()
    try:
        yield one
    finally:
        await one.probing.close()


# ---- whose it is, and what it is worth --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "hello", "engine"),
    [
        ({"a": "x", "b": "y"}, {"engine": "y"}, "b"),
        ({"a": "x", "b": "x"}, {"engine": "x", "name": "b"}, "b"),
        ({"a": "openai"}, {"engine": "x"}, "a"),
        ({"a": "x", "b": "x"}, {"engine": "x"}, None),
        ({"a": "x", "b": "y"}, {"engine": "z"}, None),
        ({"a": "x"}, {"engine": "x", "name": "other"}, None),
    ],
)
async def test_which_engine_it_speaks_for(kinds: dict[str, str], hello: dict[str, str], engine: str | None) -> None:
    async with scene(**kinds) as one:
        found, reason = one.probing._member_for(wire.Hello(b"", hello["engine"], "1", "i", hello.get("name", "")))
        assert (found.engine.name if found else None) == engine
        if engine is None:
            assert "STOPGUARD_ENGINE_NAME" in reason


async def test_one_that_speaks_for_nobody_is_told_so() -> None:
    async with scene(a="x", b="x") as one:
        probe = await RawProbe.connect(one.address)
        nonce = b"n" * wire.NONCE_BYTES
        probe.say(wire.Greeting(wire.SCHEMA_VERSION, nonce))
        challenge = await probe.hear(wire.Challenge)
        probe.say(wire.Hello(wire.engine_proof(TOKEN, nonce, challenge.nonce), "x", "1", "i"))
        refused = await probe.hear(wire.Refused)
        assert "set STOPGUARD_ENGINE_NAME" in refused.detail
        await probe.close()
        assert not one.probing.collector.sources


async def test_the_profile_is_worth_more_while_it_is_there() -> None:
    async with scene() as one:
        member = one.member
        before = member.profile
        probe = await one.probe()
        await one.until(lambda: member.profile.probed)
        profile = member.profile
        assert profile.best_evidence is Evidence.PROBE
        assert [door.kind for door in profile.doors] == [DoorKind.PROBE, *(door.kind for door in before.doors)]
        assert profile.closes_first == before.closes_first, "the wire is told at once, as without a probe"
        assert member.parent_profile.probed
        assert not member.unnamed_profile.probed, "of a request without our id a probe cannot speak"
        member.take_profile()  # the adapter has asked its engine again
        assert member.profile.probed
        await probe.close()
        await one.until(lambda: not member.profile.probed)
        assert member.profile == before


async def test_half_of_an_engine_proves_nothing() -> None:
    async with scene() as one:
        left = await one.probe("left", rank=0, ranks=2)
        front = await one.probe("front", role="api", commands=("abort",))
        assert not one.member.profile.probed
        right = await one.probe("right", rank=1, ranks=2)
        await one.until(lambda: one.member.profile.probed)
        await right.close()
        await one.until(lambda: not one.member.profile.probed)
        for probe in (left, front):
            await probe.close()


async def test_one_that_cannot_abort_is_no_door() -> None:
    async with scene() as one:
        probe = await one.probe(commands=("snapshot",))
        await one.until(lambda: one.member.profile.probed)
        assert all(door.kind is not DoorKind.PROBE for door in one.member.profile.doors)
        await probe.close()


# ---- what it says -------------------------------------------------------------------------------------------


async def _running(one: Scene, probe: RawProbe) -> Tracked:
    await one.until(lambda: one.member.profile.probed)
    tracked = one.dispatched()
    events = (wire.Added("sg-1", 1.0, 7), wire.Moved("sg-1", 1.0, "running"), wire.BlocksHeld("sg-1", 1.0, 4))
    await one.say(probe, 1, *events, running_now=1, blocks_free_now=4)
    return tracked


async def _ordered_to_stop(one: Scene, probe: RawProbe, tracked: Tracked) -> wire.Command:
    """What its engine is told when somebody stops the request."""
    cause = StopCause(semantics=Semantics.CANCEL, source=Source.API, reason="api", observed_at=monotonic())
    one.gateway.stop(tracked, cause)
    command: wire.Command = await probe.hear(wire.Command)
    return command


async def test_a_stop_goes_through_it_and_is_proved_by_it() -> None:
    async with scene() as one:
        probe = await one.probe()
        tracked = await _running(one, probe)
        command = await _ordered_to_stop(one, probe, tracked)
        assert (command.action, command.request_id, command.reason) == ("abort", "sg-1", "api")
        probe.say(wire.CommandAnswer(command.command_id, "accepted"))
        gone = (wire.BlocksReturned("sg-1", 1.0, 4), wire.Moved("sg-1", 1.0, "gone"))
        await one.say(probe, 2, wire.AbortApplied("sg-1", 1.0), *gone)
        stop = tracked.ledgers.stop
        assert stop is not None
        assert (stop.outcome, stop.evidence) == ("confirmed", Evidence.PROBE)
        assert tracked.ledgers.describe(Ledger.KV) == "kv: empty"
        assert len(one.lags) == 2
        one.gateway.controller.client_told(tracked, monotonic())
        await probe.close()


class Wakes:
    """When a gateway that does not listen would look at its timers, without the probing's own look twice a second."""

    def __init__(self, one: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[float] = []
        self._gateway = one.gateway
        monkeypatch.setattr(one.gateway, "wake_at", self.at.append)
        assert one.probing._look_timer is not None
        one.probing._look_timer.cancel()

    def in_time(self) -> bool:
        """Whether it would before the first of them is due."""
        due_at = self._gateway.controller.next_due()
        assert due_at is not None
        return min(self.at, default=float("inf")) <= due_at


async def test_an_answer_that_only_sets_a_timer_has_somebody_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused abort wants nothing at once, and another one later: a gateway that sleeps would forget it."""
    async with scene() as one:
        probe = await one.probe()
        tracked = await _running(one, probe)
        command = await _ordered_to_stop(one, probe, tracked)
        wakes = Wakes(one, monkeypatch)
        probe.say(wire.CommandAnswer(command.command_id, "refused", 0.2))
        await one.until(lambda: any("refused" in text for _, text in tracked.ledgers.marks))
        assert wakes.in_time()
        at = one.gateway.controller.next_due()
        assert at is not None
        one.gateway.carry_out(one.gateway.controller.advance(at + 0.01), at + 0.01)
        again = await probe.hear(wire.Command)
        assert (again.action, again.request_id) == ("abort", "sg-1")
        await probe.close()


async def test_a_frame_that_only_sets_a_timer_has_somebody_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene() as one:
        probe = await one.probe()
        await _running(one, probe)
        wakes = Wakes(one, monkeypatch)
        await one.say(probe, 2, wire.Finished("sg-1", 1.0, "stop"), _gone("sg-1"))
        assert one.gateway.controller.next_due() is not None, "its blocks are not back: that has a deadline"
        assert wakes.in_time()
        await probe.close()


async def test_an_end_of_which_no_scheduler_has_spoken_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its front end refused it: nothing of it will be heard, and no frame will wake anybody."""
    async with scene() as one:
        probe = await one.probe()
        await one.until(lambda: one.member.profile.probed)
        tracked, controller = one.dispatched(), one.gateway.controller
        controller.engine_finished(tracked, monotonic())
        assert controller.next_due() is not None
        wakes = Wakes(one, monkeypatch)
        one.probing._look()
        assert wakes.in_time()
        command = await probe.hear(wire.Command)
        assert command.action == "snapshot"
        await probe.close()


async def test_what_it_had_and_is_over_is_an_ack() -> None:
    async with scene() as one:
        probe = await one.probe()
        tracked = await _running(one, probe)
        command = await _ordered_to_stop(one, probe, tracked)
        probe.say(wire.CommandAnswer(command.command_id, "gone"))
        await one.until(lambda: tracked.machine.engine is Engine.STOPPED)
        await probe.close()


async def test_another_clock_is_read_in_our_time() -> None:
    async with scene() as one:
        probe = await one.probe()
        source = next(iter(one.probing.collector.sources))
        source.link.clock.add(0.0, 1000.0, 1000.0, 0.0001)
        tracked = await _running(one, probe)
        await one.say(probe, 2, wire.Moved("sg-1", monotonic() + 1000.0 - 0.25, "preempted"))
        entry = next(entry for entry in tracked.ledgers.entries if entry.credit.label == "preempted")
        assert entry.occurred_at is not None
        assert entry.at - entry.occurred_at == pytest.approx(0.25, abs=0.2)
        await probe.close()


async def test_requests_that_were_there_before_it_are_left_to_what_they_had() -> None:
    async with scene() as one:
        tracked = one.dispatched()
        probe = await one.probe()
        await one.say(probe, 1, wire.Added("sg-1", 1.0, 7), wire.TokensComputed("sg-1", 1.0, 3))
        assert tracked.part_places is None
        assert tracked.ledgers.tokens_computed == 0
        await probe.close()


async def test_nothing_is_kept_of_a_request_that_is_settled() -> None:
    async with scene() as one:
        probe = await one.probe()
        tracked = await _running(one, probe)
        assert one.probing._homes
        over = (
            wire.Finished("sg-1", 1.0, "stop"),
            wire.BlocksReturned("sg-1", 1.0, 4),
            wire.Moved("sg-1", 1.0, "gone"),
        )
        await one.say(probe, 2, *over)
        at = monotonic()
        one.gateway.carry_out(one.gateway.controller.client_served(tracked, at), at)
        assert not one.probing._homes
        await probe.close()


# ---- compared ------------------------------------------------------------------------------------------------


async def test_orphans_and_phantoms_are_named() -> None:
    async with scene() as one:
        view = LiveView(one.gateway, None, asyncio.get_running_loop())
        probe = await one.probe()
        await _running(one, probe)
        agreed = view.reconcile_inside("e0")
        assert agreed is not None
        assert agreed.agrees
        # The engine has another request, with two blocks, and does not have ours.
        source = next(iter(one.probing.collector.sources))
        one.probing.want_names("e0")
        command = await probe.hear(wire.Command)
        stranger = wire.RequestNow("stranger", "running", blocks_held=2)
        probe.say(wire.Snapshot(command.command_id, 1, 1, 1.0, [stranger], 1, 0, 2, 0))
        await one.until(lambda: source.named == frozenset({"stranger"}))
        compared = view.reconcile_inside("e0")
        assert compared is not None
        queue, blocks, _ = compared.differences
        assert (queue.orphan_ids, queue.phantom_ids) == (("stranger",), ("sg-1",))
        assert (blocks.expected, blocks.reported, blocks.orphans) == (4, 6, 2)
        assert one.gateway.controller.tracked["sg-1"].part_places, "named, and not touched: there was no gap"
        await probe.close()


async def test_no_comparison_without_all_of_it() -> None:
    async with scene() as one:
        view = LiveView(one.gateway, None, asyncio.get_running_loop())
        assert view.reconcile_inside("e0") is None
        one.dispatched()
        probe = await one.probe()
        await one.until(lambda: one.member.profile.probed)
        assert view.reconcile_inside("e0") is None, "one was there before the probe: its totals have it"
        await probe.close()


# ---- preemption inside ------------------------------------------------------------------------------------------


async def _preempt(one: Scene, tracked: Tracked) -> asyncio.Task[Any]:
    at = monotonic()
    cause = StopCause(semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="urgent", observed_at=at)
    preemptions.preempt(one.gateway.controller, tracked, at, cause)
    return asyncio.create_task(InsideWay(one.gateway).preempt(tracked))


async def test_preempted_and_resumed_inside() -> None:
    async with scene() as one:
        probe = await one.probe()
        tracked = await _running(one, probe)
        way = InsideWay(one.gateway)
        assert way.can(tracked).exactness is Exactness.EXACT
        going = await _preempt(one, tracked)
        command = await probe.hear(wire.Command)
        assert (command.action, command.request_id) == ("preempt", "sg-1")
        probe.say(wire.CommandAnswer(command.command_id, "accepted"))
        away = (wire.Preempted("sg-1", 1.0, 9), wire.Moved("sg-1", 1.0, "paused"), wire.BlocksReturned("sg-1", 1.0, 4))
        await one.say(probe, 2, *away)
        assert await going == Parked(9)
        preemptions.resume(one.gateway.controller, tracked, monotonic())
        coming = asyncio.create_task(way.resume(tracked))
        command = await probe.hear(wire.Command)
        assert command.action == "resume"
        probe.say(wire.CommandAnswer(command.command_id, "applied"))
        await one.say(probe, 3, wire.Resumed("sg-1", 1.0), wire.Moved("sg-1", 1.0, "running"))
        assert await coming == Running()
        await probe.close()


@pytest.mark.parametrize(("answer", "outcome"), [("unknown", Gone()), ("refused", Refused("refused", 0.5))])
async def test_not_preempted_inside(answer: wire.Answer, outcome: object) -> None:
    async with scene() as one:
        probe = await one.probe()
        tracked = await _running(one, probe)
        going = await _preempt(one, tracked)
        command = await probe.hear(wire.Command)
        probe.say(wire.CommandAnswer(command.command_id, answer, 0.5))
        assert await going == outcome
        await probe.close()


async def test_nothing_can_be_preempted_inside_without_a_probe() -> None:
    async with scene() as one:
        tracked = one.dispatched()
        assert InsideWay(one.gateway).can(tracked).reason == "no_probe"
        assert (await one.probing.order("e0", "preempt", "sg-1")).answer == "unsupported"


# ---- out of the path -------------------------------------------------------------------------------------------


async def test_books_are_opened_and_stopped_by_what_the_scheduler_says() -> None:
    async with watching() as one:
        probe = await one.probe()
        await one.until(lambda: one.member.profile.probed)
        events = (wire.Added("a", 1.0, 7), wire.Added("child", 1.0, 7, "b"), wire.Added("x" * 300, 1.0, 7))
        await one.say(probe, 1, *events, wire.BlocksHeld("a", 1.0, 2))
        assert set(one.gateway.controller.tracked) == {"a", "b"}
        tracked = one.gateway.controller.tracked["a"]
        await one.say(probe, 2, wire.AbortArrived("a", 1.0))
        assert tracked.ledgers.stop is not None
        gone = (wire.BlocksReturned("a", 1.0, 2), wire.Moved("a", 1.0, "gone"))
        await one.say(probe, 3, wire.AbortApplied("a", 1.0), *gone)
        assert tracked.ledgers.stop.outcome == "confirmed"
        assert tracked.ledgers.closed_at is not None
        assert set(one.gateway.controller.tracked) == {"b"}
        assert not one.probing._seen
        await probe.close()


async def test_requests_that_were_there_before_are_taken_in_by_the_snapshot() -> None:
    async with watching() as one:
        probe = await RawProbe.attached(one.address, engine="kind0")
        command = await probe.hear(wire.Command)
        row = wire.RequestNow("a", "running", blocks_held=3, tokens_computed=5, tokens_emitted=5, tokens_dropped=0)
        over = wire.RequestNow("b", "gone", blocks_held=1)  # a leak of before our time: nothing more will be said of it
        probe.say(snapshot(command.command_id, 17, over, row))
        tracked = await one.until(lambda: one.gateway.controller.tracked.get("a"))
        tracked.ledgers.fold(monotonic())
        assert "held 3" in tracked.ledgers.describe(Ledger.KV)
        assert "delivered 5" in tracked.ledgers.describe(Ledger.OUTPUT)
        assert one.gateway.book.find("b") is None
        await one.say(probe, 18, wire.Finished("a", 1.0, "stop"), wire.BlocksReturned("a", 1.0, 3), _gone("a"))
        assert tracked.ledgers.closed_at is not None
        await probe.close()


@pytest.mark.parametrize("wanted", [{"ids": ("a",)}, {"everything": True}, {"engine": "e0"}])
async def test_what_is_only_watched_can_be_stopped_by_the_admin(wanted: dict[str, Any]) -> None:
    async with watching() as one:
        probe = await one.probe()
        await one.until(lambda: one.member.profile.probed)
        await one.say(probe, 1, wire.Added("a", 1.0, 7))
        view = LiveView(one.gateway, None, asyncio.get_running_loop())
        assert [(taken.request_id, taken.result) for taken in await view.stop(StopWanted(**wanted))] == [
            ("a", "stopping")
        ]
        command = await probe.hear(wire.Command)
        assert (command.action, command.request_id) == ("abort", "a")
        assert (await view.stop(StopWanted(ids=("b",))))[0].result == "unknown"
        assert not await view.stop(StopWanted(engine="other"))
        await probe.close()


async def test_a_full_book_turns_requests_away_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with watching(BookLimits(open_requests=1)) as one:
        probe = await one.probe()
        await one.until(lambda: one.member.profile.probed)
        await one.say(probe, 1, *(wire.Added(name, 1.0, 7) for name in "abc"))
        assert set(one.gateway.controller.tracked) == {"a"}
        assert one.probing.turned_away == 2
        assert caplog.text.count("requests are not watched") == 1
        await probe.close()


async def test_when_the_probe_stays_away_nothing_stays_open() -> None:
    async with watching() as one:
        probe = await one.probe()
        await one.until(lambda: one.member.profile.probed)
        await one.say(probe, 1, wire.Added("a", 1.0, 7))
        await probe.close()
        await one.until(lambda: not one.gateway.controller.tracked)
        found = one.gateway.book.find("a")
        assert found is not None
        assert found.stop is not None
        assert found.stop.reason == "probe_lost"


def _gone(name: str) -> wire.Event:
    return wire.Moved(name, 1.0, "gone")
