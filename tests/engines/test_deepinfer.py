"""DeepInfer's real C++ scheduler on a CPU: its two known faults, what the audit makes of them, what is mended."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

from stopguard.audit.client import SocketWorld
from stopguard.audit.plan import Plan
from stopguard.audit.runner import Audit
from stopguard.audit.verdict import Outcome
from stopguard.ledger import Evidence
from stopguard.testing import rig
from stopguard.testing.conformance import Conformance, Subject
from stopguard.testing.rig import RunningEngine
from stopguard.testing.staging import Shape
from tests.engines.fronts import front

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SHAPE = Shape(model="tiny", slots=8, long_tokens=1500, short_tokens=24, long_words=1500)
_ADAPTERS = Path(__file__).resolve().parents[2] / "adapters"
#: Blocks that a prompt of 200 tokens holds when its first 64 are computed: all of it, 16 tokens each.
_BLOCKS_OF_200 = 13


# ---- the scheduler alone, step by step ------------------------------------------------------------------


@pytest.fixture(scope="module")
def driven() -> dict[str, dict[str, Any]]:
    """What became of each abort (`deepinfer_drive`)."""
    home = rig.install(rig.recipe_of("deepinfer"))
    script = Path(__file__).with_name("deepinfer_drive.py")
    command = [str(rig.python_of(home)), str(script), str(home / "_C.so"), str(_ADAPTERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_sound_aborts_give_everything_back(driven: dict[str, dict[str, Any]]) -> None:
    assert driven["decoding"] == {"answer": 1, "blocks_used": [0, 0, 0]}
    assert driven["waiting"] == {"answer": 1, "blocks_used": [0, 0]}
    assert driven["preempted"]["answer"] == 3
    assert driven["preempted"]["blocks_used"][1:] == [0, 0, 0], "two steps after the abort"
    assert driven["choices"] == {"answer": 3, "running": 1}, "one id, three sequences, and a neighbour"


def test_between_two_chunks_the_blocks_are_never_freed(driven: dict[str, dict[str, Any]]) -> None:
    """The engine's own fault: the abort is accepted, nothing is left to run, and the blocks stay."""
    found = driven["between_chunks"]
    assert found == {"answer": 1, "blocks_used": [_BLOCKS_OF_200] * 6, "unfinished": False}


def test_an_abort_in_a_prefill_step_is_lost(driven: dict[str, dict[str, Any]]) -> None:
    """The engine's own fault: it answers 0, and the request runs to its end."""
    assert driven["in_flight"] == {"answer": 0, "tokens_after": 19}


def test_inside_both_are_mended(driven: dict[str, dict[str, Any]]) -> None:
    """`InProcessStops` gives the blocks back, repeats the lost abort, and proves each stop two steps later."""
    freed = driven["guarded_between_chunks"]
    assert (freed["said"], freed["attempts"], freed["repaired"]) == ("applied", 1, _BLOCKS_OF_200)
    caught = driven["guarded_in_flight"]
    assert (caught["said"], caught["attempts"], caught["repaired"]) == ("trying", 2, 0)
    for found in (freed, caught):
        assert (found["steps"], found["blocks_used"], found["tokens_after"], found["pending"]) == (2, 0, 0, 0)


def test_inside_an_abort_may_overtake_or_come_too_late(driven: dict[str, dict[str, Any]]) -> None:
    early = driven["overtaken"]
    assert early["said"] == "unknown"
    assert early["tokens"]["a"] <= 1
    assert early["tokens"]["b"] == 4, "a neighbour was stopped"
    assert (early["pending"], early["blocks_used"]) == (0, 0)
    assert driven["after_end"] == {"said": "unknown", "pending": 0, "blocks_used": 0}


# ---- behind the HTTP face -------------------------------------------------------------------------------


