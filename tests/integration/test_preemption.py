"""Preemption through the whole gateway, against the reference engine over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

from stopguard.engines.registry import create
from stopguard.gateway.probing import ProbeSettings, Probing
from stopguard.gateway.routes import key_digest
from stopguard.gateway.server import Gateway, loop_factory
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Limits, Listener, Timeouts
from stopguard.preemption import Mode, PreemptionSettings, TenantStanding
from stopguard.refengine import EngineConfig, ReferenceEngine, StepCost
from stopguard.refengine.http_driver import RealClock
from stopguard.refengine.http_face import Face, FaceOptions
from stopguard.refengine.http_server import serving
from stopguard.refengine.probe import ReferenceProbe

pytestmark = pytest.mark.timeout(120)

SLOTS = 2
STEP_SECONDS = 0.008
LONG = 250
KEY = "a-trusted-key"
TOKEN = "a token that only the probe and its collector know"
TRUSTED = {"Authorization": f"Bearer {KEY}"}
URGENT = {**TRUSTED, "X-StopGuard-Class": "urgent"}
BACKGROUND = {"X-StopGuard-Class": "background"}
#: Two slots and nothing that could be preempted inside: work waits for a slot.
SLOTTED = EngineConfig(blocks=512, max_running=SLOTS, step_cost=StepCost(base_seconds=STEP_SECONDS))
#: Many places, and KV for two long requests.
CROWDED = EngineConfig(blocks=40, max_running=16, step_cost=StepCost(base_seconds=STEP_SECONDS))


class Answer:
    """One stream as its client has it; `first_at` on the monotonic clock."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: httpx.Headers = httpx.Headers()
        self.text = ""
        self.tokens = 0
        self.asked_at = monotonic()
        self.first_at = 0.0
        self.comments = 0
        self.done = False
        self.body: Any = None
        self.request_id = ""

    @property
    def first_seconds(self) -> float:
        return self.first_at - self.asked_at


