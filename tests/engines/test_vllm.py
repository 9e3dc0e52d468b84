"""The real vLLM on this machine's CPU, behind the gateway: what is claimed of a stop there is what happens there.

Two starts serve everything. The first has one API server and one core; it is killed at the end, and the second, on
the same port, has two API servers, two data-parallel cores, and schedules ahead.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from stopguard.audit.client import SocketExchange
from stopguard.ledger import Account, Evidence, Ledger
from stopguard.testing import rig
from stopguard.testing.conformance import Conformance, Subject
from stopguard.testing.conformance.subject import Closed
from stopguard.testing.staging import STATES
from stopguard_vllm.rig import RECIPE
from tests.engines.vllm_races import RACES, beside_neighbours
from tests.engines.vllm_rig import CONNECTOR, LONG_TOKENS, Bench, Probed

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

STORM = 200
ADAPTER = "tuned"
FENCED = Account.KV_FENCED
ATTEMPTS = 3


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def vllm(bench: Bench) -> Iterator[rig.RunningEngine]:
    # With equal priorities, as all are but one, its queue is in the order of arrival.
    with bench.engine("--scheduling-policy", "priority", development_routes=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def subject(vllm: rig.RunningEngine) -> Iterator[Subject]:
    """A gateway that knows nothing but what vLLM shows to everybody."""
    with Subject("vllm", vllm.url, model=vllm.model, slots=16, long_tokens=LONG_TOKENS, neighbours=20) as subject:
        yield subject


@pytest.fixture(scope="module")
def probed(bench: Bench, vllm: rig.RunningEngine, subject: Subject) -> Iterator[Probed]:
    with Probed.before(bench, vllm.url, vllm.model, settle_seconds=15.0) as probed:
        yield probed


class TestFromOutside(Conformance):
    """The conformance suite, with evidence from vLLM's metrics; 20 of 40 streams are cancelled beside 20."""


# ---- with the probe ------------------------------------------------------------------------------------


def _times(closed: Closed) -> str:
    stop = closed.stop
    milliseconds = [
        "-" if at is None else f"{(at - stop.observed_at) * 1000:.1f}"
        for at in (stop.notified_at, stop.acked_at, stop.released_at, stop.settled_at)
    ]
    return f"{stop.outcome} by {closed.evidence.label}: told/acked/released/settled {'/'.join(milliseconds)} ms"


def _story(closed: Closed) -> str:
    """Everything about one request, for a failure's message."""
    marks = [f"{at:.4f} {text}" for at, text in closed.ledgers.marks]
    return "\n".join([str(closed), *marks, *map(str, closed.ledgers.entries)])


def _never_arrived(closed: Closed) -> bool:
    """The front end took it back before its core had heard of it: no scheduler can say anything of such a request."""
    return not any("the scheduler has" in text for _, text in closed.ledgers.marks)


def _stop(subject: Subject, state: str) -> Closed:
    async def leave() -> Closed:
        staged, request_id = await subject.stage(state)
        await staged.victim.leave()
        closing = asyncio.ensure_future(subject.closed_book(request_id))
        await asyncio.wait({closing}, timeout=subject.settle_seconds / 4)
        await staged.release()
        return await closing

    closed = subject.run(leave)
    for _ in range(ATTEMPTS - 1):
        if closed.stop.semantics == "cancel" and closed.stop.outcome != "raced_finish":
            break
        print(f"{state}: it ended before this busy machine let us leave")
        closed = subject.run(leave)
    return closed


@pytest.mark.parametrize("state", STATES)
def test_the_scheduler_says_that_a_stop_has_happened(probed: Probed, state: str) -> None:
    closed = _stop(probed.subject, state)
    print(f"\n{state:18} {_times(closed)}")
    assert closed.stop.outcome == "confirmed", _story(closed)
    assert closed.evidence is Evidence.PROBE or (closed.evidence is Evidence.GAUGE and _never_arrived(closed))
    assert not closed.ledgers.leaks
    assert closed.stop.settled_at is not None, _story(closed)
    if state in ("decode", "non_streaming", "many_choices"):
        assert closed.ledgers.blocks_taken > 0