def serving(aborts: str) -> Iterator[RunningEngine]:
    with rig.start(rig.recipe_of("deepinfer"), options={"aborts": aborts}) as engine:
        yield engine
        print(f"deepinfer ({aborts}): {engine.started_seconds:.1f} s, {engine.memory_bytes() / 2**20:.0f} MiB")
    assert not engine.processes(), "the server's process is left behind"


@pytest.fixture(scope="module")
def between() -> Iterator[RunningEngine]:
    """A server that carries out aborts between steps."""
    yield from serving("between")


@pytest.fixture(scope="module")
def at_once() -> Iterator[RunningEngine]:
    """A server whose aborts come while a step is in flight."""
    yield from serving("at-once")


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningEngine]:
    """A server with `InProcessStops` inside."""
    yield from serving("guarded")


def blocks_used(engine: RunningEngine) -> int:
    used: int = httpx.get(f"{engine.url}/deepinfer/gauges", trust_env=False).json()["blocks_used"]
    return used


@pytest.fixture(scope="module")
def subject(at_once: RunningEngine) -> Iterator[Subject]:
    with Subject("deepinfer", at_once.url, model=at_once.model, long_tokens=800, prompt_words=1500) as subject:
        yield subject


class TestDeepInferAdapter(Conformance):
    pass


def accused(url: str, *names: str) -> dict[str, set[str]]:
    """The ledgers that the audit blames, by scenario."""

    async def audit() -> dict[str, set[str]]:
        plan = Plan(scenarios=names, deadline_seconds=2.0)
        report = await Audit(SocketWorld(url, url), plan, url=url).run()
        assert report.target.engine == "deepinfer"
        return {
            scenario.name: {cell.ledger for cell in scenario.cells if cell.outcome is Outcome.LEAK}
            for scenario in report.scenarios
        }

    return asyncio.run(audit())


def test_the_audit_finds_the_blocks(between: RunningEngine) -> None:
    found = accused(between.url, "mid-stream", "prefill", "abort-prefill", "queued")
    assert found == {"mid-stream": set(), "prefill": {"kv"}, "abort-prefill": {"kv"}, "queued": set()}
    assert blocks_used(between) >= _BLOCKS_OF_200, "they are really gone"


def test_the_audit_finds_the_lost_abort(at_once: RunningEngine) -> None:
    found = accused(at_once.url, "mid-stream", "prefill", "abort-prefill")
    assert found["mid-stream"] == set()
    assert found["prefill"] == {"stream"}, "the client left, and the request went on"
    assert found["abort-prefill"] == {"link"}, "the abort was told to the engine, and the request went on"


def test_the_audit_finds_nothing_where_it_is_mended(guarded: RunningEngine) -> None:
    found = accused(guarded.url, "mid-stream", "before-headers", "prefill", "abort-prefill", "storm")
    assert found == {name: set() for name in found}
    assert blocks_used(guarded) == 0


def test_from_outside_the_lost_abort_is_repeated(at_once: RunningEngine) -> None:
    """Alone, a request that is left in its prefill runs to its end; through the gateway it is stopped in moments."""

    async def seconds(world: SocketWorld) -> float:
        async with httpx.AsyncClient(trust_env=False) as client:
            exchange = await world.open(SHAPE.call(SHAPE.prompt(1, 1500), tokens=1500, stream=False))
            await asyncio.sleep(0.03)
            left_at = monotonic()
            await exchange.leave()
            while monotonic() - left_at < 30.0:
                gauges = (await client.get(f"{at_once.url}/deepinfer/gauges")).json()
                if gauges["running"] + gauges["waiting"] + gauges["ending"] == 0:
                    break
                await asyncio.sleep(0.01)
            return monotonic() - left_at

    async def both() -> tuple[float, float]:
        direct = SocketWorld(at_once.url, at_once.url)
        alone = await seconds(direct)
        await direct.aclose()
        async with front("deepinfer", at_once.url) as through:
            stopped = await seconds(through.world)
            (book,) = await through.settled(1)
            assert book.stop is not None
            assert book.stop.outcome == "confirmed"
            assert book.stop.evidence is Evidence.GAUGE
            assert book.stop.attempts > 1, "the first abort was not lost: this shows nothing"
        return alone, stopped

    alone, stopped = asyncio.run(both())
    print(f"\nleft in its prefill: {alone:.2f} s alone, {stopped:.2f} s through StopGuard")
    assert stopped < alone / 2


