"""The real llama.cpp server: stops in every state, with and without StopGuard, neighbours, storms, and its death.

The truth about each stop is read from the server's log, which disturbs nothing. What is asserted of times is generous:
the machine that runs this may be busy.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from stopguard.audit.client import SocketWorld
from stopguard.audit.plan import Plan
from stopguard.audit.runner import Audit
from stopguard.audit.verdict import Outcome
from stopguard.engines.recognition import ask_over_http, recognise
from stopguard.ledger import Evidence
from stopguard.testing import rig
from stopguard.testing.conformance import Conformance, Subject
from stopguard.testing.rig import RunningEngine
from stopguard_llamacpp.observer import LOG_VARIABLE
from tests.engines.fronts import front
from tests.engines.llamacpp_world import SHAPE, SLOTS, Truth, stop_seconds

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STATES = ("decode", "many_choices", "non_streaming", "prefill", "queued")
#: The server looks at a client that it does not stream to after a second without anybody's output.
LOOKS_SECONDS = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One server for all: 150 tokens a second, so that there is time to stop something; its whole queue in its log."""
    log = tmp_path_factory.mktemp("llamacpp") / "server.log"
    options = {"model": "exact", "slots": SLOTS, "batch": 128, "verbosity": 5}
    with rig.start(rig.recipe_of("llamacpp"), options=options, log=log) as engine:
        yield engine
        print(f"llama.cpp: started in {engine.started_seconds:.1f} s, {engine.memory_bytes() / 2**20:.0f} MiB")
    assert not engine.processes(), "the server's process is left behind"


@pytest.fixture
def truth(server: RunningEngine) -> Iterator[Truth]:
    log = Truth(server.log)
    log.look()
    yield log
    log.close()


@pytest.fixture(scope="module")
def subject(server: RunningEngine) -> Iterator[Subject]:
    with Subject(
        "llamacpp",
        server.url,
        model=server.model,
        slots=SLOTS,
        long_tokens=1200,
        neighbours=3,
        prompt_words=700,
        settle_seconds=30.0,
        fields={"cache_prompt": False},
    ) as subject:
        yield subject


class TestLlamaCppAdapter(Conformance):
    pass


def test_a_stop_takes_no_longer_through_the_gateway(server: RunningEngine, truth: Truth) -> None:
    """The table of stops: close → slot free, alone and through StopGuard. Nothing gets slower."""

    async def measure() -> dict[str, tuple[float, float]]:
        table = {}
        direct = SocketWorld(server.url, server.url)
        async with front("llamacpp", server.url) as through:
            for number, state in enumerate(STATES):
                alone = await stop_seconds(truth, direct, state, 100 + number, 6.0)
                await asyncio.sleep(2.5)  # the gateway's readings of the stop before are over
                table[state] = alone, await stop_seconds(truth, through.world, state, 200 + number, 6.0)
                await asyncio.sleep(2.5)
        await direct.aclose()
        return table

    table = asyncio.run(measure())
    print("\nclose → slot free, seconds: direct, through StopGuard")
    for state, (alone, guarded) in table.items():
        print(f"  {state:14} {alone:8.3f} {guarded:8.3f}")
    for state in ("decode", "many_choices"):
        assert max(table[state]) < LOOKS_SECONDS
    assert max(table["non_streaming"]) < 2.5 * LOOKS_SECONDS
    # Beside neighbours that stream the queued one is not looked at, with or without us: see the next test.
    assert table["queued"] == (math.inf, math.inf)
    assert table["prefill"][1] < table["prefill"][0] + 2.5 * LOOKS_SECONDS


def test_what_waits_at_the_gateway_is_stopped_at_once(server: RunningEngine, truth: Truth) -> None:
    """With as many requests at once as there are slots the queue is ours, and who leaves it never was in the engine."""

    async def leave() -> tuple[float, int]:
        async with front("llamacpp", server.url, concurrent_requests=SLOTS) as through:
            await truth.idle()
            busy = [await through.world.open(SHAPE.call(SHAPE.prompt(n), tokens=1200)) for n in range(SLOTS)]
            await through.world.wait(lambda: all(one.reply.events for one in busy), 60.0)
            waiting = await through.world.open(SHAPE.call("the one that waits", tokens=1200))
            await asyncio.sleep(0.3)
            inside = len(truth.inside)
            left_at = monotonic()
            await waiting.leave()
            (book,) = await through.settled(1)
            seconds = monotonic() - left_at
            assert book.stop is not None
            assert book.stop.outcome == "confirmed"
            for one in busy:
                await one.leave()
            await through.settled(SLOTS + 1)
            return seconds, inside

    seconds, inside = asyncio.run(leave())
    print(f"\na request that waits at the gateway is stopped in {seconds * 1000:.0f} ms")
    assert inside == SLOTS
    assert seconds < LOOKS_SECONDS