def test_a_stop_string_is_a_finish(probed: Probed) -> None:
    """The front end ends such a request by an abort; no client may be told that it was stopped."""
    subject = probed.subject

    async def finish() -> tuple[str, Closed]:
        exchange = await subject.ask(
            subject.shape.prompt(subject.number()), tokens=1000, fields={"stop": ["e", "a", "t", "o"]}
        )
        text = await subject.text_of(exchange)
        return text, await subject.closed_book(subject.id_of(exchange))

    _, closed = subject.run(finish)
    assert (closed.stop.semantics, closed.stop.outcome, closed.stop.attempts) == ("finish", "confirmed", 0)
    assert not closed.ledgers.leaks


def test_preempted_inside_held_and_resumed_nothing_is_lost(probed: Probed) -> None:
    subject = probed.subject

    async def preempt() -> tuple[str, str, list[object], Closed]:
        prompt = subject.shape.prompt(subject.number())
        alone = await subject.text_of(await subject.ask(prompt, tokens=4000))
        exchange = await subject.ask(prompt, tokens=4000)
        reply, request_id = exchange.reply, subject.id_of(exchange)
        answers: list[object] = []
        for wanted in (20, 60, 150):
            await subject.through.wait(lambda wanted=wanted: reply.events >= wanted or reply.ended, 60.0)  # type: ignore[misc]
            assert probed.probing is not None
            answers.append((await probed.probing.order("vllm", "preempt", request_id)).answer)
            await asyncio.sleep(0.05)  # what was under way has come
            seen = reply.events
            await asyncio.sleep(0.3)
            assert reply.events == seen, "it goes on although it is held"
            answers.append((await probed.probing.order("vllm", "resume", request_id)).answer)
        return alone, await subject.text_of(exchange), answers, await subject.closed_book(request_id)

    alone, text, answers, closed = subject.run(preempt)
    for _ in range(ATTEMPTS - 1):
        if "gone" not in answers:
            break
        print("it ended before this busy machine let us preempt it three times")
        alone, text, answers, closed = subject.run(preempt)
    assert answers == ["applied"] * 6
    assert text == alone
    assert not closed.ledgers.leaks
    assert closed.ledgers.tokens_recomputed > 0


@pytest.mark.parametrize("name", RACES)
def test_races_settle_with_evidence_and_neighbours_do_not_notice(probed: Probed, name: str) -> None:
    leaks_before = len(probed.leaks)
    raced, alone, beside = probed.subject.run(lambda: beside_neighbours(probed, RACES[name]))
    for _ in range(ATTEMPTS - 1):
        if raced.happened:
            break
        print(f"{name}: it ended before this busy machine let us act")
        raced, alone, beside = probed.subject.run(lambda: beside_neighbours(probed, RACES[name]))
    closed = raced.closed
    print(f"\n{name:28} {', '.join(raced.answers)}; {closed.stop.semantics}, {_times(closed)}")
    assert raced.text == raced.alone
    assert beside == alone
    assert set(raced.answers) <= {"applied", "gone"}, raced.answers
    if name.startswith("left"):
        assert (closed.stop.semantics, closed.stop.outcome) == ("cancel", "confirmed"), _story(closed)
    if name.startswith("late"):
        assert (closed.stop.source, closed.stop.outcome) == ("deadline", "confirmed"), _story(closed)
    if not raced.text or name.startswith("left"):  # it did not end by itself
        assert closed.evidence is Evidence.PROBE, _story(closed)
    assert closed.ledgers.all_closed
    assert probed.leaks[leaks_before:] == []
    probed.wait(lambda: probed.blocks_used() == 0, f"blocks are in use: {probed.blocks_used()}")