@pytest.mark.parametrize("aborts", ["at_once", "guarded"])
def test_a_storm_leaves_nothing(aborts: str, request: pytest.FixtureRequest) -> None:
    """Forty streams, twenty of them left at random: the others say what they say alone, and every book is closed."""
    engine: RunningEngine = request.getfixturevalue(aborts)
    numbers = random.Random(5)

    async def storm() -> tuple[list[str], list[str], Counter[str]]:
        async with front("deepinfer", engine.url, settle_seconds=60.0) as through:
            world = through.world
            prompts = [SHAPE.prompt(100 + number, numbers.choice((8, 300))) for number in range(20)]
            alone = []
            for prompt in prompts:
                one = await world.open(SHAPE.call(prompt, tokens=24))
                await world.wait(lambda one=one: one.reply.ended, 60.0)  # type: ignore[misc]
                alone.append(one.reply.text)
            stay, leave = [], []
            for number, prompt in enumerate(prompts):
                stay.append(await world.open(SHAPE.call(prompt, tokens=24)))
                words = numbers.choice((8, 600))
                leave.append(await world.open(SHAPE.call(SHAPE.prompt(500 + number, words), tokens=600)))

            async def go(number: int) -> None:
                await asyncio.sleep(numbers.uniform(0.0, 1.0))
                await leave[number].leave("reset" if number % 2 else "fin")

            await asyncio.gather(*(go(number) for number in range(20)))
            await world.wait(lambda: all(one.reply.ended for one in stay), 120.0)
            books = await through.settled(60, 120.0)
            assert not any(book.leaks for book in books)
            outcomes = Counter(book.stop.outcome if book.stop is not None else "finished" for book in books)
            return alone, [one.reply.text for one in stay], outcomes

    alone, beside, outcomes = asyncio.run(storm())
    assert all(alone)
    assert beside == alone
    print(f"\na storm at {aborts}: {dict(outcomes)}")
    assert set(outcomes) <= {"confirmed", "raced_finish", "finished"}
    if aborts == "guarded":
        assert blocks_used(engine) == 0


def test_killed_mid_stream(tmp_path: Path) -> None:
    """Its clients get an error, the books close as failed, and it is used again when it is back."""

    async def live() -> None:
        port = rig.free_port()
        recipe, url = rig.recipe_of("deepinfer"), f"http://127.0.0.1:{port}"
        with rig.start(recipe, port=port, log=tmp_path / "first.log") as first:
            async with front("deepinfer", url) as through:
                world = through.world
                streams = [await world.open(SHAPE.call(SHAPE.prompt(n), tokens=1500)) for n in range(3)]
                await world.wait(lambda: all(one.reply.events > 2 for one in streams), 30.0)
                first.kill()
                assert await world.wait(lambda: all(one.reply.ended for one in streams), 10.0)
                assert all(one.reply.errors or one.reply.failure for one in streams)
                for book in await through.settled(3):
                    assert book.stop is not None
                    assert (book.stop.semantics, book.stop.outcome) == ("fail", "failed")
                with rig.start(recipe, port=port, log=tmp_path / "second.log"):
                    due_at = monotonic() + 30.0
                    while True:
                        again = await world.open(SHAPE.call("again", tokens=8))
                        await world.wait(lambda reply=again.reply: reply.ended, 10.0)  # type: ignore[misc]
                        if again.reply.status == 200 or monotonic() > due_at:
                            break
                        await asyncio.sleep(0.3)
                    assert again.reply.status == 200
                    assert again.reply.complete

    asyncio.run(live())