def test_a_starved_stop_is_not_called_a_success(server: RunningEngine, truth: Truth) -> None:
    """A non-streamed answer is left beside a neighbour that streams: unconfirmed, a leak while it lasts, then late."""

    async def leave() -> None:
        async with front("llamacpp", server.url, settle_seconds=2.0) as through:
            await truth.idle()
            neighbour = await through.world.open(SHAPE.call("the neighbour", tokens=6000))
            await through.world.wait(lambda: neighbour.reply.events > 3, 30.0)
            (known,) = truth.inside
            victim = await through.world.open(SHAPE.call("the victim", tokens=6000, stream=False))
            assert await truth.until(lambda: len(truth.inside) == 2, 10.0)
            (task,) = truth.inside - {known}
            await victim.leave()
            await asyncio.sleep(5.0)
            assert task in truth.inside, "the server looks at its clients beside a stream: the adapter is too careful"
            tracked = [one for one in through.gateway.controller.tracked.values() if one.ledgers.stop is not None]
            (pending,) = tracked
            stop = pending.ledgers.stop
            assert stop is not None
            assert stop.outcome == "unconfirmed"
            assert stop.evidence <= Evidence.SENT
            assert pending.ledgers.leaks
            assert stop.attempts > 1
            await neighbour.leave()
            books = await through.settled(2, 30.0)
            assert task not in truth.inside
            for book in books:
                assert book.stop is not None
                assert book.stop.outcome == "confirmed"
                assert book.stop.evidence is Evidence.GAUGE

    asyncio.run(leave())


def test_streams_that_follow_at_once_are_served(server: RunningEngine) -> None:
    """The server closes connections that have carried a stream without a word: none of them is used again."""

    async def one_by_one() -> int:
        served = 0
        async with front("llamacpp", server.url) as through:
            for number in range(40):
                one = await through.world.open(SHAPE.call(SHAPE.prompt(number), tokens=2))
                await through.world.wait(lambda one=one: one.reply.ended, 30.0)  # type: ignore[misc]
                served += one.reply.complete and one.reply.status == 200
        return served

    assert asyncio.run(one_by_one()) == 40


def test_neighbours_deliver_what_they_deliver_alone(server: RunningEngine) -> None:
    """Twenty of forty streams are cancelled at random; the other twenty say to the letter what they say alone."""
    numbers = random.Random(4)

    async def storm() -> tuple[list[str], list[str], Counter[str]]:
        async with front("llamacpp", server.url) as through:
            world = through.world
            prompts = [SHAPE.prompt(1000 + number) for number in range(20)]
            alone = []
            for prompt in prompts:
                one = await world.open(SHAPE.call(prompt, tokens=24))
                await world.wait(lambda one=one: one.reply.ended, 60.0)  # type: ignore[misc]
                alone.append(one.reply.text)
            stay, leave = [], []
            for number, prompt in enumerate(prompts):
                stay.append(await world.open(SHAPE.call(prompt, tokens=24)))
                leave.append(await world.open(SHAPE.call(SHAPE.prompt(2000 + number), tokens=400)))

            async def go(number: int) -> None:
                await asyncio.sleep(numbers.uniform(0.0, 3.0))
                await leave[number].leave("reset" if number % 2 else "fin")

            await asyncio.gather(*(go(number) for number in range(20)))
            await world.wait(lambda: all(one.reply.ended for one in stay), 120.0)
            books = await through.settled(60, 120.0)
            outcomes = Counter(book.stop.outcome for book in books if book.stop is not None)
            return alone, [one.reply.text for one in stay], outcomes

    alone, beside, outcomes = asyncio.run(storm())
    assert all(alone)
    assert beside == alone
    print(f"\n20 of 40 streams cancelled: {dict(outcomes)}")
    assert set(outcomes) <= {"confirmed", "raced_finish", "finished"}