GRAMMAR = {"type": "array", "items": {"type": "string", "minLength": 2000}, "minItems": 50}
STRUCTURED = {"response_format": {"type": "json_schema", "json_schema": {"name": "long", "schema": GRAMMAR}}}


def _leave_structured(probed: Probed) -> Closed:
    subject = probed.subject

    async def leave() -> Closed:
        exchange = await subject.ask(subject.shape.prompt(subject.number()), tokens=LONG_TOKENS, fields=STRUCTURED)
        reply = exchange.reply
        await subject.through.wait(lambda: reply.events > 2 or reply.ended, 60.0)
        assert not reply.ended, f"status {reply.status}, {reply.errors}"
        await exchange.leave()
        return await subject.closed_book(subject.id_of(exchange))

    return subject.run(leave)


def test_a_grammar_comes_back_with_its_request(probed: Probed) -> None:
    closed = _leave_structured(probed)
    print(f"\ngrammar: {_times(closed)}")
    assert (closed.stop.outcome, closed.evidence) == ("confirmed", Evidence.PROBE), _story(closed)
    moved = [(entry.debit, entry.credit, entry.amount) for entry in closed.ledgers.entries if entry.state.moves]
    assert (Account.KV_SLOT_POOL, Account.KV_GRAMMAR, 1) in moved
    assert (Account.KV_GRAMMAR, Account.KV_SLOT_POOL, 1) in moved
    assert not closed.ledgers.leaks


def test_a_storm_settles_to_the_last_block(probed: Probed) -> None:
    """200 requests in every mixture: finished, left in any moment, several choices, shared prefixes, preemptions."""
    subject, choices = probed.subject, random.Random(11)
    leaks_before = len(probed.leaks)

    async def one(number: int) -> str:
        prompt = subject.shape.prompt(number % 40, words=choices.choice((8, 60, 200)))
        fields = {"n": 2, "temperature": 1} if choices.random() < 0.15 else {}
        exchange = await subject.ask(prompt, tokens=choices.choice((8, 60, 200, 600)), fields=fields)
        request_id = subject.id_of(exchange)
        if choices.random() < 0.7:
            await subject.through.wait(lambda: exchange.reply.ended, choices.uniform(0.0, 1.5))
            await exchange.leave("reset" if choices.random() < 0.5 else "fin")
        else:
            await subject.through.wait(lambda: exchange.reply.ended, 240.0)
        return request_id

    async def storm() -> list[Closed]:
        limit = asyncio.Semaphore(40)

        async def limited(number: int) -> str:
            async with limit:
                return await one(number)

        names = await asyncio.gather(*(limited(number) for number in range(STORM)))
        return [await subject.closed_book(name) for name in names]

    began = monotonic()
    books = subject.run(storm)
    stopped = [book for book in books if book.stop.semantics == "cancel"]
    arrived = [book for book in stopped if not _never_arrived(book) and book.stop.outcome == "confirmed"]
    seconds = sorted(
        book.stop.released_at - book.stop.observed_at for book in arrived if book.stop.released_at is not None
    )
    print(
        f"\nstorm of {len(books)} in {monotonic() - began:.0f} s: {len(stopped)} stopped, {len(arrived)} of them"
        f" in the core; stop to blocks back"
        f" p50 {seconds[len(seconds) // 2] * 1000:.0f} ms, p99 {seconds[int(len(seconds) * 0.99)] * 1000:.0f} ms"
    )
    assert len(stopped) > STORM / 3
    assert len(arrived) > STORM / 8
    assert {book.evidence for book in arrived} == {Evidence.PROBE}
    assert {book.evidence for book in stopped} <= {Evidence.PROBE, Evidence.GAUGE, Evidence.STREAM_CLOSED}
    assert probed.leaks[leaks_before:] == []
    assert all(book.ledgers.all_closed for book in books)
    probed.wait(lambda: probed.blocks_used() == 0, f"blocks are in use: {probed.blocks_used()}")


