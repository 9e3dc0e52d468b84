"""StopGuard in front of the genuine SGLang on this machine's CPU, as it comes from its makers and with our plugin.

Two starts of the engine: once without a plugin, killed in the middle of a stream, and once more at the same address
with the plugin and with faults that strike on demand. The tests run in this order.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from stopguard.ledger import Account, Evidence
from stopguard.probe import wire
from stopguard.testing import rig
from stopguard.testing.conformance import Closed, Conformance, Subject
from stopguard.testing.staging import STATES, stage
from tests.engines.sglang_faults import KEPT_TOKENS
from tests.engines.sglang_rig import TOKEN, Faulty, ProbedSubject, describe, probed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

SLOTS = 8
#: Small, so that it can be filled: by eight requests that are longer than they were expected to be.
POOL_TOKENS = 5600
LONG_TOKENS = 150

#: Where SGLang polls for the client it looks 4 s after a request's start, and these are left within 0.3 s of it.
POLLED = ("queued", "non_streaming")
#: Generous, since the machine is small and busy: what is quicker than the poll, and what has happened at all.
UNPOLLED_SECONDS = 3.0
STOP_SECONDS = 10.0

_figures: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="module")
def port() -> int:
    return rig.free_port()


@pytest.fixture(scope="module")
def stock(port: int) -> Iterator[rig.RunningEngine]:
    options = {"running_requests": SLOTS, "prefill_chunk_tokens": 256}
    with rig.start(rig.recipe_of("sglang"), options=options, port=port) as engine:
        yield engine


@pytest.fixture(scope="module")
def in_front(stock: rig.RunningEngine) -> Iterator[Subject]:
    """One gateway that stays while the engine dies and comes back."""
    # The end of our own stream is the ack here, and comes before any gauge.
    expected = dict.fromkeys(STATES, "stream_closed")
    with Subject("sglang", stock.url, model=stock.model, slots=SLOTS, neighbours=20, expected=expected) as subject:
        yield subject


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    return Faulty(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def with_plugin(stock: rig.RunningEngine, in_front: Subject, port: int, faulty: Faulty) -> Iterator[rig.RunningEngine]:
    """Takes the place of the first, which the tests before have killed, when they were run."""
    stock.stop()
    recipe = rig.recipe_of("sglang")
    home = rig.install(recipe)
    faulty.make_lora(home, home / "models" / "tiny-8192")
    options = {"pool_tokens": POOL_TOKENS, "running_requests": SLOTS, "conservativeness": 0.1}
    lora = ("--enable-lora", "--lora-paths", f"a={faulty.lora}", "--max-lora-rank", "8")
    backend = ("--lora-backend", "torch_native")
    environment = faulty.environment
    with rig.start(recipe, *lora, *backend, environment=environment, options=options, port=port) as engine:
        yield engine


@pytest.fixture(scope="module")
def proved(with_plugin: rig.RunningEngine, faulty: Faulty) -> Iterator[ProbedSubject]:
    options = {"slots": SLOTS, "long_tokens": LONG_TOKENS, "neighbours": 20}
    with probed(with_plugin.url, with_plugin.model, faulty.socket, **options) as subject:
        yield subject


_LOAD = """
import json, pkgutil
from stopguard_sglang import plugin_front, plugin_hooks
from sglang.srt.entrypoints.http_server import app
hooks = [*plugin_hooks.hooks(), *plugin_front.hooks()]
def now():
    found = {}
    for hook in hooks:
        path, _, name = hook.target.rpartition(".")
        found[hook.name] = getattr(pkgutil.resolve_name(path), name)
    return found
