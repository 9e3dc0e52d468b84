"""The conformance suite: what makes an adapter an adapter.

Derive a test class from `Conformance`, give it a fixture `subject`, and pytest runs every check below against your
engine. Each check states one promise of the `Engine` protocol; together they say that a stop reaches the engine, that
it hits the right request and nobody else, that what is claimed is no more than what is known, and that the engine is
disturbed no more than the adapter allows.

A check that an engine cannot undergo (an abort by id where there is no such door) passes with what remains of it:
the adapter then has to say so in its `Capabilities`, and what it says is checked.
"""

from __future__ import annotations

import asyncio
import inspect
from itertools import pairwise
from time import monotonic
from typing import Final

import pytest

from stopguard.audit.world import Reply
from stopguard.engines import Engine, GaugeUnit, derived_evidence
from stopguard.engines.ids import OUR_ID
from stopguard.engines.recognition import ask_over_http, recognise
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import AbortAnswer, Door, DoorKind
from stopguard.testing.conformance.preempting import Preempting
from stopguard.testing.conformance.subject import Closed, Subject
from stopguard.testing.staging import STATES

__all__ = ["Conformance"]

_GOOD: Final = ("confirmed", "raced_finish")
_NORMAL_ENDS: Final = {"length", "stop"}
#: The pause between two readings may be shorter by what the clock and the loop need.
_BUDGET_TOLERANCE: Final = 0.9
_STRANGER: Final = "sg-" + "0" * 32