# ---- faults in the engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient(bench: Bench, vllm: rig.RunningEngine, probed: Probed) -> Iterator[Probed]:
    """Another gateway, with which a leak is one after three seconds. The probe goes to whoever listens."""
    subject = probed.subject
    assert probed.probing is not None
    subject.run(probed.probing.close)
    with Probed.before(bench, vllm.url, vllm.model, settle_seconds=3.0) as impatient:
        yield impatient


def test_a_block_that_is_kept_is_named(bench: Bench, impatient: Probed) -> None:
    before = len(impatient.leaks)
    with bench.broken("keep_block"):
        closed = _stop(impatient.subject, "decode")
    found = impatient.leaks[before:]
    assert len(found) == 1, f"{found}, {closed}"
    (leak,) = found
    print(f"\n{leak.describe(monotonic())}")
    assert (leak.request_id, leak.ledger, leak.amount) == (closed.request_id, Ledger.KV, 1)
    assert impatient.blocks_used() == 1


def test_an_output_of_an_encoder_is_in_the_books_and_named_when_it_is_kept(bench: Bench, impatient: Probed) -> None:
    """In vLLM's own manager of them; the model here is of text only, so that the outputs are made up."""
    before = len(impatient.leaks)
    with bench.broken("encoder_output"):
        closed = _stop(impatient.subject, "decode")
    moved = [(entry.debit, entry.credit, entry.amount) for entry in closed.ledgers.entries if entry.state.moves]
    assert (Account.KV_SLOT_POOL, Account.KV_ENCODER, 1) in moved, _story(closed)
    assert (Account.KV_ENCODER, Account.KV_SLOT_POOL, 1) in moved, _story(closed)
    assert impatient.leaks[before:] == []
    with bench.broken("encoder_output", "keep_encoder_output"):
        closed = _stop(impatient.subject, "decode")
    (leak,) = impatient.leaks[before:]
    print(f"\n{leak.describe(monotonic())}")
    assert (leak.request_id, leak.account, leak.amount) == (closed.request_id, Account.KV_ENCODER, 1)


def test_a_grammar_that_is_kept_is_named(bench: Bench, impatient: Probed) -> None:
    before = len(impatient.leaks)
    with bench.broken("keep_grammar"):
        closed = _leave_structured(impatient)
    (leak,) = impatient.leaks[before:]
    print(f"\n{leak.describe(monotonic())}")
    assert (leak.request_id, leak.account, leak.amount) == (closed.request_id, Account.KV_GRAMMAR, 1)


def test_an_abort_that_is_lost_is_given_again_inside(bench: Bench, impatient: Probed) -> None:
    """Without StopGuard such a request runs to its end for nobody."""
    with bench.broken("lose_abort"):
        closed = _stop(impatient.subject, "decode")
    print(f"\nlost abort: {_times(closed)}")
    assert (closed.stop.outcome, closed.evidence) == ("confirmed", Evidence.PROBE)
    assert not closed.ledgers.leaks


def test_aborts_that_are_never_carried_out_are_no_success(bench: Bench, impatient: Probed) -> None:
    subject, before = impatient.subject, len(impatient.leaks)

    async def leave() -> str:
        staged, request_id = await subject.stage("decode")
        await staged.victim.leave()
        return request_id

    def ledgers() -> set[Ledger]:
        return {leak.ledger for leak in impatient.leaks[before:]}

    with bench.broken("lose_every_abort"):
        request_id = subject.run(leave)
        impatient.wait(lambda: ledgers() >= {Ledger.QUEUE, Ledger.KV, Ledger.LINK}, "the leak is not found")
        tracked = subject.gateway.controller.tracked[request_id]
        assert tracked.ledgers.stop is not None
        assert tracked.ledgers.stop.outcome != "confirmed"
    found = impatient.leaks[before:]
    print("", *(leak.describe(monotonic()) for leak in found), sep="\n")
    assert len({leak.account for leak in found}) == len(found), "one leak an account, however much it grows"
    assert {leak.request_id for leak in found} == {request_id}
    assert Account.QUEUE_RUNNING in {leak.account for leak in found}
    assert impatient.order("abort", request_id) in ("applied", "gone")
    closed = subject.run(lambda: subject.closed_book(request_id))
    assert closed.ledgers.leaks  # late is not never: it stays a fact