before, layers = now(), len(app.user_middleware)
from sglang.srt.plugins import load_plugins
load_plugins()
after = now()
untouched = [name for name in before if after[name] is before[name]]
print(json.dumps([untouched, list(before), len(app.user_middleware) - layers]))
"""


@pytest.mark.parametrize("collector", [False, True])
def test_without_a_collector_nothing_is_wrapped(collector: bool, tmp_path: Path) -> None:
    """SGLang's own loader loads the plugin in SGLang's own environment, and its functions are compared."""
    home = rig.install(rig.recipe_of("sglang"))
    rig.put_stopguard(home, print)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    if collector:
        environment |= {"STOPGUARD_COLLECTOR": str(tmp_path / "probe.sock"), "STOPGUARD_COLLECTOR_TOKEN": TOKEN}
    said = subprocess.run(
        [str(rig.python_of(home)), "-c", _LOAD], env=environment, stdout=subprocess.PIPE, check=True, timeout=600
    )
    untouched, every, layers = json.loads(said.stdout.splitlines()[-1])
    assert untouched == ([] if collector else every)
    assert layers == int(collector)


class TestFromOutside(Conformance):
    """The conformance suite, without anything of ours inside the engine."""

    @pytest.fixture
    def subject(self, in_front: Subject) -> Subject:
        return in_front


@pytest.mark.parametrize("state", STATES)
def test_a_stop_is_quick_from_outside(in_front: Subject, state: str) -> None:
    alone = in_front.run(lambda: _left_alone(in_front, state))
    through = in_front.run(lambda: _left_through(in_front, state))
    _figures[state] = {"SGLang alone": alone, "through StopGuard": _seconds(through)}
    assert through.stop.outcome in ("confirmed", "raced_finish"), describe(through)
    assert _seconds(through) < (UNPOLLED_SECONDS if state in POLLED else STOP_SECONDS)
    if state in POLLED:
        assert _seconds(through) < alone, "the poll of 4 s is still felt"


def test_an_engine_that_is_killed_fails_its_clients(in_front: Subject, stock: rig.RunningEngine) -> None:
    async def killed() -> tuple[list[str], list[Closed]]:
        asked = [await in_front.ask(in_front.shape.prompt(in_front.number()), tokens=2000) for _ in range(3)]
        replies = [one.reply for one in asked]
        await in_front.through.wait(lambda: all(reply.events > 2 for reply in replies), 30.0)
        await asyncio.to_thread(stock.kill)
        await in_front.through.wait(lambda: all(reply.ended for reply in replies), 10.0)
        errors = [error for reply in replies for error in reply.errors]
        return errors, [await in_front.closed_book(in_front.id_of(one)) for one in asked]

    errors, closed = in_front.run(killed)
    assert len(errors) == 3
    for one in closed:
        assert one.stop.semantics == "fail", describe(one)
        assert one.stop.retry, "whether to send it again was not answered"


def test_an_engine_that_returns_is_used_again(in_front: Subject, with_plugin: rig.RunningEngine) -> None:
    async def again() -> str:
        due_at = monotonic() + 60.0
        while True:
            reply = (await in_front.ask(in_front.shape.prompt(in_front.number()))).reply
            await in_front.through.wait(lambda reply=reply: reply.ended, 30.0)  # type: ignore[misc]
            if reply.status == 200 and reply.text:
                return reply.text
            assert monotonic() < due_at, f"still {reply.status}: {reply.errors}"
            await asyncio.sleep(0.5)

    assert in_front.run(again)


class TestFromInside(Conformance):
    """The conformance suite, with the scheduler's own word."""

    @pytest.fixture
    def subject(self, proved: ProbedSubject) -> Subject:
        return proved


@pytest.mark.parametrize("state", STATES)
def test_a_stop_is_quick_and_proved_from_inside(proved: ProbedSubject, state: str) -> None:
    closed = proved.run(lambda: _left_through(proved, state))
    _figures.setdefault(state, {})["with the plugin"] = _seconds(closed)
    if closed.stop.outcome != "raced_finish":
        assert closed.evidence is Evidence.PROBE, describe(closed)
        assert closed.ledgers.balances[Account.KV_HELD] == 0
    assert _seconds(closed) < (UNPOLLED_SECONDS if state in POLLED else STOP_SECONDS)


def test_a_disconnect_is_noticed_inside_without_a_gateway(proved: ProbedSubject) -> None:
    """The plugin alone: a client of SGLang itself leaves, and nobody aborts by id."""
    for state in POLLED:
        took = proved.run(lambda state=state: _left_watched(proved, state))  # type: ignore[misc]
        _figures.setdefault(state, {})["with the plugin, no gateway"] = took
        assert took < UNPOLLED_SECONDS


