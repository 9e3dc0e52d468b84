"""A stop from its first event to the settled book, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from stopguard.errors import BookkeepingError, LimitReached
from stopguard.ledger import BookLimits, Evidence, Ledger, TimeWentBackwards
from stopguard.stops import (
    AbortAnswer,
    ClientPolicy,
    DeadlineKind,
    EngineProfile,
    IllegalTransition,
    Semantics,
    Source,
)
from tests.unit.ledger.complete_state import state_of_book
from tests.unit.stops.scene import (
    ALL_PROFILES,
    GAUGED,
    PROBED,
    SILENT,
    STREAM,
    Scene,
    finished,
    stopped,
)


class TestTheNormalLife:
    def test_without_a_probe(self) -> None:
        scene = Scene()
        tracked = scene.admitted()
        ledgers = tracked.ledgers
        assert repr(ledgers) == (
            "<r1 queue: admission 1 places | kv: empty | output: empty | link: empty | stream: connected 1 connections>"
        )
        scene.controller.dispatch(tracked, scene.at, STREAM)
        assert ledgers.describe(Ledger.QUEUE) == "queue: waiting 1 places"
        assert ledgers.describe(Ledger.KV) == "kv: claimed 1 claims"
        scene.controller.output_started(tracked, scene.at)
        assert ledgers.describe(Ledger.QUEUE) == "queue: running 1 places"
        tracked.events += 5
        assert scene.said(scene.controller.engine_finished(tracked, scene.at)) == []
        assert repr(ledgers) == (
            "<r1 queue: gone 1 places | kv: empty | output: delivered 5 tokens | link: empty | "
            "stream: connected 1 connections>"
        )
        assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]
        assert scene.empty()
        assert ledgers.stop is None
        assert repr(scene.book).endswith("settled 1 written off 0 leaks 0>")

    def test_with_a_probe(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        assert repr(tracked.ledgers) == (
            "<r1 queue: running 1 places | kv: claimed 1 claims, held 4 blocks | output: empty | link: empty | "
            "stream: connected 1 connections>"
        )
        assert scene.frame(*finished()) == []
        assert tracked.ledgers.describe(Ledger.KV) == "kv: empty"
        assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]
        assert scene.empty()

    def test_the_order_of_finish_and_release_does_not_matter(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        finish, gone, returned = finished()
        assert scene.frame(returned) == []
        assert scene.frame(gone) == []
        assert scene.frame(finish) == []
        assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]


class TestACancel:
    def test_probed_step_by_step(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        assert scene.leave(tracked) == ["stop began r1", "knock 1 at probe for r1"]
        assert repr(tracked) == "<Tracked r1 <Machine client=LEFT engine=ABORTING books=SETTLING>>"
        assert repr(tracked.ledgers) == (
            "<r1 queue: running 1 places (1 due) | kv: claimed 1 claims, held 4 blocks (1 due, 4 due) | "
            "output: empty | link: awaiting 1 notices (1 due) | stream: closed 1 connections>"
        )
        scene.at += 0.05
        arrived, applied, gone, returned = stopped()
        assert scene.frame(arrived, applied) == []
        assert tracked.ledgers.describe(Ledger.LINK) == "link: acknowledged 1 notices"
        assert scene.frame(gone) == []
        assert scene.frame(returned) == ["settled r1"]
        stop = tracked.ledgers.stop
        assert stop is not None
        assert (stop.outcome, stop.evidence, stop.attempts) == ("confirmed", Evidence.PROBE, 1)
        assert (stop.observed_at, stop.notified_at, stop.acked_at, stop.released_at, stop.settled_at) == (
            *(100.0, 100.0, 100.05, 100.05, 100.05),
        )
        assert scene.empty()

    def test_before_the_dispatch(self) -> None:
        scene = Scene()
        tracked = scene.admitted()
        assert scene.leave(tracked) == ["stop began r1", "settled r1"]
        assert repr(tracked.ledgers) == (
            "<r1 queue: gone 1 places | kv: empty | output: empty | link: empty | stream: closed 1 connections>"
        )
        with pytest.raises(IllegalTransition, match="DISPATCHED is impossible"):
            scene.controller.dispatch(tracked, scene.at, STREAM)

    def test_by_the_api_the_client_is_told_whether_a_retry_is_safe(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        assert scene.stop(tracked) == ["stop began r1", "knock 1 at probe for r1"]
        assert scene.frame(*stopped()) == ["tell r1 api: safe; reason=confirmed stopped (probe)"]
        assert scene.said(scene.controller.client_told(tracked, scene.at)) == ["settled r1"]

    def test_a_client_does_not_wait_for_ever_to_be_told(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.stop(tracked)
        assert "tell r1 api: unsafe; reason=not confirmed stopped" in scene.step(101.0)
        scene.said(scene.controller.client_told(tracked, scene.at))
        assert scene.frame(*stopped()) == ["settled r1"]  # told once

    def test_a_drained_request_finishes_for_nobody(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        tracked.events += 2
        assert scene.leave(tracked, policy=ClientPolicy(None)) == []
        tracked.events += 3
        assert scene.step(1000.0) == []
        assert scene.said(scene.controller.engine_finished(tracked, scene.at)) == ["settled r1"]
        assert tracked.ledgers.describe(Ledger.OUTPUT) == "output: delivered 2 tokens, discarded 3 tokens"

    def test_grace_ends(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.leave(tracked, policy=ClientPolicy(3.0))
        assert scene.step(102.9) == []
        assert scene.step(103.1) == ["stop began r1", "knock 1 at call for r1"]
        assert tracked.ledgers.stop is not None
        assert tracked.ledgers.stop.reason == "grace_ended"

    def test_draining_what_was_never_dispatched_is_a_cancel(self) -> None:
        scene = Scene()
        tracked = scene.admitted()
        assert scene.leave(tracked, policy=ClientPolicy(None)) == ["stop began r1", "settled r1"]

    @pytest.mark.parametrize("kind", list(DeadlineKind))
    def test_by_deadline(self, kind: DeadlineKind) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.controller.set_deadline(tracked, kind, 107.0)
        assert scene.step(106.9) == []
        assert scene.step(107.1) == ["stop began r1", "knock 1 at call for r1"]
        assert tracked.cause is not None
        assert (tracked.cause.source, tracked.cause.reason) == (Source.DEADLINE, f"{kind.value}_deadline")

    def test_an_idle_deadline_moves_with_the_output(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.controller.set_deadline(tracked, DeadlineKind.IDLE, 105.0)
        tracked.last_activity_at = 104.0
        assert scene.step(108.9) == []
        assert scene.step(109.1) == ["stop began r1", "knock 1 at call for r1"]

    def test_a_cleared_deadline_does_nothing(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.controller.set_deadline(tracked, DeadlineKind.TOTAL, 105.0)
        scene.controller.clear_deadline(tracked, DeadlineKind.TOTAL)
        assert scene.step(200.0) == []
        assert scene.controller.next_due() is None


class TestEvidence:
    def test_accepted_is_no_ack(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.leave(tracked)
        assert scene.said(scene.controller.abort_answered(tracked, scene.at, "call", AbortAnswer.ACCEPTED)) == []
        assert tracked.ledgers.stop is not None
        assert (tracked.ledgers.stop.outcome, tracked.ledgers.stop.evidence) == ("pending", Evidence.ACCEPTED)

    def test_the_engine_ends_the_stream(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.leave(tracked)
        assert scene.said(scene.controller.stream_ended_by_engine(tracked, scene.at)) == ["settled r1"]
        assert tracked.ledgers.stop is not None
        assert (tracked.ledgers.stop.outcome, tracked.ledgers.stop.evidence) == ("confirmed", Evidence.STREAM_CLOSED)

    def test_of_a_probed_engine_the_end_of_the_stream_is_not_enough(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        assert scene.said(scene.controller.stream_ended_by_engine(tracked, scene.at)) == []
        assert tracked.ledgers.stop is not None
        assert tracked.ledgers.stop.outcome == "pending"

    def test_gone_is_worth_what_its_door_is_worth(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.leave(tracked)
        assert scene.said(scene.controller.abort_answered(tracked, scene.at, "call", AbortAnswer.GONE)) == [
            "settled r1"
        ]

    def test_where_nothing_can_be_proved_every_door_is_knocked_on_and_the_end_is_unconfirmed(self) -> None:
        scene = Scene()
        tracked = scene.running(SILENT)
        assert scene.leave(tracked) == ["stop began r1", "knock 1 at call for r1"]
        answered = scene.controller.abort_answered
        assert scene.said(answered(tracked, scene.at, "call", AbortAnswer.ACCEPTED)) == ["knock 2 at close for r1"]
        assert scene.said(answered(tracked, scene.at, "close", AbortAnswer.SENT)) == ["settled r1"]
        assert tracked.ledgers.stop is not None
        assert tracked.ledgers.stop.outcome == "unconfirmed"
        assert repr(tracked.ledgers) == (
            "<r1 queue: written_off 1 places | kv: claims_written_off 1 claims | output: empty | "
            "link: written_off 1 notices | stream: closed 1 connections>"
        )
        assert repr(scene.book).endswith("settled 0 written off 1 leaks 0>")

    def test_a_better_word_replaces_unconfirmed(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        scene.step(115.0)
        assert tracked.ledgers.stop is not None
        assert tracked.ledgers.stop.outcome == "unconfirmed"
        assert scene.frame(*stopped()) == ["settled r1"]
        assert tracked.ledgers.stop.outcome == "confirmed"


class TestFailures:
    def test_the_stream_breaks(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        tracked.events += 2
        words = scene.said(scene.controller.engine_lost(tracked, scene.at, "reset"))
        assert words == ["stop began r1", "tell r1 reset: unsafe; reason=the engine was lost and may have been working"]
        assert scene.said(scene.controller.client_told(tracked, scene.at)) == ["settled r1"]
        assert tracked.ledgers.stop is not None
        assert (tracked.ledgers.stop.semantics, tracked.ledgers.stop.outcome) == ("fail", "failed")

    def test_somebody_else_stops_it_at_the_engine(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        assert scene.frame(*stopped()) == [
            "stop began r1",
            "tell r1 aborted: safe; reason=confirmed stopped (probe)",
        ]
        assert scene.said(scene.controller.client_told(tracked, scene.at)) == ["settled r1"]

    def test_a_gateway_that_shuts_down_after_the_finish(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.controller.engine_finished(tracked, scene.at)
        assert scene.stop(tracked) == []  # finished beats stopped
        assert scene.stop(tracked, "shutdown", Semantics.FAIL, Source.GATEWAY) == [
            "stop began r1",
            "tell r1 shutdown: unsafe; reason=it finished",
        ]


class TestWhatDoesNotSettle:
    def test_a_leak_with_a_name_an_age_and_a_size(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        arrived, applied, gone, _ = stopped()
        scene.frame(arrived, applied, gone)
        assert scene.step(110.1) == ["leaked r1 kv.held 4"]
        assert tracked.ledgers.describe(Ledger.KV) == "kv: held 4 blocks (4 OVERDUE)"
        assert (tracked.ledgers.leaks or [])[0].describe(110.0) == (
            "kv.held 4 blocks of r1 (probed, m), open for 10.000 s since entry 5 (kv: pool → held 4 blocks (probe))"
        )
        assert repr(scene.book).startswith("<Book open 1 (queue=0 kv=1 output=0 link=0 stream=0) overdue 1")

    def test_closing_late_is_recorded_as_late(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        *said, returned = stopped()
        scene.frame(*said)
        scene.step(120.0)
        assert scene.frame(returned) == ["settled r1"]
        assert [entry.state.name for entry in tracked.ledgers.entries][-1] == "LATE"
        assert scene.book.statistics().closed_late == 1
        assert scene.empty()

    def test_after_a_long_time_it_is_given_up_on(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        words = scene.step(1000.0)
        assert words[-1] == "settled r1"
        assert sum(word.startswith("leaked") for word in words) == 4
        assert tracked.ledgers.written_off
        assert scene.empty()
        assert repr(scene.book).endswith("overdue 0 settled 0 written off 1 leaks 4>")

    def test_when_too_many_are_overdue_the_oldest_makes_room(self) -> None:
        scene = Scene(BookLimits(overdue=2))
        for number in range(4):
            scene.at = 100.0 + number
            scene.leave(scene.running(STREAM, f"r{number}"))
        words = scene.step(113.5)
        assert [word for word in words if word.startswith("settled")] == ["settled r0", "settled r1"]
        assert len(scene.book.overdue()) == 2
        assert [error.request_id for error in scene.controller.anomalies.book_errors] == ["r0", "r1"]
        assert "written off early: 2 requests are overdue" in scene.controller.anomalies.book_errors[0].text
        scene.step(1000.0)
        assert scene.empty()

    def test_one_timer_that_fails_does_not_take_the_others_along(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scene = Scene()
        broken, whole = scene.running(STREAM, "r1"), scene.running(STREAM, "r2")
        scene.leave(broken)
        scene.leave(whole)
        honest = scene.book.expire

        def expire(ledgers: object, at: float) -> object:
            if ledgers is broken.ledgers:
                raise LimitReached("something", 1, "wait")
            return honest(ledgers, at)  # type: ignore[arg-type]

        monkeypatch.setattr(scene.book, "expire", expire)
        assert "leaked r2 kv.claimed 1" in scene.step(111.0)
        assert scene.controller.anomalies.book_errors[0].text == (
            "its settle timer failed: something reached (1): wait"
        )
        scene.step(1000.0)
        assert scene.empty()


class TestWhatIsRefusedChangesNothing:
    @pytest.mark.parametrize("at", [99.0, math.nan, math.inf])
    def test_time_that_goes_backwards_or_nowhere(self, at: float) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        tracked.events += 1
        before, machine = state_of_book(scene.book), repr(tracked.machine)
        controller = scene.controller
        calls: list[Callable[[], object]] = [
            lambda: controller.client_left(tracked, at, "eof"),
            lambda: controller.engine_finished(tracked, at),
            lambda: controller.engine_lost(tracked, at, "reset"),
            lambda: controller.client_told(tracked, at),
            lambda: controller.client_served(tracked, at),
            lambda: controller.acknowledged(tracked, at, Evidence.PROBE),
            lambda: controller.abort_answered(tracked, at, "call", AbortAnswer.SENT),
            lambda: controller.dispatch(tracked, at, STREAM),
            lambda: controller.advance(at),
        ]
        for call in calls:
            with pytest.raises(TimeWentBackwards):
                call()
            assert (state_of_book(scene.book), repr(tracked.machine)) == (before, machine)

    def test_a_door_that_the_engine_does_not_have(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.leave(tracked)
        before = state_of_book(scene.book)
        with pytest.raises(BookkeepingError, match="has no door 'window'"):
            scene.controller.abort_answered(tracked, scene.at, "window", AbortAnswer.ACCEPTED)
        assert state_of_book(scene.book) == before

    def test_a_dispatch_beyond_the_limit_of_engines(self) -> None:
        scene = Scene(BookLimits(engine_models=1))
        tracked = scene.admitted()
        before = state_of_book(scene.book)
        with pytest.raises(LimitReached, match="engines and models"):
            scene.controller.dispatch(tracked, scene.at, STREAM)
        assert (state_of_book(scene.book), repr(tracked.machine)) == (
            before,
            "<Machine client=LISTENING engine=UNDISPATCHED books=OPEN>",
        )
        assert scene.leave(tracked) == ["stop began r1", "settled r1"]

    def test_a_full_book(self) -> None:
        scene = Scene(BookLimits(open_requests=1))
        scene.admitted()
        before = state_of_book(scene.book)
        with pytest.raises(LimitReached, match="open requests"):
            scene.admitted("r2")
        assert state_of_book(scene.book) == before
        assert list(scene.controller.tracked) == ["r1"]

    def test_serving_what_is_not_finished(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        before = state_of_book(scene.book)
        with pytest.raises(IllegalTransition, match="SERVED is impossible"):
            scene.controller.client_served(tracked, scene.at)
        assert state_of_book(scene.book) == before

    @pytest.mark.parametrize("profile", ALL_PROFILES, ids=lambda profile: profile.name)
    def test_dispatching_twice(self, profile: EngineProfile) -> None:
        scene = Scene()
        tracked = scene.running(profile)
        before = state_of_book(scene.book)
        with pytest.raises(IllegalTransition, match="DISPATCHED is impossible"):
            scene.controller.dispatch(tracked, scene.at, GAUGED)
        assert state_of_book(scene.book) == before
        assert tracked.profile is profile


def test_what_is_said_after_the_end_is_ignored() -> None:
    scene = Scene()
    tracked = scene.running(STREAM)
    scene.leave(tracked)
    scene.said(scene.controller.stream_ended_by_engine(tracked, scene.at))
    before = state_of_book(scene.book)
    controller = scene.controller
    assert scene.leave(tracked) == []
    assert scene.stop(tracked) == []
    assert scene.said(controller.engine_finished(tracked, scene.at)) == []
    assert scene.said(controller.engine_lost(tracked, scene.at, "reset")) == []
    assert scene.said(controller.acknowledged(tracked, scene.at, Evidence.PROBE)) == []
    assert scene.said(controller.abort_answered(tracked, scene.at, "call", AbortAnswer.GONE)) == []
    assert scene.said(controller.stream_ended_by_engine(tracked, scene.at)) == []
    assert state_of_book(scene.book) == before
