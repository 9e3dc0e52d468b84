"""The twelve rules of docs/rules.md, one class each, as far as the heart can keep them.

`tests/mutations` removes the code of each rule and sees its class fail. What needs sockets is tested with the
gateway: that ids on the wire are ours and prefix-free (7), that no task or socket survives (10), that connections
close when the process dies (12).
"""

from __future__ import annotations

import pytest

from stopguard.errors import LimitReached
from stopguard.ledger import Account, Book, BookLimits, EntryState, Evidence, Ledger, Overdraft
from stopguard.probe import wire
from stopguard.stops import (
    AbortAnswer,
    Engine,
    EngineProfile,
    IllegalTransition,
    Semantics,
    Source,
    StopCause,
    TimerWheel,
    engine_died,
    preemptions,
)
from tests.unit.stops.scene import ALL_PROFILES, GAUGED, PROBED, RETRY, SILENT, STREAM, Scene, finished, stopped

EACH_PROFILE = pytest.mark.parametrize("profile", ALL_PROFILES, ids=lambda profile: profile.name)


class TestRule1FinishedBeatsGone:
    @EACH_PROFILE
    def test_a_disconnect_after_the_last_byte_is_no_cancel(self, profile: EngineProfile) -> None:
        scene = Scene()
        tracked = scene.running(profile)
        if profile.probed:
            scene.frame(wire.Finished("r1", 2.0, "stop"))  # its blocks are still out, so its books are open
        else:
            scene.controller.engine_finished(tracked, scene.at)
        scene.controller.client_served(tracked, scene.at)
        assert scene.leave(tracked) == []
        assert scene.stop(tracked) == []
        assert tracked.ledgers.stop is None
        assert tracked.cause is None
        assert tracked.machine.client.name == "SERVED"

    def test_an_engine_that_finished_before_its_abort_mattered_is_not_called_stopped(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        assert scene.frame(*finished()) == ["settled r1"]
        assert tracked.machine.engine is Engine.FINISHED
        assert tracked.ledgers.stop is not None
        assert tracked.ledgers.stop.outcome == "raced_finish"
        assert tracked.ledgers.describe(Ledger.LINK) == "link: moot 1 notices"


class TestRule2AbortIsIdempotentAndAtLeastOnce:
    def test_two_cancels_are_one_stop(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        assert scene.leave(tracked) == ["stop began r1", "knock 1 at probe for r1"]
        assert scene.stop(tracked) == []
        assert scene.leave(tracked, "reset") == []
        assert tracked.ledgers.describe(Ledger.LINK) == "link: awaiting 1 notices (1 due)"
        assert tracked.ledgers.stop is not None
        assert (tracked.ledgers.stop.reason, tracked.attempts) == ("eof", 1)

    def test_two_acks_are_one(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        applied = wire.AbortApplied("r1", 2.0)
        scene.frame(applied, applied, wire.AbortNoop("r1", 2.0), wire.Finished("r1", 2.0, "abort"))
        assert tracked.ledgers.describe(Ledger.LINK) == "link: acknowledged 1 notices"
        assert scene.frame(*stopped()[2:]) == ["settled r1"]
        assert scene.controller.anomalies.book_error_count == 0

    def test_after_the_end_and_for_unknown_ids_nothing_happens(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        scene.frame(*stopped())
        totals = scene.book.totals()
        assert scene.stop(tracked) == []
        assert scene.frame(wire.AbortApplied("r1", 3.0), wire.AbortApplied("never heard of", 3.0)) == []
        assert scene.book.totals() == totals
        assert scene.controller.anomalies.book_error_count == 0

    def test_no_abort_is_ever_sent_to_what_has_ended(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.controller.engine_finished(tracked, scene.at)
        assert scene.leave(tracked) == ["stop began r1", "settled r1"]  # and no knock
        assert not tracked.machine.owes_abort


class TestRule3AnAbortMayBeRefusedLostOrTooEarly:
    def test_a_lost_one_is_repeated_with_backoff_then_at_the_next_door(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        assert scene.leave(tracked) == ["stop began r1", "knock 1 at probe for r1"]
        moments = (100.12, 100.35, 100.8, 101.7, 109.0)
        seen = [(until, [word for word in scene.step(until) if word.startswith("knock")]) for until in moments]
        assert seen == [
            (100.12, ["knock 2 at probe for r1"]),
            (100.35, ["knock 3 at close for r1"]),
            (100.8, ["knock 4 at close for r1"]),
            (101.7, ["knock 5 at close for r1"]),
            (109.0, []),  # five in all
        ]
        assert tracked.attempts == RETRY.tries

    @pytest.mark.parametrize("answer", [AbortAnswer.REFUSED, AbortAnswer.UNKNOWN, AbortAnswer.FAILED])
    def test_a_refused_one_is_repeated_when_the_engine_wants(self, answer: AbortAnswer) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        scene.leave(tracked)
        assert scene.said(scene.controller.abort_answered(tracked, scene.at, "call", answer, 3.0)) == []
        assert scene.step(102.9) == []
        assert scene.step(103.1) == ["knock 2 at call for r1"]

    @pytest.mark.parametrize("answer", [AbortAnswer.REFUSED, AbortAnswer.UNKNOWN, AbortAnswer.FAILED])
    def test_whatever_the_door_said_the_gauges_are_asked(self, answer: AbortAnswer) -> None:
        scene = Scene()
        tracked = scene.running(GAUGED)
        scene.leave(tracked)
        assert scene.said(scene.controller.abort_answered(tracked, scene.at, "call", answer)) == ["observe gauged"]

    def test_one_that_came_too_early_is_repeated_at_once(self) -> None:
        scene = Scene()
        tracked = scene.admitted()
        scene.controller.dispatch(tracked, scene.at, PROBED)
        scene.leave(tracked)
        assert scene.frame(wire.AbortNoop("r1", 2.0), wire.Added("r1", 2.0, 7)) == ["knock 2 at probe for r1"]

    def test_without_an_ack_it_ends_as_unconfirmed_and_never_as_a_success(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        scene.step(111.0)
        assert tracked.ledgers.stop is not None
        assert tracked.ledgers.stop.outcome == "unconfirmed"
        assert tracked.machine.engine is Engine.UNCONFIRMED
        scene.step(1000.0)
        assert tracked.ledgers.stop.outcome == "unconfirmed"
        assert repr(scene.book).endswith("settled 0 written off 1 leaks 4>")

    def test_an_api_that_says_yes_has_proved_nothing(self) -> None:
        for profile in (STREAM, SILENT):
            scene = Scene()
            tracked = scene.running(profile)
            scene.leave(tracked)
            scene.controller.abort_answered(tracked, scene.at, "call", AbortAnswer.ACCEPTED)
            assert tracked.ledgers.stop is not None
            assert tracked.ledgers.stop.outcome != "confirmed"
            assert not tracked.ledgers.balances[Account.LINK_ACKNOWLEDGED]


class TestRule4ACancelOutlivesAPreemption:
    def preempting(self, scene: Scene, profile: EngineProfile = PROBED) -> object:
        tracked = scene.running(profile)
        cause = StopCause(semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="room", observed_at=scene.at)
        preemptions.preempt(scene.controller, tracked, scene.at, cause)
        return tracked

    def test_it_applies_to_whatever_comes_back(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.frame(wire.Preempted("r1", 2.0, 3), wire.Moved("r1", 2.0, "preempted"), wire.BlocksReturned("r1", 2.0, 4))
        preemptions.resume(scene.controller, tracked, scene.at)
        assert scene.leave(tracked) == ["stop began r1", "knock 1 at probe for r1"]
        back = (wire.Resumed("r1", 3.0), wire.Moved("r1", 3.0, "running"), wire.BlocksHeld("r1", 3.0, 4))
        assert scene.frame(*back) == ["knock 2 at probe for r1"]
        assert tracked.machine.engine is Engine.ABORTING
        assert scene.frame(*stopped()) == ["settled r1"]

    def test_a_preemption_that_completes_after_the_cancel_changes_nothing(self) -> None:
        scene = Scene()
        tracked = self.preempting(scene)
        assert scene.leave(tracked)[-1] == "knock 1 at probe for r1"  # type: ignore[arg-type]
        assert scene.frame(wire.Preempted("r1", 2.0, 3), wire.Moved("r1", 2.0, "preempted")) == []
        assert tracked.machine.engine is Engine.ABORTING  # type: ignore[attr-defined]

    def test_it_is_never_resubmitted(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        cause = StopCause(semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="room", observed_at=scene.at)
        preemptions.preempt(scene.controller, tracked, scene.at, cause)
        preemptions.preempted(scene.controller, tracked, scene.at, shelved=True)
        assert scene.leave(tracked) == ["stop began r1", "settled r1"]
        with pytest.raises(IllegalTransition):
            scene.controller.dispatch(tracked, scene.at, STREAM)
        with pytest.raises(IllegalTransition):
            preemptions.resume(scene.controller, tracked, scene.at)

    def test_the_cancel_becomes_the_cause(self) -> None:
        scene = Scene()
        tracked = self.preempting(scene)
        scene.leave(tracked)  # type: ignore[arg-type]
        assert tracked.cause.semantics is Semantics.CANCEL  # type: ignore[attr-defined]


class TestRule5NoNewByteAfterAStop:
    def test_the_client_is_muted_in_the_moment_of_the_stop(self) -> None:
        for profile in ALL_PROFILES:
            left, stopped_by_api, lost = Scene(), Scene(), Scene()
            one = left.running(profile)
            left.leave(one)
            two = stopped_by_api.running(profile)
            stopped_by_api.stop(two)
            three = lost.running(profile)
            lost.controller.engine_lost(three, lost.at, "reset")
            assert (one.muted, two.muted, three.muted) == (True, True, True)

    def test_what_still_comes_is_discarded_and_counted(self) -> None:
        scene = Scene()
        tracked = scene.running(STREAM)
        tracked.events += 3
        scene.leave(tracked)
        tracked.events += 2
        scene.controller.stream_ended_by_engine(tracked, scene.at)
        assert tracked.ledgers.describe(Ledger.OUTPUT) == "output: delivered 3 tokens, discarded 2 tokens"

    def test_what_was_in_flight_is_discarded_or_stale_and_counted(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.frame(wire.TokensComputed("r1", 2.0, 5), wire.TokensEmitted("r1", 2.0, 1))
        scene.leave(tracked)
        scene.frame(wire.TokensEmitted("r1", 2.0, 2), wire.TokensDropped("r1", 2.0, 2, stale=True))
        assert (
            tracked.ledgers.describe(Ledger.OUTPUT) == "output: delivered 1 tokens, discarded 2 tokens, stale 2 tokens"
        )

    def test_somebody_elses_abort_mutes_too(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.frame(wire.TokensComputed("r1", 2.0, 2), wire.AbortApplied("r1", 2.0), wire.TokensEmitted("r1", 2.0, 2))
        assert tracked.muted
        assert tracked.ledgers.describe(Ledger.OUTPUT) == "output: discarded 2 tokens"


class TestRule6AReleaseHappensOnce:
    def test_the_second_is_an_error_in_the_books_and_shown(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        arrived, applied, gone, returned = stopped()
        scene.frame(arrived, applied, returned, returned, gone)
        (error,) = scene.controller.anomalies.book_errors
        assert error.request_id == "r1"
        assert "a release happens once" in error.text
        assert tracked.ledgers.describe(Ledger.KV) == "kv: empty"
        assert scene.book.total(Account.KV_HELD) == 0

    def test_also_after_the_books_were_closed(self) -> None:
        scene = Scene()
        scene.leave(scene.running(PROBED))
        scene.frame(*stopped())
        scene.frame(wire.BlocksReturned("r1", 3.0, 4))
        (error,) = scene.controller.anomalies.book_errors
        assert error.text == "BlocksReturned from probed after its books were closed"

    def test_in_the_ledger_itself(self) -> None:
        tracked = Scene().running(PROBED)
        ledgers = tracked.ledgers
        ledgers.leave(Account.KV_HELD, Account.KV_POOL, 4, 200.0)
        with pytest.raises(Overdraft, match="a release happens once"):
            ledgers.leave(Account.KV_HELD, Account.KV_POOL, 4, 200.0)


class TestRule7ChildrenDieWithTheParent:
    def family(self, scene: Scene, name: str) -> object:
        tracked = scene.admitted(name)
        scene.controller.dispatch(tracked, scene.at, PROBED)
        for child in (f"{name}-0", f"{name}-1"):
            scene.frame(
                wire.Added(child, 1.0, 7, name), wire.Moved(child, 1.0, "running"), wire.BlocksHeld(child, 1.0, 2)
            )
        return tracked

    def test_a_parent_is_stopped_only_when_its_last_child_is(self) -> None:
        scene = Scene()
        tracked = self.family(scene, "r1")
        scene.leave(tracked)  # type: ignore[arg-type]
        assert scene.frame(*stopped("r1-0", blocks=2)) == []
        assert tracked.machine.engine is Engine.ABORTING  # type: ignore[attr-defined]
        assert scene.frame(*stopped("r1-1", blocks=2)) == ["settled r1"]
        assert scene.empty()

    def test_a_child_that_goes_on_is_reported(self) -> None:
        scene = Scene()
        scene.leave(self.family(scene, "r1"))  # type: ignore[arg-type]
        scene.frame(*stopped("r1-0", blocks=2))
        assert "leaked r1 queue.running 1" in scene.step(111.0)

    def test_nobody_else_does(self) -> None:
        """One id is the beginning of the other, as when an engine matches aborts by prefix."""
        scene = Scene()
        one, other = self.family(scene, "r1"), self.family(scene, "r1-")
        scene.leave(one)  # type: ignore[arg-type]
        scene.frame(*stopped("r1-0", blocks=2), *stopped("r1-1", blocks=2))
        assert other.machine.engine is Engine.DISPATCHED  # type: ignore[attr-defined]
        assert list(scene.controller.tracked) == ["r1-"]
        assert sorted(scene.controller.parts) == ["r1--0", "r1--1"]


class TestRule8EveryCounterIsDerivedFromTheBooks:
    def test_totals_move_with_each_entry_and_cannot_drift(self) -> None:
        scene = Scene()
        requests = [scene.running(PROBED, f"r{number}") for number in range(3)]
        scene.leave(requests[0])
        scene.frame(*stopped("r0"))
        scene.leave(requests[1])
        for account in Account:
            if account.role.value == "open":
                assert scene.book.total(account) == sum(one.ledgers.balances[account] for one in requests)
        statistics = scene.book.statistics()
        assert (statistics.open_requests, statistics.open_ledgers[Ledger.LINK]) == (2, 1)
        scene.book.verify()

    def test_a_balance_that_did_not_come_from_an_entry_is_found(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        tracked.ledgers.balances[Account.KV_HELD] -= 1
        tracked.ledgers.totals[Account.KV_HELD] -= 1
        with pytest.raises(Exception, match="do not follow from the entries"):
            scene.book.verify()


class TestRule9ATimeoutSettlesNothing:
    @EACH_PROFILE
    def test_what_is_open_at_its_deadline_is_a_leak_and_stays_open(self, profile: EngineProfile) -> None:
        scene = Scene()
        tracked = scene.running(profile)
        scene.leave(tracked)
        words = scene.step(111.0)
        assert any(word.startswith("leaked r1 kv.claimed 1") for word in words)
        assert not any(word.startswith("settled") for word in words)
        assert tracked.ledgers.balances[Account.KV_CLAIMED] == 1
        assert tracked.ledgers.closed_at is None
        leak = scene.book.leaks()[0]
        assert (leak.request_id, leak.amount > 0, leak.age_seconds(scene.at) > 10.0) == ("r1", True, True)

    def test_closing_late_is_recorded_as_late(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        scene.step(111.0)
        assert scene.frame(*stopped()) == ["settled r1"]
        assert EntryState.LATE in [entry.state for entry in tracked.ledgers.entries]
        assert scene.book.statistics().closed_late == 1
        assert len(scene.book.leaks()) == 4  # they stay facts

    def test_giving_up_is_no_success(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        scene.step(1000.0)
        assert tracked.ledgers.written_off
        assert scene.book.statistics().settled == 0


class TestRule10TheWatcherMayNotLeak:
    @EACH_PROFILE
    def test_nothing_of_a_request_survives_it(self, profile: EngineProfile) -> None:
        scene = Scene()
        for number in range(50):
            name = f"r{number}"
            tracked = scene.running(profile, name)
            if number % 3 == 0:
                scene.leave(tracked)
            elif number % 3 == 1:
                scene.stop(tracked)
            scene.at += 0.01
        scene.said(engine_died(scene.controller, profile.name, scene.at, "process died"))
        for tracked in list(scene.controller.tracked.values()):
            scene.said(scene.controller.client_told(tracked, scene.at))
        assert scene.empty()
        assert not any(scene.controller.wheel._slots)
        assert not scene.book.overdue()

    def test_memory_of_what_is_over_is_bounded(self) -> None:
        scene = Scene(BookLimits(recent=10, leaks=10))
        for number in range(100):
            scene.leave(scene.running(PROBED, f"r{number}"))
            scene.frame(*stopped(f"r{number}"))
        assert (len(scene.book.recent()), len(scene.book._recent_by_id)) == (10, 10)
        assert scene.empty()


class TestRule11EverythingHasALimit:
    def test_open_requests(self) -> None:
        scene = Scene(BookLimits(open_requests=2))
        scene.admitted("r1")
        scene.admitted("r2")
        with pytest.raises(LimitReached, match=r"open requests reached \(2\): wait for some to end"):
            scene.admitted("r3")

    def test_entries_of_a_request(self) -> None:
        ledgers = Book(BookLimits(entries_per_request=3)).open("r1", 1.0, engine="e", model="m")
        for _ in range(3):
            ledgers.post(Account.KV_POOL, Account.KV_HELD, 1, 1.0)
        with pytest.raises(LimitReached, match="entries a request reached"):
            ledgers.post(Account.KV_POOL, Account.KV_HELD, 1, 1.0)

    def test_marks_of_a_request(self) -> None:
        ledgers = Book(BookLimits(entries_per_request=3)).open("r1", 1.0, engine="e", model="m")
        for _ in range(9):
            ledgers.mark(1.0, "x")
        assert ledgers.marks[-1] == (1.0, "no more marks: the limit of 3 is reached")
        assert len(ledgers.marks) == 3

    def test_models(self) -> None:
        book = Book(BookLimits(engine_models=1))
        book.open("r1", 1.0, engine="e", model="m")
        with pytest.raises(LimitReached, match="engines and models reached"):
            book.open("r2", 1.0, engine="e", model="m2")

    def test_overdue_requests(self) -> None:
        book = Book(BookLimits(overdue=1))
        for name in ("r1", "r2"):
            ledgers = book.open(name, 1.0, engine="e", model="m")
            ledgers.post(Account.KV_POOL, Account.KV_HELD, 1, 1.0)
            ledgers.pend(Account.KV_HELD, Account.KV_POOL, 1, 1.0, 2.0)
        book.expire(book.get("r1"), 3.0)
        with pytest.raises(LimitReached, match="overdue requests reached"):
            book.expire(book.get("r2"), 3.0)

    def test_timers(self) -> None:
        wheel: TimerWheel[str] = TimerWheel(0.0, limit=1)
        wheel.set("a", 1.0)
        with pytest.raises(LimitReached, match="timers reached"):
            wheel.set("b", 1.0)

    def test_attempts(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        knocks = [word for word in scene.step(400.0) if word.startswith("knock")]
        assert len(knocks) + 1 == RETRY.tries == tracked.attempts

    def test_book_errors(self) -> None:
        scene = Scene()
        scene.running(PROBED)
        for _ in range(1005):
            scene.frame(wire.BlocksReturned("r1", 2.0, 99))
        anomalies = scene.controller.anomalies
        assert (len(anomalies.book_errors), anomalies.book_error_count) == (1000, 1005)


class TestRule12IfAnEngineDiesItsBooksAreClosed:
    """The heart's half: a death closes everything of that engine, by evidence, and says so to who still listens."""

    @EACH_PROFILE
    def test_all_of_its_requests_and_no_other(self, profile: EngineProfile) -> None:
        scene = Scene()
        stopping, listening = scene.running(profile, "stopping"), scene.running(profile, "listening")
        other = EngineProfile(name="other", retry=RETRY)
        bystander = scene.running(other, "bystander")
        scene.leave(stopping)
        scene.said(engine_died(scene.controller, profile.name, scene.at, "process died"))
        scene.said(scene.controller.client_told(listening, scene.at))
        assert list(scene.controller.tracked.values()) == [bystander]
        assert bystander.machine.engine is Engine.DISPATCHED
        assert stopping.ledgers.stop is not None
        assert (stopping.ledgers.stop.outcome, stopping.ledgers.stop.evidence) == ("confirmed", Evidence.STREAM_CLOSED)
        assert not stopping.ledgers.written_off
        assert listening.ledgers.stop is not None
        assert listening.ledgers.stop.retry == "unsafe; reason=the engine was lost and may have been working"

    def test_open_books_can_be_written_down_whole_at_any_moment(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        record = tracked.ledgers.record()
        assert record.closed_at is None
        assert record.balances()[Account.KV_HELD] == 4
        assert record.stop is not None
        assert record.stop.outcome == "pending"