def test_a_storm_of_200_is_accounted_for(proved: ProbedSubject) -> None:
    """Finished, left, aborted by id, preempted, and cancelled while preempted: every token of KV comes back."""
    steps: list[float] = []
    assert proved.probing is not None
    proved.probing.on_frame = lambda engine, frame, lag: steps.append(frame.at)
    numbers = random.Random(7)

    async def one(number: int) -> Closed:
        await asyncio.sleep(numbers.random() * 4.0)
        fields: dict[str, Any] = {"n": 2} if number % 9 == 0 else {}
        if number % 5 == 0:
            fields["stream"] = False
        tokens = numbers.choice((4, 30, 90))
        exchange = await proved.ask(proved.shape.prompt(proved.number()), tokens=tokens, fields=fields)
        reply, request_id, kind = exchange.reply, proved.id_of(exchange), numbers.random()
        if kind > 0.3:
            await proved.through.wait(lambda: reply.ended, numbers.random() * 1.5)
            if kind > 0.85 and not reply.ended:
                await proved.order("preempt", request_id)
                if kind < 0.93:
                    await asyncio.sleep(0.2)
                    await proved.order("resume", request_id)
                    kind = 0.0
        if kind <= 0.3:
            await proved.through.wait(lambda: reply.ended, 120.0)
        else:
            await exchange.leave("reset" if number % 2 else "fin")
        return await proved.closed_book(request_id)

    async def storm() -> list[Closed]:
        return await asyncio.gather(*(one(number) for number in range(200)))

    closed = proved.run(storm)
    bad = [each for each in closed if each.ledgers.leaks or each.ledgers.written_off or not each.ledgers.all_closed]
    assert not bad, "\n".join(describe(each) for each in bad[:5])
    stopped = [each for each in closed if each.stop.semantics == "cancel" and each.stop.outcome == "confirmed"]
    assert len(stopped) > 50
    # One that left before the API process had read it never came to a scheduler, which can say nothing of it.
    unproved = [each for each in stopped if each.evidence is not Evidence.PROBE and _came_to_a_scheduler(each)]
    assert not unproved, "\n".join(describe(each) for each in unproved[:5])
    stops = [each.stop for each in stopped]
    taken = sorted(
        sum(stop.notified_at < at <= stop.released_at for at in steps)
        for stop in stops
        if stop.notified_at is not None and stop.released_at is not None
    )
    seconds = sorted(stop.released_at - stop.observed_at for stop in stops if stop.released_at is not None)
    print(
        f"\n{len(stops)} stops: released after {statistics.median(taken):.0f} frames (p50), "
        f"{taken[int(0.99 * len(taken))]} (p99); {statistics.median(seconds) * 1000:.0f} ms (p50), "
        f"{seconds[int(0.99 * len(seconds))] * 1000:.0f} ms (p99)"
    )
    assert statistics.median(taken) <= 4
    totals = proved.run(lambda: _totals(proved))
    assert totals == (0, 0, POOL_TOKENS), "nothing runs, and every token is free or in the cache"


def test_a_preempted_request_goes_on_unchanged(proved: ProbedSubject) -> None:
    async def preempt() -> tuple[str, str, Closed]:
        prompt = proved.shape.prompt(proved.number())
        alone = await proved.text_of(await proved.ask(prompt, tokens=400))
        exchange = await proved.ask(prompt, tokens=400)
        request_id = proved.id_of(exchange)
        await proved.through.wait(lambda: exchange.reply.events > 10, 30.0)
        assert (await proved.order("preempt", request_id)).answer == "applied"
        held = proved.gateway.controller.tracked[request_id].ledgers
        await asyncio.sleep(0.1)
        assert held.balances[Account.KV_HELD] == 0
        assert (await proved.order("resume", request_id)).answer == "accepted"
        return alone, await proved.text_of(exchange), await proved.closed_book(request_id)

    alone, resumed, closed = proved.run(preempt)
    assert resumed == alone
    assert not closed.ledgers.leaks, describe(closed)
    assert closed.ledgers.tokens_recomputed > 0


def test_a_cancel_outlives_a_preemption(proved: ProbedSubject) -> None:
    async def cancel() -> Closed:
        exchange = await proved.ask(proved.shape.prompt(proved.number()), tokens=400)
        request_id = proved.id_of(exchange)
        await proved.through.wait(lambda: exchange.reply.events > 5, 30.0)
        assert (await proved.order("preempt", request_id)).answer == "applied"
        await exchange.leave()
        return await proved.closed_book(request_id)

    closed = proved.run(cancel)
    assert (closed.stop.outcome, closed.evidence) == ("confirmed", Evidence.PROBE), describe(closed)


def test_penalties_are_not_preempted(proved: ProbedSubject) -> None:
    async def refused() -> str:
        exchange = await proved.ask(proved.shape.prompt(proved.number()), tokens=400, fields={"presence_penalty": 0.5})
        await proved.through.wait(lambda: exchange.reply.events > 3, 30.0)
        answer = await proved.order("preempt", proved.id_of(exchange))
        await proved.text_of(exchange)
        return answer.answer

    assert proved.run(refused) == "refused"