class Conformance(Preempting):
    """Derive from it, and define the fixture `subject` (a `Subject` that is entered), best of class scope."""

    # ---- what it says of itself ------------------------------------------------------------------

    def test_it_is_an_engine_and_says_what_it_is(self, subject: Subject) -> None:
        """The attributes and coroutines of the protocol are there; `identify` gives a kind; the model is listed."""
        engine = subject.gateway.fleet.members[0].engine
        assert isinstance(engine, Engine)
        identity = subject.run(engine.identify)
        assert identity.kind
        assert subject.shape.model in {model.id for model in subject.run(engine.models)}

    def test_it_is_recognised(self, subject: Subject) -> None:
        """`--engine auto=URL` finds this adapter, among all that are installed."""

        async def asked() -> str:
            client, ask = ask_over_http(subject.engine_url)
            try:
                return (await recognise(ask)).kind
            finally:
                await client.aclose()

        assert subject.run(asked) == subject.kind

    def test_it_claims_no_more_than_follows(self, subject: Subject) -> None:
        """The best evidence is what doors and gauges give; the capabilities fit the profile."""
        engine, profile, able = subject.engine, subject.engine.profile, subject.capabilities
        assert profile.doors, "an engine without a door cannot be stopped"
        assert len({door.name for door in profile.doors}) == len(profile.doors)
        assert profile.best_evidence <= derived_evidence(profile, gauges=engine.gauge_seconds > 0)
        assert able.aborts_by_id == any(door.kind is not DoorKind.CLOSE for door in profile.doors), (
            "aborts_by_id says whether there is a door beside the connection"
        )
        assert (able.gauge_unit is GaugeUnit.NONE) or engine.gauge_seconds > 0
        assert able.aborts_by_id or not (able.aborts_children or able.matches_by_prefix)
        if profile.best_evidence is Evidence.PROBE:
            assert profile.probed

    # ---- ids -------------------------------------------------------------------------------------

    def test_ids_are_ours(self, subject: Subject) -> None:
        """What a client puts where our id goes is replaced: two clients with one id do not meet."""
        engine = subject.engine
        headers = {name: "one-and-the-same" for name in {*engine.owned_headers, engine.placement.header} if name}
        fields = {name: "one-and-the-same" for name in {*engine.owned_body_fields, engine.placement.body_field} if name}

        async def two() -> set[str]:
            asked = [
                await subject.ask(subject.shape.prompt(subject.number()), headers=headers, fields=fields)
                for _ in range(2)
            ]
            assert all([await subject.text_of(one) for one in asked])
            return {subject.id_of(one) for one in asked}

        ours = subject.run(two)
        assert len(ours) == 2
        assert all(OUR_ID.fullmatch(name) for name in ours)

    def test_control_routes_are_not_for_clients(self, subject: Subject) -> None:
        """Through the gateway nobody aborts everything, pauses, or reads what is drained by reading."""

        async def statuses() -> dict[str, int]:
            found = {}
            for path in sorted(subject.engine.control_paths):
                call = subject.shape.call("x", tokens=1)
                exchange = await subject.through.open(type(call)(path=path, body={}))
                await subject.through.wait(lambda reply=exchange.reply: reply.ended, 10.0)  # type: ignore[misc]
                found[path] = exchange.reply.status or 0
            return found

        assert set(subject.run(statuses).values()) <= {403}

    # ---- stops -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", STATES)
    def test_a_client_that_leaves_is_stopped(self, subject: Subject, state: str) -> None:
        """In every state: the books close with the promised evidence, never with more than the best, and the engine
        is idle afterwards.
        """
        if state == "many_choices" and not subject.capabilities.many_choices:
            state = "decode"

        async def leave() -> tuple[Closed, bool]:
            await subject.idle()
            staged, request_id = await subject.stage(state)
            fits = staged.in_state
            await staged.victim.leave()
            if not staged.others:
                closed = await subject.closed_book(request_id)
            else:
                closing = asyncio.ensure_future(subject.closed_book(request_id))
                # A starved queue moves only when those before it are done.
                await asyncio.wait({closing}, timeout=subject.settle_seconds / 4)
                cut = [other.reply for other in staged.others if _was_cut(other.reply)]
                await staged.release()
                assert not cut, f"{len(cut)} of those that ran were stopped with the one that waited"
                closed = await closing
            await subject.idle()
            return closed, fits

        closed, fits = subject.run(leave)
        _has_kept_its_word(subject, closed, state)
        if fits and closed.stop.outcome != "raced_finish":
            assert closed.stop.semantics == "cancel"

    def test_a_request_that_finishes_is_finished(self, subject: Subject) -> None:
        """Nobody is told to stop, the text is whole, and the books say so."""
        knocks = len(subject.aborts)

        async def finish() -> Closed:
            exchange = await subject.ask(subject.shape.prompt(subject.number()))
            assert await subject.text_of(exchange)
            return await subject.closed_book(subject.id_of(exchange))

        closed = subject.run(finish)
        assert (closed.stop.semantics, closed.stop.attempts) == ("finish", 0)
        assert len(subject.aborts) == knocks

    def test_every_choice_ends_with_its_request(self, subject: Subject) -> None:
        """Cancelling a request with several choices frees all of them: the engine is idle while a neighbour is not
        there, and a neighbour that is there goes on to the same end as alone.
        """
        if not subject.capabilities.many_choices:
            return

        async def cancel() -> tuple[str, str, Closed]:
            prompt = subject.shape.prompt(subject.number())
            alone = await subject.complete(prompt)
            neighbour = await subject.ask(prompt)
            staged, request_id = await subject.stage("many_choices")
            await staged.victim.leave("reset")
            closed = await subject.closed_book(request_id)
            beside = await subject.text_of(neighbour)
            await subject.idle()
            return alone, beside, closed

        alone, beside, closed = subject.run(cancel)
        assert beside == alone
        _has_kept_its_word(subject, closed, "many_choices")

    # ---- doors -----------------------------------------------------------------------------------

    def test_each_door_opens(self, subject: Subject) -> None:
        """Knocked on by itself while tokens flow, each of the adapter's doors ends the request at the engine."""
        for door in _calls(subject):
            if not subject.capabilities.aborts_by_id:
                continue
            ended, answers = subject.run(lambda door=door: _knock_until_it_ends(subject, door))  # type: ignore[misc]
            assert ended, f"door {door.name} answered {[answer.value for answer in answers]}, and the stream went on"
            subject.run(subject.idle)

    def test_knocking_does_no_harm(self, subject: Subject) -> None:
        """Too often, too late, for nobody, for everybody: an answer each time, and the neighbour's text is unchanged.

        An id that is empty, a pattern, or only the beginning of a live one must not reach the engine as it is: there
        are engines where nothing stands for everything, and engines that match by prefix.
        """

        async def knock() -> tuple[str, str, list[AbortAnswer]]:
            prompt = subject.shape.prompt(subject.number())
            alone = await subject.complete(prompt)
            neighbour = await subject.ask(prompt)
            live = subject.id_of(neighbour)
            answers = []
            for door in _calls(subject):
                for wrong in (_STRANGER, "", "sg-", live[:-1], live[:20], live[:-1] + "x", live + "0", "*"):
                    reply = await subject.engine.abort(wrong, door.name, subject.cause())
                    answers.append(reply.answer)
            return alone, await subject.text_of(neighbour), answers

        alone, beside, answers = subject.run(knock)
        assert beside == alone, "an abort for somebody else changed this one's output"
        assert AbortAnswer.SENT not in answers, "a call has an answer"

        async def late() -> list[AbortAnswer]:
            staged, request_id = await subject.stage("decode")
            await staged.victim.leave()
            await subject.closed_book(request_id)
            return [
                (await subject.engine.abort(request_id, door.name, subject.cause())).answer
                for door in _calls(subject)
                for _ in range(2)
            ]

        subject.run(subject.idle)
        before = dict(subject.closed)
        subject.run(late)
        subject.run(subject.idle)
        assert len(subject.closed) == len(before) + 1

    # ---- neighbours ------------------------------------------------------------------------------

    def test_neighbours_deliver_what_they_deliver_alone(self, subject: Subject) -> None:
        """While every second of several streams is cancelled, the others' texts stay the same to the letter."""
        count = subject.neighbours

        async def storm() -> tuple[list[str], list[str]]:
            prompts = [subject.shape.prompt(subject.number()) for _ in range(count)]
            alone = [await subject.complete(prompt) for prompt in prompts]
            stay = [await subject.ask(prompt) for prompt in prompts]
            leave = [
                await subject.ask(subject.shape.prompt(subject.number()), tokens=subject.shape.long_tokens)
                for _ in range(count)
            ]
            for number, one in enumerate(leave):
                reply = one.reply
                await subject.through.wait(lambda reply=reply: reply.events > 0 or reply.ended, 30.0)  # type: ignore[misc]
                await one.leave("reset" if number % 2 else "fin")
            beside = [await subject.text_of(one) for one in stay]
            await subject.idle()
            return alone, beside

        alone, beside = subject.run(storm)
        assert beside == alone

    # ---- gauges ----------------------------------------------------------------------------------

    def test_gauges_see_a_request_and_return(self, subject: Subject) -> None:
        """Where there are gauges, a running request is in them, and after it they are where they were."""
        if subject.engine.gauge_seconds <= 0:
            assert subject.run(subject.engine.gauges) is None
            return

        async def watch() -> tuple[int, int | None, int | None]:
            before = await subject.idle()
            staged, request_id = await subject.stage("decode")
            seen, due_at = 0, monotonic() + 3 * subject.engine.gauge_seconds + 2.0
            while not seen and monotonic() < due_at and not staged.victim.reply.ended:
                during = await subject.gauges()
                seen = 0 if during is None else (during.running or 0) + (during.waiting or 0)
            await staged.victim.leave()
            await subject.closed_book(request_id)
            after = await subject.idle()
            return seen, _used(before), _used(after)

        seen, before, after = subject.run(watch)
        assert seen >= 1, "a running request was in no reading"
        if before is not None and after is not None:
            assert after <= before, f"the gauges count {after - before} more in use than before"
        unit = subject.capabilities.gauge_unit
        assert (unit is GaugeUnit.NONE) == (after is None), "the unit says what blocks_used counts, if anything"

    def test_the_polling_budget_is_kept(self, subject: Subject) -> None:
        """While stops are pending the gauges are read no faster than `gauge_seconds`, and not at all without one."""
        if subject.engine.gauge_seconds <= 0:
            return

        async def storm() -> None:
            await subject.idle()
            for _ in range(3):
                staged, request_id = await subject.stage("decode")
                await staged.victim.leave()
                await subject.closed_book(request_id)

        subject.run(storm)
        by_gateway = [reading.at for reading in subject.readings if not reading.by_suite]
        pauses = [later - earlier for earlier, later in pairwise(by_gateway)]
        assert not pauses or min(pauses) >= subject.engine.gauge_seconds * _BUDGET_TOLERANCE
        closed_at = monotonic()  # a reading that began before it may still be answered
        subject.run(lambda: asyncio.sleep(2.5 * min(subject.engine.gauge_seconds, 1.0)))
        late = [reading for reading in subject.readings if reading.at > closed_at]
        assert not late, f"the gauges are read though no stop is pending: {late}"

    # ---- life ------------------------------------------------------------------------------------

    def test_closing_twice_is_harmless(self, subject: Subject) -> None:
        """`aclose` may come at any time and twice; the adapter opens its control connections again when needed."""

        async def close() -> str:
            await subject.engine.aclose()
            await subject.engine.aclose()
            return (await subject.engine.identify()).kind

        assert subject.run(close)
        for name in ("identify", "models", "gauges", "abort", "aclose"):
            assert inspect.iscoroutinefunction(getattr(subject.engine, name)), f"{name} is no coroutine"


