"""StopGuard inside DeepInfer, over a scheduler that is scripted; and what the face's answers are worth outside."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx

from stopguard.engines import EngineFacts, RouteAnswer
from stopguard.stops import AbortAnswer, Semantics, Source, StopCause
from stopguard_deepinfer.adapter import DeepInferAdapter
from stopguard_deepinfer.inprocess import AbortSaid, InProcessStops

OURS = "sg-" + "a" * 32


class Scripted:
    """A scheduler with one list; sequences can be put in flight, where no abort finds them."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.free = 100
        self.aborts = 0
        self.scheduler = self

    def sequence(self, request_id: str, blocks: int = 5) -> Any:
        made = SimpleNamespace(
            request_id=request_id, seq_id=len(self.queue) + 1, blocks=blocks, status=SimpleNamespace(name="RUNNING")
        )
        self.free -= blocks
        self.queue.append(made)
        return made

    @property
    def running(self) -> list[Any]:
        return self.queue

    waiting: tuple[Any, ...] = ()

    def abort_request(self, request_ids: list[str]) -> tuple[int, int]:
        self.aborts += 1
        found = [one for one in self.queue if one.request_id in request_ids and one.status.name == "RUNNING"]
        for one in found:
            one.status = SimpleNamespace(name="FINISHED_ABORTED")
        return len(found), 0

    def free_seq(self, sequence: Any) -> None:
        self.free += sequence.blocks
        sequence.blocks = 0

    def get_num_free_gpu_blocks(self) -> int:
        return self.free


def test_nothing_found_is_tried_again_and_proved_two_steps_after_it_was() -> None:
    engine = Scripted()
    stops = InProcessStops(engine)
    sequence = engine.sequence("a")
    stops.add("a", sequence)
    engine.queue.clear()  # in flight
    assert stops.abort("a") is AbortSaid.TRYING
    assert stops.after_step() == []
    engine.queue.append(sequence)
    assert stops.after_step() == []
    assert stops.abort("a") is AbortSaid.APPLIED
    assert stops.after_step() == [], "one step is too early"
    assert stops.after_step() == [], "it is still in a queue"
    engine.queue.clear()
    (proof,) = stops.after_step()
    assert (proof.attempts, proof.blocks_repaired, engine.free) == (3, 5, 100)
    assert stops.pending == 0


def test_what_was_freed_is_not_freed_again() -> None:
    engine = Scripted()
    stops = InProcessStops(engine)
    sequence = engine.sequence("a")
    stops.add("a", sequence)
    assert stops.abort("a") is AbortSaid.APPLIED
    engine.free_seq(sequence)
    engine.queue.clear()
    proofs = [proof for _ in range(3) for proof in stops.after_step()]
    assert [proof.blocks_repaired for proof in proofs] == [0]
    assert engine.free == 100


def test_choices_are_caught_one_by_one() -> None:
    engine = Scripted()
    stops = InProcessStops(engine)
    first, second = engine.sequence("a"), engine.sequence("a")
    for sequence in (first, second):
        stops.add("a", sequence)
    engine.queue.remove(second)
    assert stops.abort("a") is AbortSaid.TRYING, "one of two is in flight"
    engine.queue.append(second)
    stops.after_step()
    assert second.status.name == "FINISHED_ABORTED"


def test_an_abort_that_overtakes_is_kept_for_a_while() -> None:
    engine = Scripted()
    stops = InProcessStops(engine)
    assert stops.abort("a") is AbortSaid.UNKNOWN
    stops.add("a", engine.sequence("a"))
    stops.after_step()
    assert engine.aborts == 1
    assert stops.abort("b") is AbortSaid.UNKNOWN
    for _ in range(1002):
        stops.after_step()
    late = engine.sequence("b")
    stops.add("b", late)
    stops.after_step()
    assert late.status.name == "RUNNING", "an abort of long ago is about somebody else"


def test_early_aborts_are_bounded() -> None:
    stops = InProcessStops(Scripted())
    for number in range(5000):
        stops.abort(str(number))
    assert len(stops._early) <= 4096


def test_a_prefill_engine_never_aborts() -> None:
    engine = Scripted()
    stops = InProcessStops(engine, aborts=False)
    stops.add("a", engine.sequence("a"))
    assert stops.abort("a") is AbortSaid.TRYING
    assert [proof for _ in range(5) for proof in stops.after_step()] == []
    assert engine.aborts == 0
    assert stops.pending == 1


def test_ended_requests_are_forgotten() -> None:
    engine = Scripted()
    stops = InProcessStops(engine)
    sequence = engine.sequence("a")
    stops.add("a", sequence)
    sequence.status = SimpleNamespace(name="FINISHED_STOPPED")
    stops.after_step()
    assert stops.abort("a") is AbortSaid.UNKNOWN
    assert engine.aborts == 0


# ---- outside --------------------------------------------------------------------------------------------


def answers(aborted: Any, status: int = 200) -> AbortAnswer:
    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"aborted": aborted, "tokens": 0})

    async def knock() -> AbortAnswer:
        engine = DeepInferAdapter("d", "http://127.0.0.1:1", transport=httpx.MockTransport(respond))
        cause = StopCause(semantics=Semantics.CANCEL, source=Source.API, reason="test", observed_at=0.0)
        reply = await engine.abort(OURS, "abort", cause)
        await engine.aclose()
        return reply.answer

    return asyncio.run(knock())


def test_zero_is_try_again_and_never_gone() -> None:
    assert answers(0) is AbortAnswer.REFUSED
    assert answers(3) is AbortAnswer.ACCEPTED
    assert answers(0, status=500) is AbortAnswer.FAILED


def test_recognition() -> None:
    models = RouteAnswer(status=200, text='{"data": [{"id": "m", "owned_by": "deepinfer"}]}')
    assert DeepInferAdapter.recognises(EngineFacts({"/v1/models": models})) == 1.0
    other = RouteAnswer(status=200, text='{"data": [{"id": "m", "owned_by": "vllm"}]}')
    assert DeepInferAdapter.recognises(EngineFacts({"/v1/models": other})) == 0.0