def test_a_full_pool_retracts_and_loses_nothing(proved: ProbedSubject) -> None:
    """SGLang's own preemption: admitted on the hope that they end early, eight requests do not fit."""
    fields = {"ignore_eos": False, "logit_bias": {"2": -100}, "stream": False}

    async def crowd() -> list[Closed]:
        asked = [await proved.ask(f"crowd {number}", tokens=760, fields=fields) for number in range(SLOTS)]
        for one in asked:
            await proved.through.wait(lambda one=one: one.reply.ended, 120.0)  # type: ignore[misc]
        return [await proved.closed_book(proved.id_of(one)) for one in asked]

    closed = proved.run(crowd)
    assert not [each for each in closed if each.ledgers.leaks], "\n".join(map(describe, closed))
    assert sum(each.ledgers.tokens_recomputed for each in closed) > 0, "nothing was retracted"


def test_an_abort_hits_whole_ids(proved: ProbedSubject) -> None:
    async def both() -> tuple[Any, Any]:
        control = proved.direct.control
        body = {"model": proved.shape.model, "prompt": "neighbours by name", "ignore_eos": True}
        short = asyncio.ensure_future(control("POST", "/v1/completions", {**body, "rid": "abc", "max_tokens": 600}))
        longer = asyncio.ensure_future(control("POST", "/v1/completions", {**body, "rid": "abcd", "max_tokens": 150}))
        await asyncio.sleep(0.4)
        await control("POST", "/abort_request", {"rid": "abc"})
        return (await short).json(), (await longer).json()

    short, longer = proved.run(both)
    assert short["choices"][0]["finish_reason"] == "abort"
    assert longer["choices"][0]["finish_reason"] == "length"
    assert longer["usage"]["completion_tokens"] == 150


@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_during_a_pause_is_not_lost(proved: ProbedSubject, stream: bool) -> None:
    async def paused() -> Closed:
        control = proved.direct.control
        await control("POST", "/pause_generation", {"mode": "in_place"})
        try:
            asked = await proved.ask(proved.shape.prompt(proved.number()), tokens=400, fields={"stream": stream})
            await asyncio.sleep(0.2)
            await asked.leave()
            await asyncio.sleep(0.2)
        finally:
            await control("POST", "/continue_generation", {})
        return await proved.closed_book(proved.id_of(asked))

    closed = proved.run(paused)
    assert closed.stop.outcome == "confirmed", describe(closed)
    assert closed.ledgers.tokens_computed < 50
    proved.run(proved.idle)


# ---- leaks that were put in on purpose ---------------------------------------------------------------------


@pytest.fixture
def impatient(with_plugin: rig.RunningEngine, faulty: Faulty, proved: ProbedSubject) -> Iterator[ProbedSubject]:
    """A gateway that calls a leak what is two seconds late; the engine's probe leaves the other one for it."""
    assert proved.probing is not None
    proved.run(proved.probing.close)
    with probed(with_plugin.url, with_plugin.model, faulty.socket, slots=SLOTS, settle_seconds=2.0) as subject:
        yield subject
    faulty.spare()
    proved.run(proved.probing.start)


def _leaked(closed: Closed, account: Account) -> int:
    """How much of `account` the books call leaked, of this request, and for how long at least."""
    found = [leak for leak in closed.ledgers.leaks or () if leak.account is account]
    assert found, describe(closed)
    print(f"\n{found[0].describe(closed.ledgers.last_at)}")
    for leak in found:
        assert leak.request_id == closed.request_id
        assert leak.found_at - leak.opened_by.at > 1.0
    return sum(leak.amount for leak in found)


def test_kept_tokens_are_named(impatient: ProbedSubject, faulty: Faulty) -> None:
    async def finish() -> Closed:
        await impatient.idle()
        # A pool that is full of cached prefixes has no tokens to lose.
        assert (await impatient.direct.control("POST", "/flush_cache")).status == 200
        faulty.strike("keep_tokens")
        exchange = await impatient.ask(impatient.shape.prompt(impatient.number()))
        await impatient.text_of(exchange)
        return await impatient.closed_book(impatient.id_of(exchange))

    assert _leaked(impatient.run(finish), Account.KV_HELD) == KEPT_TOKENS