@pytest.mark.parametrize("mended", [False, True], ids=["as_it_is", "mended"])
def test_a_client_that_leaves_while_it_is_registered(bench: Bench, subject: Subject, *, mended: bool) -> None:
    """The front end registers a request before it sends it; a cancel in between aborts nothing. The plugin does.

    The window is made long here. Nothing of StopGuard's gateway takes part: the connection is the engine's own.
    """
    name = f"lost-{mended}"

    async def leave() -> int:
        await subject.idle()
        call = subject.shape.call("lost", tokens=LONG_TOKENS, headers={"X-Request-Id": name})
        exchange = await subject.direct.open(call)
        await asyncio.sleep(0.5)
        await exchange.leave()
        await asyncio.sleep(1.5)
        gauges = await subject.gauges()
        assert gauges is not None
        return gauges.running or 0

    async def clean_up() -> None:
        await subject.engine.abort(name, "abort_requests", subject.cause())
        await subject.idle()

    with bench.broken("slow_registration", *([] if mended else ["unmended"])):
        running = subject.run(leave)
    subject.run(clean_up)
    assert running == (0 if mended else 1)


def test_without_a_collector_vllm_is_as_it_was(vllm: rig.RunningEngine) -> None:
    """The plugin's entry point is called in a process of its own, and the attributes of vLLM's classes compared."""
    code = """
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.utils import CoreEngineProcManager
from stopguard_vllm.plugin import register
kinds = (Scheduler, AsyncLLM, EngineCore, EngineCoreProc, AsyncMPClient, DPLBAsyncMPClient, OutputProcessor,
         CoreEngineProcManager)
def seen(): return [dict(vars(kind)) for kind in kinds]
before = seen()
register()
assert seen() == before, "something was wrapped"
import os
os.environ["STOPGUARD_COLLECTOR"] = "/nowhere"
register()
assert seen() != before
print("compared")
"""
    home = rig.home_of(RECIPE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("STOPGUARD_", "PYTHON"))}
    done = subprocess.run(
        [str(rig.python_of(home)), "-c", code],
        env={**clean, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "compared" in done.stdout, done.stderr[-2000:]


# ---- death and return ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def returned(bench: Bench, vllm: rig.RunningEngine, impatient: Probed) -> Iterator[tuple[Probed, list[Closed], str]]:
    """The first engine is killed while three streams run; another one, of several processes, takes its address."""
    subject = impatient.subject

    async def streams() -> list[SocketExchange]:
        asked = [await subject.ask(subject.shape.prompt(subject.number()), tokens=LONG_TOKENS) for _ in range(3)]
        for one in asked:
            reply = one.reply
            await subject.through.wait(lambda reply=reply: reply.events > 2 or reply.ended, 60.0)  # type: ignore[misc]
            assert not reply.ended, f"status {reply.status}, {reply.failure}, {reply.errors}"
        return asked

    async def ends(asked: list[SocketExchange]) -> tuple[list[Closed], str]:
        for one in asked:
            await subject.through.wait(lambda one=one: one.reply.ended, 20.0)  # type: ignore[misc]
        closed = [await subject.closed_book(subject.id_of(one)) for one in asked]
        return closed, "; ".join(error for one in asked for error in (*one.reply.errors, one.reply.failure) if error)

    asked = subject.run(streams)
    vllm.kill()
    books, said = subject.run(lambda: ends(asked))
    port = int(vllm.url.rpartition(":")[2])
    arguments = ["--kv-transfer-config", json.dumps(CONNECTOR), "--enable-lora", "--max-lora-rank", "8"]
    arguments += ["--lora-modules", f"{ADAPTER}={bench.adapter}"]
    with bench.broken("asynchronous"), bench.engine(*arguments, port=port, api_servers=2, data_parallel=2) as engine:
        assert Path(engine.log).exists()
        yield impatient, books, said


def test_a_killed_engine_fails_its_requests_and_says_so(returned: tuple[Probed, list[Closed], str]) -> None:
    _, books, said = returned
    assert {book.stop.semantics for book in books} == {"fail"}
    assert all(book.ledgers.all_closed for book in books)
    assert said


def test_it_is_used_again_when_it_returns(returned: tuple[Probed, list[Closed], str]) -> None:
    probed, _, _ = returned
    subject = probed.subject
    member = subject.gateway.fleet.members[0]
    probed.wait(lambda: member.healthy and member.profile.probed, "the engine is not used again", 60.0)
    assert probed.probing is not None
    assert sorted(source.hello.rank for source in probed.probing.sources("vllm")) == [0, 1]
    assert subject.run(lambda: subject.complete(subject.shape.prompt(subject.number())))


def test_whoever_has_it_stops_it(returned: tuple[Probed, list[Closed], str]) -> None:
    """Two API servers and two cores: the order goes to all of them, the owner acts, its front end ends the stream."""
    probed, _, _ = returned
    subject = probed.subject

    assert probed.probing is not None
    probing = probed.probing

    async def stop() -> list[tuple[str, bool, int]]:
        found = []
        for _ in range(8):
            exchange = await subject.ask(subject.shape.prompt(subject.number()), tokens=LONG_TOKENS)
            reply = exchange.reply
            await subject.through.wait(lambda reply=reply: reply.events > 2 or reply.ended, 60.0)  # type: ignore[misc]
            for _ in range(100):  # a machine so busy that a probe was thought dead
                if len(probing.sources("vllm")) == 2:
                    break
                await asyncio.sleep(0.1)
            result = await probing.order("vllm", "abort", subject.id_of(exchange))
            ended = await subject.through.wait(lambda reply=reply: reply.ended, 10.0)  # type: ignore[misc]
            if result.answer == "gone" and ended:
                print("it ended before this busy machine let us stop it")
            else:
                found.append((str(result.answer), ended, reply.events))
        return found

    found = subject.run(stop)
    assert len(found) >= 4
    assert {answer for answer, _, _ in found} == {"applied"}
    assert all(ended for _, ended, _ in found)
    assert max(events for _, _, events in found) < LONG_TOKENS


def _fenced(closed: Closed) -> int:
    return sum(entry.amount for entry in closed.ledgers.entries if entry.state.moves and entry.credit is FENCED)


@pytest.mark.parametrize("state", ["prefill", "decode", "non_streaming", "many_choices"])
def test_steps_ahead_are_in_the_books(returned: tuple[Probed, list[Closed], str], state: str) -> None:
    """With steps scheduled ahead and a KV connector a cancelled stream's blocks wait behind a fence, and its last
    tokens are stale; the books wait for both.
    """
    probed, _, _ = returned
    closed = _stop(probed.subject, state)
    stale = closed.ledgers.balances[Account.OUTPUT_STALE]
    print(f"\n{state:18} {_times(closed)}, stale {stale}, fenced {_fenced(closed)}")
    assert (closed.stop.outcome, closed.evidence) == ("confirmed", Evidence.PROBE)
    assert closed.stop.settled_at is not None, _story(closed)
    assert not closed.ledgers.leaks
    assert not closed.ledgers.balances[FENCED]
    if state in ("decode", "many_choices"):
        assert stale > 0
        assert _fenced(closed) > 0, _story(closed)
        notes = [entry.note for entry in closed.ledgers.entries if entry.credit is FENCED]
        assert all(note.startswith("behind step ") for note in notes), notes


def test_one_that_is_stopped_while_its_kv_is_transferred(
    bench: Bench, returned: tuple[Probed, list[Closed], str]
) -> None:
    """Its blocks belong to the transfer until that is over, and the books say so as long."""
    probed, _, _ = returned
    subject = probed.subject

    async def leave() -> Closed:
        exchange = await subject.ask(subject.shape.prompt(subject.number(), words=200), tokens=LONG_TOKENS)
        await subject.through.wait(lambda: exchange.reply.ended, 0.4)
        await exchange.leave()
        return await subject.closed_book(subject.id_of(exchange))

    with bench.broken("slow_transfer"):
        closed = subject.run(leave)
    print(f"\ntransferring: {_times(closed)}")
    moved = [entry for entry in closed.ledgers.entries if entry.state.moves]
    assert any(entry.credit is Account.QUEUE_TRANSFERRING for entry in moved), _story(closed)
    assert any(entry.credit is Account.KV_HELD for entry in moved), _story(closed)
    assert (closed.stop.outcome, closed.evidence) == ("confirmed", Evidence.PROBE)
    assert closed.stop.acked_at is not None
    assert closed.stop.released_at is not None
    assert closed.stop.released_at - closed.stop.acked_at > 0.2, "the transfer took a second"
    assert not closed.ledgers.leaks


def test_with_a_connector_nothing_is_preempted(returned: tuple[Probed, list[Closed], str]) -> None:
    probed, _, _ = returned
    subject = probed.subject

    async def preempt() -> tuple[str, Closed]:
        staged, request_id = await subject.stage("decode")
        assert probed.probing is not None
        result = await probed.probing.order("vllm", "preempt", request_id)
        await staged.victim.leave()
        return result.answer, await subject.closed_book(request_id)

    answer, closed = subject.run(preempt)
    assert answer == "unsupported"
    assert not closed.ledgers.tokens_recomputed


def test_a_place_for_an_adapter_is_in_the_books(returned: tuple[Probed, list[Closed], str]) -> None:
    probed, _, _ = returned
    subject = probed.subject

    async def leave() -> Closed:
        prompt = subject.shape.prompt(subject.number())
        exchange = await subject.ask(prompt, tokens=LONG_TOKENS, fields={"model": ADAPTER})
        reply = exchange.reply
        await subject.through.wait(lambda: reply.events > 2 or reply.ended, 60.0)
        assert not reply.ended, f"status {reply.status}, {reply.errors}"
        await exchange.leave()
        return await subject.closed_book(subject.id_of(exchange))

    closed = subject.run(leave)
    print(f"\nadapter: {_times(closed)}")
    assert (closed.stop.outcome, closed.evidence) == ("confirmed", Evidence.PROBE), _story(closed)
    moved = [(entry.debit, entry.credit) for entry in closed.ledgers.entries if entry.state.moves]
    assert (Account.KV_SLOT_POOL, Account.KV_LORA) in moved
    assert (Account.KV_LORA, Account.KV_SLOT_POOL) in moved


def test_a_block_that_stays_behind_its_fence_is_named(bench: Bench, returned: tuple[Probed, list[Closed], str]) -> None:
    probed, _, _ = returned
    probed.wait(lambda: probed.blocks_used() == 0, f"blocks are in use: {probed.blocks_used()}")
    before = len(probed.leaks)
    with bench.broken("keep_block"):
        closed = _stop(probed.subject, "decode")
    (leak,) = probed.leaks[before:]
    print(f"\n{leak.describe(monotonic())}")
    assert (leak.request_id, leak.account, leak.amount) == (closed.request_id, FENCED, 1)
    assert probed.blocks_used() == 1, "and nothing else is left"