def _has_kept_its_word(subject: Subject, closed: Closed, state: str) -> None:
    """Success is claimed exactly when there is evidence for it, and there is as much as was promised."""
    if closed.stop.outcome == "raced_finish":
        return
    promised, best = subject.promised(state), subject.best_evidence
    assert closed.evidence <= max(best, Evidence.STREAM_CLOSED), str(closed)
    assert closed.evidence >= promised, f"{state}: {promised.label} was promised; {closed}"
    proved = closed.evidence > Evidence.ACCEPTED
    assert (closed.stop.outcome in _GOOD) == proved, str(closed)
    if promised > Evidence.ACCEPTED:
        assert not closed.ledgers.leaks, str(closed)


def _was_cut(reply: Reply) -> bool:
    """Whether the engine ended a reply before its end: with another reason than its own, or none."""
    return reply.ended and not set(reply.reasons.values()) & _NORMAL_ENDS


def _used(gauges: EngineGauges | None) -> int | None:
    return None if gauges is None else gauges.blocks_used


def _calls(subject: Subject) -> list[Door]:
    return [door for door in subject.engine.profile.doors if door.kind is DoorKind.CALL]


async def _knock_until_it_ends(subject: Subject, door: Door) -> tuple[bool, list[AbortAnswer]]:
    """Knock on one door as the gateway would, without leaving; whether the engine ended the stream before its end."""
    exchange = await subject.ask(subject.shape.prompt(subject.number()), tokens=subject.shape.long_tokens)
    reply = exchange.reply
    await subject.through.wait(lambda: reply.events >= 2 or reply.ended, subject.shape.patience_seconds)
    request_id = subject.id_of(exchange)
    answers: list[AbortAnswer] = []
    ended = False
    for attempt in range(8):
        answered = await subject.engine.abort(request_id, door.name, subject.cause())
        answers.append(answered.answer)
        ended = await subject.through.wait(lambda: reply.ended, max(answered.retry_after_seconds, 0.2 * (attempt + 1)))
        if ended:
            break
    opened = ended and _was_cut(reply)
    await exchange.leave()
    return opened, answers