def test_a_kept_adapter_is_named(impatient: ProbedSubject, faulty: Faulty) -> None:
    faulty.strike("keep_lora")

    async def finish() -> Closed:
        model = {"model": f"{impatient.shape.model}:a"}
        exchange = await impatient.ask(impatient.shape.prompt(impatient.number()), fields=model)
        await impatient.text_of(exchange)
        return await impatient.closed_book(impatient.id_of(exchange))

    assert _leaked(impatient.run(finish), Account.KV_LORA) == 1


def test_a_lost_abort_is_named(impatient: ProbedSubject, faulty: Faulty) -> None:
    faulty.strike("lose_abort", 100)

    async def cancel() -> Closed:
        exchange = await impatient.ask(impatient.shape.prompt(impatient.number()), tokens=1200)
        await impatient.through.wait(lambda: exchange.reply.events > 3, 30.0)
        await exchange.leave()
        return await impatient.closed_book(impatient.id_of(exchange))

    closed = impatient.run(cancel)
    assert _leaked(closed, Account.LINK_AWAITING) == 1
    assert _leaked(closed, Account.KV_HELD) > 10
    assert closed.stop.attempts > 1, "it was tried once only"


def test_figures(stock: rig.RunningEngine) -> None:
    """Prints what was measured: from the client's leaving to the engine's letting go, in milliseconds."""
    columns = ("SGLang alone", "with the plugin, no gateway", "through StopGuard", "with the plugin")
    print(f"\n{'state':<20}" + "".join(f"{column:>30}" for column in columns))
    for state, row in _figures.items():
        cells = (f"{row[column] * 1000:.0f}" if column in row else "" for column in columns)
        print(f"{state:<20}" + "".join(f"{cell:>30}" for cell in cells))
    assert set(_figures) == set(STATES)


# ---- how it is measured ------------------------------------------------------------------------------------


async def _left_alone(subject: Subject, state: str) -> float:
    """A client of the engine itself leaves. Seconds until the engine's own gauges are back."""
    await subject.idle()
    staged = await stage(subject.direct, subject.shape, state, subject.number())
    left_at = monotonic()
    await staged.victim.leave()
    seen_at = 0.0
    while not seen_at:
        gauges = await subject.gauges()
        assert gauges is not None
        assert gauges.running is not None
        assert gauges.waiting is not None
        if gauges.at > left_at and gauges.running + gauges.waiting <= len(staged.others):
            seen_at = gauges.at
        assert monotonic() < left_at + 30.0
    await staged.release()
    await subject.idle()
    return seen_at - left_at


async def _left_watched(subject: ProbedSubject, state: str) -> float:
    """The same, to the end of the step that the plugin tells of: the gauges are 15 steps behind."""
    await subject.idle()
    seen: list[wire.Frame] = []
    assert subject.probing is not None
    subject.probing.on_frame = lambda engine, frame, lag: seen.append(frame)
    staged = await stage(subject.direct, subject.shape, state, subject.number())
    left_at = monotonic()
    await staged.victim.leave()
    gone_at = 0.0
    while not gone_at:
        assert monotonic() < left_at + 30.0
        await asyncio.sleep(0.005)
        gone = (f.at for f in seen if f.at > left_at and f.running_now + f.waiting_now <= len(staged.others))
        gone_at = next(gone, 0.0)
    subject.probing.on_frame = None
    await staged.release()
    await subject.idle()
    return gone_at - left_at


async def _left_through(subject: Subject, state: str) -> Closed:
    """A client of the gateway leaves."""
    await subject.idle()
    return await subject.leave_in(state)


def _seconds(closed: Closed) -> float:
    """From the moment that the gateway saw its client leave to the release of its KV, by the best evidence."""
    stop = closed.stop
    end = stop.released_at or stop.acked_at or closed.ledgers.last_at
    return end - stop.observed_at


def _came_to_a_scheduler(closed: Closed) -> bool:
    """Other than by a prompt that was computed for children who were never sent."""
    parts = [text.split()[3] for _, text in closed.ledgers.marks if text.startswith("the scheduler has")]
    return len(parts) > 1 or parts == [closed.request_id]


async def _totals(subject: ProbedSubject) -> tuple[int, int, int]:
    """Running, waiting, and tokens free or cached, by a fresh snapshot."""
    assert subject.probing is not None
    await subject.idle()
    (source,) = (each for each in subject.probing.sources("sglang") if each.keeps_books)
    subject.probing.want_names("sglang")
    await asyncio.sleep(1.5)
    frame = source.frame
    assert isinstance(frame, wire.Frame)
    return frame.running_now, frame.waiting_now, frame.blocks_free_now + frame.blocks_cached_now