def test_a_storm_leaves_nothing(server: RunningEngine, truth: Truth) -> None:
    """Requests of all shapes, left at random: every book is closed, and the server is as empty as before."""
    numbers = random.Random(7)

    async def storm() -> Counter[str]:
        async with front("llamacpp", server.url, settle_seconds=60.0) as through:
            await truth.idle()

            async def one(number: int) -> None:
                await asyncio.sleep(numbers.uniform(0.0, 4.0))
                call = SHAPE.call(
                    SHAPE.prompt(3000 + number, numbers.choice((6, 60))),
                    tokens=numbers.choice((4, 40, 300)),
                    stream=numbers.random() < 0.7,
                    choices=numbers.choice((1, 1, 1, 2)),
                )
                exchange = await through.world.open(call)
                await asyncio.sleep(numbers.choice((0.0, 0.05, 0.5, 2.0)))
                await exchange.leave(numbers.choice(("fin", "reset")))

            await asyncio.gather(*(one(number) for number in range(40)))
            books = await through.settled(40, 180.0)
            assert not through.gateway.controller.tracked
            assert not any(book.leaks for book in books)
            return Counter(book.stop.outcome if book.stop is not None else "finished" for book in books)

    outcomes = asyncio.run(storm())
    print(f"\na storm of 40: {dict(outcomes)}")
    assert set(outcomes) <= {"confirmed", "raced_finish", "finished"}
    assert outcomes["confirmed"] > 10
    asyncio.run(truth.idle(5.0))


def test_the_audit_finds_what_is_known(server: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this is configured: a starved look at clients, and a yes to an id that never was."""
    monkeypatch.setenv(LOG_VARIABLE, str(server.log))
    names = ("mid-stream", "non-streaming", "busy-neighbour", "queued", "unknown-id")

    async def audit() -> dict[str, tuple[set[Outcome], tuple[str, ...]]]:
        world = SocketWorld(server.url, server.url)
        plan = Plan(scenarios=names, deadline_seconds=2.0)
        report = await Audit(world, plan, url=server.url, observe="log").run()
        assert report.target.engine == "llamacpp"
        return {
            scenario.name: ({cell.outcome for cell in scenario.cells if cell.outcome.accuses}, scenario.notes)
            for scenario in report.scenarios
        }

    found = asyncio.run(audit())
    assert found["mid-stream"][0] == set()
    assert found["non-streaming"][0] == set()
    assert found["busy-neighbour"][0]
    assert found["queued"][0]
    assert any("an id that never was" in note for note in found["unknown-id"][1])


def test_it_is_recognised_and_says_its_version(server: RunningEngine) -> None:
    async def asked() -> str:
        client, ask = ask_over_http(server.url)
        async with client:
            return (await recognise(ask)).kind

    assert asyncio.run(asked()) == "llamacpp"


def test_killed_mid_stream_and_used_again(tmp_path: Path) -> None:
    """Its clients get an error that says whether to retry, the books close as failed, and a new one is used."""

    async def live() -> None:
        port = rig.free_port()
        recipe = rig.recipe_of("llamacpp")
        url = f"http://127.0.0.1:{port}"
        with rig.start(recipe, options={"model": "slow"}, port=port, log=tmp_path / "first.log") as first:
            async with front("llamacpp", url) as through:
                world = through.world
                streams = [await world.open(SHAPE.call(SHAPE.prompt(n), tokens=1000)) for n in range(3)]
                whole = await world.open(SHAPE.call("whole", tokens=1000, stream=False))
                await world.wait(lambda: all(one.reply.events > 2 for one in streams), 30.0)
                first.kill()
                everybody = [*streams, whole]
                assert await world.wait(lambda: all(one.reply.ended for one in everybody), 10.0)
                for one in everybody:
                    assert one.reply.errors or one.reply.failure, "a dead engine's answer looks whole"
                for book in await through.settled(4):
                    assert book.stop is not None
                    assert (book.stop.semantics, book.stop.outcome) == ("fail", "failed")
                    assert not book.leaks
                with rig.start(recipe, options={"model": "slow"}, port=port, log=tmp_path / "second.log"):
                    again = await world.open(SHAPE.call("again", tokens=8))
                    due_at = monotonic() + 20.0
                    while not (again.reply.complete and again.reply.status == 200) and monotonic() < due_at:
                        await world.wait(lambda reply=again.reply: reply.ended, 10.0)  # type: ignore[misc]
                        if again.reply.status != 200:
                            await asyncio.sleep(0.3)
                            again = await world.open(SHAPE.call("again", tokens=8))
                    assert again.reply.status == 200
                    assert again.reply.events > 0

    asyncio.run(live())