class Place:
    """A gateway before an engine, and a client."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.http = http
        host, port = gateway.addresses[0]
        self.url = f"http://{host}:{port}"

    async def ask(
        self, prompt: str, max_tokens: int, headers: dict[str, str], answer: Answer | None = None, **body: Any
    ) -> Answer:
        answer = answer or Answer()
        asked = {"model": "base", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **body}
        async with self.http.stream("POST", self.url + "/v1/completions", json=asked, headers=headers) as response:
            answer.status, answer.headers = response.status_code, response.headers
            answer.request_id = response.headers.get("x-stopguard-id", "")
            if response.status_code != 200:
                answer.body = json.loads(await response.aread())
                return answer
            async for line in response.aiter_lines():
                if line.startswith(":"):
                    answer.comments += 1
                elif line == "data: [DONE]":
                    answer.done = True
                elif line.startswith("data: "):
                    answer.body = json.loads(line[6:])
                    if not answer.tokens:
                        answer.first_at = monotonic()
                    answer.tokens += 1
                    answer.text += "".join(choice["text"] for choice in answer.body.get("choices") or ())
        return answer

    def begin(self, prompt: str, max_tokens: int, headers: dict[str, str]) -> tuple[Answer, asyncio.Task[Answer]]:
        answer = Answer()
        return answer, asyncio.create_task(self.ask(prompt, max_tokens, headers, answer))

    async def fill(self, count: int = SLOTS) -> list[tuple[Answer, asyncio.Task[Answer]]]:
        """`count` long streams in the background, all under way."""
        begun = [self.begin(f"a long story, number {number}", LONG, BACKGROUND) for number in range(count)]
        await self.until(lambda: all(answer.tokens > 10 for answer, _ in begun))
        return begun

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        due_at = monotonic() + seconds
        while not condition():
            assert monotonic() < due_at, (
                f"not in {seconds} s: {self.gateway.preempting and self.gateway.preempting.coordinator!r}"
            )
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def placed(
    policy: str,
    config: EngineConfig,
    mode: Mode = Mode.PREEMPT,
    *,
    places: int = SLOTS,
    timeouts: Timeouts | None = None,
    limits: Limits | None = None,
    socket: Path | None = None,
    **wanted: Any,
) -> AsyncIterator[Place]:
    standings = {key_digest(KEY.encode()): TenantStanding(ceiling="urgent")}
    settings = GatewaySettings(
        listeners=(Listener(port=0),),
        timeouts=timeouts or Timeouts(),
        limits=limits or Limits(),
        preemption=PreemptionSettings(mode=mode, tenants=standings, **wanted),
    )
    face = Face(ReferenceEngine(config, policy, (), 0), RealClock(1.0), FaceOptions(), seed=0)
    probe = None if socket is None else ReferenceProbe(face, str(socket), TOKEN)
    async with contextlib.AsyncExitStack() as stack:
        if probe is not None:
            stack.callback(probe.close)
        url = await stack.enter_async_context(serving(face))
        engine = create("ref", "ref", url)
        gateway = Gateway([(engine, EngineSettings(concurrent_requests=places))], settings)
        await gateway.start()
        if socket is not None:
            probing = Probing(gateway, ProbeSettings(listen=(str(socket),), token=TOKEN), {"ref": "ref"})
            await probing.start()
        try:
            await gateway.fleet.refresh(gateway.fleet.members[0])
            async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
                yield Place(gateway, http)
        finally:
            assert await gateway.shutdown(drain_seconds=5.0) == 0
            if gateway.probing is not None:
                await gateway.probing.close()
            assert gateway.failed_effects == 0
            assert not len(gateway.book), repr(gateway.book)
            assert not len(gateway.admission.queue)
            if gateway.preempting is not None:
                assert not len(gateway.preempting.coordinator), gateway.preempting.coordinator
                gateway.preempting.coordinator.verify()
                assert all(member.places_kept == 0 for member in gateway.fleet.members)


def run(work: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work())  # type: ignore[arg-type]


def test_an_urgent_request_gets_a_slot_at_once_and_nobody_loses_a_byte() -> None:
    async def one(mode: Mode) -> tuple[float, list[Answer], Place]:
        async with placed("llamacpp", SLOTTED, mode) as place:
            begun = await place.fill()
            urgent = await place.ask("urgent: what is the time?", 4, URGENT)
            assert urgent.done
            answers = [await task for _, task in begun]
            return urgent.first_seconds, answers, place

    async def main() -> None:
        waited, undisturbed, _ = await one(Mode.QUEUE)
        preempted, answers, place = await one(Mode.PREEMPT)
        print(f"first token of the urgent request: {waited:.3f} s waiting, {preempted:.3f} s preempting")
        assert preempted < waited / 4
        assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
        assert all(answer.done for answer in answers)
        assert sum(answer.comments for answer in answers) >= 1
        preempting = place.gateway.preempting
        assert preempting is not None
        said = preempting.statistics()
        assert (said.taken, said.returned, said.parked, said.guard_closed) == (1, 1, 0, False)

    run(main)


def test_room_is_made_in_a_pool_that_is_full() -> None:
    async def main() -> None:
        async with placed("vllm", CROWDED, places=16, remaining_tokens_min=8) as place:
            begun = await place.fill(4)
            engine = place.gateway.fleet.members[0].engine

            async def used() -> float:
                gauges = await engine.gauges()
                assert gauges is not None
                assert gauges.blocks_used is not None
                assert gauges.blocks_total is not None
                return gauges.blocks_used / gauges.blocks_total

            for _ in range(2000):
                if await used() >= 0.9:
                    break
                await asyncio.sleep(0.01)
            urgent = await place.ask("urgent " * 40, 4, URGENT)
            assert urgent.done
            answers = [await task for _, task in begun]
            assert all(answer.done for answer in answers)
            preempting = place.gateway.preempting
            assert preempting is not None
            assert preempting.statistics().taken >= 1

    run(main)


def test_with_a_probe_the_engine_itself_makes_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with placed("vllm", CROWDED, places=16, socket=tmp_path / "probe.sock", remaining_tokens_min=8) as place:
            member = place.gateway.fleet.members[0]
            probing = place.gateway.probing
            assert probing is not None
            await place.until(lambda: probing.can("ref", "preempt"))
            await place.until(lambda: member.profile.probed)
            begun = await place.fill(4)

            def used() -> float:
                gauges = probing.gauges("ref", monotonic())
                assert gauges is not None
                return (gauges.blocks_used or 0) / (gauges.blocks_total or 1)

            await place.until(lambda: used() >= 0.9)
            urgent = await place.ask("urgent " * 40, 4, URGENT)
            assert urgent.done
            answers = [await task for _, task in begun]
            assert all(answer.done for answer in answers)
            # Nothing was stopped and sent again: the streams never paused in our hands.
            assert not any(answer.comments for answer in answers)
            preempting = place.gateway.preempting
            assert preempting is not None
            said = preempting.statistics()
            print(f"first token {urgent.first_seconds:.3f} s, {said}")
            assert said.taken >= 1
            assert said.taken == said.returned
            undisturbed = [
                await place.ask(f"a long story, number {number}", LONG, BACKGROUND) for number in range(len(answers))
            ]
            assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]

    run(main)


def test_a_client_cannot_raise_itself() -> None:
    async def main() -> None:
        async with placed("llamacpp", SLOTTED) as place:
            begun = await place.fill()
            impostor, task = place.begin("urgent, honestly", 4, {"X-StopGuard-Class": "urgent"})
            await asyncio.sleep(0.3)
            assert not impostor.tokens
            preempting = place.gateway.preempting
            assert preempting is not None
            assert (preempting.statistics().taken, preempting.statistics().lowered) == (0, 1)
            answer = await task
            assert answer.done
            for _, other in begun:
                await other
            books = place.gateway.book.find(answer.request_id)
            assert books is not None
            assert "class standard (urgent was asked for)" in [text for _, text in books.marks]
            unknown = await place.ask("hello", 4, {"X-StopGuard-Class": "vip"})
            assert (unknown.status, unknown.body["error"]["code"]) == (400, "unknown_class")

    run(main)


def test_a_deadline_that_cannot_be_met_is_refused_early_and_safely() -> None:
    async def main() -> None:
        async with placed("llamacpp", SLOTTED, Mode.QUEUE, places=1) as place:
            # Somebody always waits, so that the pace of the queue is known.
            await asyncio.gather(*(place.ask(f"question {number}", 12, {}) for number in range(14)))
            begun = [place.begin(f"later question {number}", 40, {}) for number in range(8)]
            await place.until(lambda: len(place.gateway.admission.queue) >= 7)
            hopeless = await place.ask("hurry", 4, {"X-StopGuard-First-Token-Timeout": "0.05"})
            assert hopeless.status == 429
            assert hopeless.body["error"]["code"] == "deadline_cannot_be_met"
            assert hopeless.headers["x-stopguard-retry"].startswith("safe")
            assert int(hopeless.headers["retry-after"]) >= 1
            patient = await place.ask("take your time", 4, {"X-StopGuard-First-Token-Timeout": "30"})
            assert patient.done
            await asyncio.gather(*(task for _, task in begun))

    run(main)


@pytest.mark.parametrize("what", ["leaves", "deadline", "cancelled", "shutdown"])
def test_whoever_ends_while_parked_leaves_nothing_behind(what: str) -> None:
    async def main() -> None:
        timeouts = Timeouts(total_seconds=1.5) if what == "deadline" else Timeouts()
        async with placed("llamacpp", SLOTTED, places=1, timeouts=timeouts) as place:
            begun = await place.fill(1)
            answer, task = begun[0]
            urgent, urgent_task = place.begin("urgent and long", LONG, URGENT)
            preempting = place.gateway.preempting
            assert preempting is not None
            await place.until(lambda: urgent.tokens > 5)
            assert preempting.statistics().parked == 1
            if what == "leaves":
                task.cancel()
            elif what == "cancelled":
                response = await place.http.delete(f"{place.url}/v1/requests/{answer.request_id}")
                assert response.status_code in (200, 202), response.text
            elif what == "shutdown":
                assert await place.gateway.shutdown(drain_seconds=0.05) == 0
            await place.until(lambda: preempting.statistics().parked == 0)
            if what == "leaves":
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            else:
                assert (await task).body.get("stopguard") or answer.body.get("error")
                assert not answer.body.get("usage")
            with contextlib.suppress(httpx.HTTPError):
                await urgent_task
            if what in ("leaves", "cancelled"):
                assert urgent.done

    run(main)


def test_many_urgent_ones_and_much_in_the_background_end_well() -> None:
    async def main() -> None:
        async with placed("llamacpp", SLOTTED, cool_down_seconds=0.1, window_tokens=100_000) as place:
            background = [place.begin(f"background {number}", 80, BACKGROUND) for number in range(6)]
            await place.until(lambda: sum(answer.tokens > 3 for answer, _ in background) >= SLOTS)
            urgent = []
            for number in range(12):
                urgent.append(place.begin(f"urgent {number}", 6, URGENT))
                await asyncio.sleep(0.1)
            answers = await asyncio.gather(*(task for _, task in [*background, *urgent]))
            assert all(answer.done for answer in answers)
            again = [await place.ask(f"background {number}", 80, BACKGROUND) for number in range(6)]
            assert [answer.text for answer in answers[:6]] == [answer.text for answer in again]
            preempting = place.gateway.preempting
            assert preempting is not None
            said = preempting.statistics()
            print(said, sorted(round(answer.first_seconds, 3) for answer, _ in urgent))
            assert said.taken >= 2
            assert said.taken == said.returned
            assert "no engine has room" not in said.refusals

    run(main)
