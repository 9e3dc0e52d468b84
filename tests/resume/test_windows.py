"""Every window in which a stream is between two incarnations, with an engine that does what its script says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from time import monotonic
from typing import Any, ClassVar

import msgspec
import pytest

from stopguard.engines import OpenAIEngine
from stopguard.engines.resumption import Ask, Resumption
from stopguard.gateway.ledgered import LedgeredExchange
from stopguard.gateway.settings import GatewaySettings, ResumeSettings
from stopguard.ledger import EngineGauges
from stopguard.preemption.ways import Exactness, Gone, Parked, Refused, Running
from stopguard.stops import Engine, IllegalTransition, Semantics, Source, StopCause, Tracked, preemptions
from stopguard.telemetry.preemption import ContinuationNumbers
from stopguard_refengine.resumption import ReferenceResumption
from tests.cancellations.peers import Client, Seen, Setup, eventually, gateway

PROMPT = [1, 2, 3]
CONSTANTS = {"id": "answer-1", "object": "chat.completion.chunk", "created": 7, "model": "tiny"}


class Resumable(OpenAIEngine):
    """An engine that can be resumed at. Its gauges and the prompt's ids come when a test says so."""

    resumption: ClassVar[Resumption] = ReferenceResumption()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.free = asyncio.Event()
        self.asked = 0

    async def gauges(self) -> EngineGauges | None:
        self.asked += 1
        await self.free.wait()
        return EngineGauges(at=monotonic(), running=0, waiting=0)


class AsksForItsPrompt(ReferenceResumption):
    """Its chunks do not name the prompt: it must be asked for, and the answer takes its time."""

    names_prompt = False

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def prompt_ids(self, engine: Any, ask: Ask) -> Sequence[int]:
        self.asked.set()
        await self.answer.wait()
        return PROMPT


def chunk(ids: Sequence[int], text: str, finish: str | None = None, **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    return {**CONSTANTS, **extra, "choices": [{**choice, "token_ids": list(ids)}]}


def completion(ids: Sequence[int], text: str, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": list(ids)}
    return {"id": "other", "object": "text_completion", "created": 99, "model": "tiny", "choices": [choice]}


def send(engine: Seen, *events: dict[str, Any]) -> None:
    for event in events:
        data = b"data: %b\n\n" % json.dumps(event).encode()
        engine.write(b"%x\r\n%b\r\n" % (len(data), data))


ROLE = {**CONSTANTS, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


async def begin(setup: Setup, headers: dict[str, str] | None = None, **fields: Any) -> tuple[Client, Seen, Tracked]:
    """A client has the role and two tokens ("a", "b") of its stream."""
    client = await setup.client()
    wanted: dict[str, Any] = {"temperature": 0, "max_tokens": 10, **fields}
    await client.ask(stream=True, headers=headers, **wanted)
    engine = await setup.engines[0].next()
    engine.begin_stream()
    named = {} if fields.get("unnamed") else {"prompt_token_ids": PROMPT}
    send(engine, {**ROLE, **named}, chunk([10], "a"), chunk([11], "b"))
    await client.until(b'"b"')
    return client, engine, next(iter(setup.gateway.controller.tracked.values()))


def order(setup: Setup, tracked: Tracked) -> None:
    at = monotonic()
    cause = StopCause(semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="test", observed_at=at)
    setup.gateway.carry_out(preemptions.preempt(setup.gateway.controller, tracked, at, cause), at)


async def park(setup: Setup, tracked: Tracked) -> None:
    order(setup, tracked)
    parking = setup.gateway.parking
    assert parking is not None
    assert isinstance(await parking.preempt(tracked), Parked)
    assert tracked.machine.engine is Engine.SHELVED


def way(setup: Setup) -> Any:
    assert setup.gateway.parking is not None
    return setup.gateway.parking


def settings(**resume: Any) -> GatewaySettings:
    return GatewaySettings(resume=ResumeSettings(**{"failover": True, "failovers": 0, "tries": 2, **resume}))


def resumable(**more: Any) -> Any:
    return gateway(settings(**more), engine_class=Resumable)


def text_of(received: bytes) -> str:
    """The text that a client has, from the raw bytes of its response."""
    text = ""
    for line in received.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                text += choice["delta"].get("content") or ""
    return text


def body_of(engine: Seen) -> dict[str, Any]:
    return dict(json.loads(engine.body))


async def settled(setup: Setup) -> None:
    await eventually(lambda: not setup.gateway.controller.tracked)
    setup.assert_nothing_left()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def run(work: Any) -> None:
    asyncio.run(work)


def test_a_stream_goes_on_from_its_ids_and_its_client_sees_one_answer() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, first, tracked = await begin(setup)
            assert body_of(first)["return_token_ids"] is True
            order(setup, tracked)
            parking = asyncio.create_task(way(setup).preempt(tracked))
            await eventually(first.closed.is_set)
            # What the old incarnation still says is stale, and reaches nobody.
            send(first, chunk([12], "STALE"))
            assert isinstance(await parking, Parked)
            await client.until(b": preempted\n\n")
            resuming = asyncio.create_task(way(setup).resume(tracked))
            second = await setup.engines[0].next()
            assert second.head.startswith(b"POST /v1/completions ")
            sent = body_of(second)
            assert sent["prompt"] == [*PROMPT, 10]
            assert (sent["max_tokens"], sent["add_special_tokens"], sent["temperature"]) == (9, False, 0)
            second.begin_stream()
            send(second, completion([11], "b"), completion([12], "c"), completion([13], "d", "length"))
            assert isinstance(await resuming, Running)
            second.end_stream()
            received = await client.until(b"\r\n0\r\n\r\n")
            assert text_of(received) == "abcd"
            assert b"STALE" not in received
            assert b"other" not in received
            assert b"token_ids" not in received
            assert received.count(b"[DONE]") == 1
            assert received.count(b'"finish_reason":"length"') == 1
            assert way(setup).numbers() == ContinuationNumbers(preempted=1)
            await settled(setup)

    run(main())


def test_a_stream_cut_before_its_second_mark_is_run_again_from_its_prompt() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client = await setup.client()
            await client.ask(stream=True, temperature=0)
            first = await setup.engines[0].next()
            first.begin_stream()
            send(first, ROLE, chunk([10], "a"))
            await client.until(b'"a"')
            tracked = next(iter(setup.gateway.controller.tracked.values()))
            await park(setup, tracked)
            resuming = asyncio.create_task(way(setup).resume(tracked))
            second = await setup.engines[0].next()
            assert body_of(second) == body_of(first)
            second.begin_stream()
            send(second, {**ROLE, "id": "answer-2"}, chunk([10], "a", id="answer-2"), chunk([11], "b", id="answer-2"))
            assert isinstance(await resuming, Running)
            send(second, chunk([12], "", "stop", id="answer-2"))
            second.end_stream()
            received = await client.until(b"\r\n0\r\n\r\n")
            assert text_of(received) == "ab"
            assert received.count(b"assistant") == 1
            assert b"answer-2" not in received
            await settled(setup)

    run(main())


def test_usage_that_the_engine_shows_to_everybody_is_shown_after_a_cut_as_well() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client = await setup.client()
            await client.ask(stream=True, temperature=0)
            first = await setup.engines[0].next()
            first.begin_stream()
            send(first, ROLE, chunk([10], "a"))
            await client.until(b'"a"')
            tracked = next(iter(setup.gateway.controller.tracked.values()))
            await park(setup, tracked)
            resuming = asyncio.create_task(way(setup).resume(tracked))
            second = await setup.engines[0].next()
            second.begin_stream()
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            send(second, ROLE, chunk([10], "a"), {**chunk([11], "b", "stop"), "usage": usage})
            assert isinstance(await resuming, Running)
            second.end_stream()
            received = await client.until(b"\r\n0\r\n\r\n")
            assert b'"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}' in received
            await settled(setup)

    run(main())


def test_another_token_ends_the_stream_with_an_error_and_without_doubtful_text() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, _, tracked = await begin(setup)
            await park(setup, tracked)
            resuming = asyncio.create_task(way(setup).resume(tracked))
            second = await setup.engines[0].next()
            second.begin_stream()
            send(second, completion([99], "b"), completion([12], "DOUBTFUL"))
            assert isinstance(await resuming, Gone)
            received = await client.to_end()
            assert b"resume_mismatch" in received
            assert text_of(received) == "ab"
            assert b"DOUBTFUL" not in received
            assert b"[DONE]" not in received
            assert not received.endswith(b"0\r\n\r\n")
            await eventually(second.closed.is_set)
            assert way(setup).numbers() == ContinuationNumbers(mismatch=1)
            await settled(setup)

    run(main())


def test_where_only_the_text_differs_an_earlier_mark_is_tried() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, first, tracked = await begin(setup)
            send(first, chunk([12], "c"))
            await client.until(b'"c"')
            await park(setup, tracked)
            resuming = asyncio.create_task(way(setup).resume(tracked))
            second = await setup.engines[0].next()
            assert body_of(second)["prompt"] == [*PROMPT, 10, 11]
            second.begin_stream()
            send(second, completion([12], "?"))
            third = await setup.engines[0].next()
            assert body_of(third)["prompt"] == [*PROMPT, 10]
            third.begin_stream()
            send(third, completion([11], "b"), completion([12], "c"), completion([13], "d", "stop"))
            assert isinstance(await resuming, Running)
            third.end_stream()
            assert text_of(await client.until(b"\r\n0\r\n\r\n")) == "abcd"
            await settled(setup)

    run(main())


# ---- a cancel outlives a preemption --------------------------------------------------------------


def test_cancel_during_preempt() -> None:
    async def main() -> None:
        async with resumable() as setup:
            engine = setup.gateway.fleet.members[0].engine
            assert isinstance(engine, Resumable)
            engine.gauge_seconds = 0.001
            client, first, tracked = await begin(setup)
            order(setup, tracked)
            preempting = asyncio.create_task(way(setup).preempt(tracked))
            await eventually(lambda: engine.asked > 0)
            client.close()
            await eventually(lambda: tracked.machine.engine is not Engine.PREEMPTING)
            engine.free.set()
            assert isinstance(await preempting, Gone)
            assert isinstance(await way(setup).resume(tracked), Gone)
            await eventually(first.closed.is_set)
            await settled(setup)
            assert setup.engines[0].requests.empty()

    run(main())


def test_cancel_while_parked() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, _, tracked = await begin(setup)
            await park(setup, tracked)
            client.close()
            await settled(setup)
            assert isinstance(await way(setup).resume(tracked), Gone)
            assert setup.engines[0].requests.empty()

    run(main())


def test_cancel_during_resume_before_anything_was_sent() -> None:
    resumption = AsksForItsPrompt()

    class Asking(Resumable):
        pass

    Asking.resumption = resumption

    async def main() -> None:
        async with gateway(settings(), engine_class=Asking) as setup:
            client, _, tracked = await begin(setup)
            exchange = setup.gateway.registry.alive[tracked.request_id]
            assert isinstance(exchange, LedgeredExchange)
            assert exchange.transcript is not None
            exchange.transcript.prompt_ids = None
            await park(setup, tracked)
            resuming = asyncio.create_task(way(setup).resume(tracked))
            await resumption.asked.wait()
            client.close()
            await settled(setup)
            resumption.answer.set()
            assert isinstance(await resuming, Gone)
            assert setup.engines[0].requests.empty()

    run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_cancel_during_resume_at_the_engine(begun: bool) -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, _, tracked = await begin(setup)
            await park(setup, tracked)
            resuming = asyncio.create_task(way(setup).resume(tracked))
            second = await setup.engines[0].next()
            if begun:
                second.begin_stream()
            client.close()
            await eventually(second.closed.is_set)
            assert isinstance(await resuming, Gone)
            await settled(setup)
            assert setup.engines[0].requests.empty()

    run(main())


# ---- other ends --------------------------------------------------------------------------------------


def test_a_stream_that_has_finished_is_not_preempted() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, first, tracked = await begin(setup)
            send(first, chunk([12], "c", "stop"))
            await client.until(b'"stop"')
            assert way(setup).can(tracked).exactness is Exactness.NEVER
            order(setup, tracked)
            assert isinstance(await way(setup).preempt(tracked), Refused)
            setup.gateway.controller.preempt_refused(tracked, monotonic())
            first.end_stream()
            assert text_of(await client.until(b"\r\n0\r\n\r\n")) == "abc"
            await settled(setup)

    run(main())


def test_two_preemptions_of_one_request() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, _, tracked = await begin(setup)
            order(setup, tracked)
            with pytest.raises(IllegalTransition):
                order(setup, tracked)
            assert isinstance(await way(setup).preempt(tracked), Parked)
            assert isinstance(await way(setup).preempt(tracked), Gone)
            resuming = asyncio.create_task(way(setup).resume(tracked))
            second = await setup.engines[0].next()
            second.begin_stream()
            await eventually(lambda: tracked.machine.engine is Engine.DISPATCHED)
            # Cut again before anything of the second incarnation was compared.
            await park(setup, tracked)
            assert await resuming == Running(0)
            resuming = asyncio.create_task(way(setup).resume(tracked))
            third = await setup.engines[0].next()
            assert body_of(third)["prompt"] == [*PROMPT, 10]
            third.begin_stream()
            send(third, completion([11], "b"), completion([12], "c", "stop"))
            assert isinstance(await resuming, Running)
            third.end_stream()
            assert text_of(await client.until(b"\r\n0\r\n\r\n")) == "abc"
            assert tracked.preemptions == 2
            await settled(setup)

    run(main())


def test_a_deadline_while_parked_is_told() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, _, tracked = await begin(setup, headers={"X-StopGuard-Timeout": "0.3"})
            await park(setup, tracked)
            received = await client.until(b"\r\n0\r\n\r\n")
            assert b"total_deadline" in received
            assert text_of(received) == "ab"
            await settled(setup)
            assert setup.engines[0].requests.empty()

    run(main())


def test_the_connection_of_a_parked_stream_is_kept_awake() -> None:
    async def main() -> None:
        async with resumable(comment_seconds=0.02) as setup:
            client, _, tracked = await begin(setup)
            await park(setup, tracked)
            await client.until(b"preempted\n\n\r\nd\r\n: preempted\n\n\r\nd\r\n: preempted\n\n\r\n")
            client.close()
            await settled(setup)
            assert way(setup)._timer is None

    run(main())


def test_an_engine_that_died_while_its_stream_was_parked() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, _, tracked = await begin(setup)
            await park(setup, tracked)
            await setup.engines[0].stop()
            assert isinstance(await way(setup).resume(tracked), Refused)
            assert tracked.machine.engine is Engine.SHELVED
            assert isinstance(await way(setup).resume(tracked), Gone)
            received = await client.to_end()
            assert b"resume_failed" in received
            assert b"[DONE]" not in received
            assert text_of(received) == "ab"
            assert way(setup).numbers() == ContinuationNumbers(failed=1)
            await settled(setup)

    run(main())


def test_a_parked_stream_goes_on_elsewhere_when_its_engine_has_died() -> None:
    async def main() -> None:
        async with gateway(settings(), engines=2, engine_class=Resumable) as setup:
            client, _, tracked = await begin(setup)
            await park(setup, tracked)
            await setup.engines[0].stop()
            setup.gateway.fleet.members[0].eject(monotonic())
            resuming = asyncio.create_task(way(setup).resume(tracked))
            second = await setup.engines[1].next()
            second.begin_stream()
            send(second, completion([11], "b"), completion([12], "c", "stop"))
            assert isinstance(await resuming, Running)
            second.end_stream()
            assert text_of(await client.until(b"\r\n0\r\n\r\n")) == "abc"
            await settled(setup)

    run(main())


# ---- failover ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("death", ["reset", "truncated", "error event"])
def test_a_stream_goes_on_at_another_engine_when_its_own_dies(death: str) -> None:
    async def main() -> None:
        async with gateway(settings(failovers=1), engines=2, engine_class=Resumable) as setup:
            client, first, tracked = await begin(setup)
            if death == "reset":
                first.reset()
            elif death == "truncated":
                first.write(b"0\r\n\r\n")
            else:
                send(first, {"error": {"message": "EngineDeadError", "code": 500}})
                first.end_stream()
            second = await setup.engines[1].next()
            assert body_of(second)["prompt"] == [*PROMPT, 10]
            second.begin_stream()
            send(second, completion([11], "b"), completion([12], "c", "stop"))
            second.end_stream()
            received = await client.until(b"\r\n0\r\n\r\n")
            assert text_of(received) == "abc"
            assert b"EngineDeadError" not in received
            assert tracked.preemptions == 0
            assert way(setup).numbers() == ContinuationNumbers(engine_lost=1)
            await settled(setup)

    run(main())


def test_a_request_that_had_no_answer_yet_is_run_again_elsewhere() -> None:
    async def main() -> None:
        async with gateway(settings(failovers=1), engines=2, engine_class=Resumable) as setup:
            client = await setup.client()
            await client.ask(stream=True, temperature=0)
            first = await setup.engines[0].next()
            first.close()
            second = await setup.engines[1].next()
            assert body_of(second) == body_of(first)
            second.begin_stream()
            send(second, ROLE, chunk([10], "a"), chunk([11], "b", "stop"))
            second.end_stream()
            assert text_of(await client.until(b"\r\n0\r\n\r\n")) == "ab"
            await settled(setup)

    run(main())


def test_what_cannot_go_on_exactly_does_not_fail_over() -> None:
    async def main() -> None:
        async with gateway(settings(failovers=1), engines=2, engine_class=Resumable) as setup:
            client, first, _ = await begin(setup, temperature=0.7)
            assert "return_token_ids" not in body_of(first)
            first.reset()
            received = await client.to_end()
            assert b"engine_lost" in received
            await settled(setup)
            assert setup.engines[1].requests.empty()

    run(main())


# ---- who is ledgered -------------------------------------------------------------------------------


def test_with_consent_a_sampled_stream_goes_on_from_the_end_of_its_text() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, first, tracked = await begin(
                setup, headers={"X-StopGuard-Resume": "approximate"}, temperature=0.7, seed=4
            )
            send(first, chunk([12], ""))
            await eventually(lambda: setup.gateway.registry.alive[tracked.request_id].transcript.tokens == 3)
            assert way(setup).can(tracked).exactness is Exactness.APPROXIMATE
            await park(setup, tracked)
            resuming = asyncio.create_task(way(setup).resume(tracked))
            second = await setup.engines[0].next()
            assert body_of(second)["prompt"] == [*PROMPT, 10, 11]
            assert body_of(second)["max_tokens"] == 8
            second.begin_stream()
            send(second, completion([50], "x"), completion([51], "y", "stop"))
            assert isinstance(await resuming, Running)
            second.end_stream()
            assert text_of(await client.until(b"\r\n0\r\n\r\n")) == "abxy"
            await settled(setup)

    run(main())


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"stop": ["x"]}, {}),
        ({"temperature": 0.5}, {}),
        ({"n": 2}, {}),
        ({"something_new": 1}, {}),
        ({}, {"X-StopGuard-Resume": "never"}),
    ],
)
def test_what_may_not_go_on_is_passed_through_untouched(fields: dict[str, Any], headers: dict[str, str]) -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, first, tracked = await begin(setup, headers=headers, **fields)
            wanted = {"model": "tiny", "messages": [], "stream": True, "temperature": 0, "max_tokens": 10, **fields}
            assert body_of(first) == wanted
            assert way(setup).can(tracked).exactness is Exactness.NEVER
            order(setup, tracked)
            assert isinstance(await way(setup).preempt(tracked), Refused)
            setup.gateway.controller.preempt_refused(tracked, monotonic())
            send(first, chunk([12], "c", "stop"))
            first.end_stream()
            received = await client.until(b"\r\n0\r\n\r\n")
            assert b'"token_ids": [12]' in received
            await settled(setup)

    run(main())


def test_a_word_that_the_header_does_not_know_is_refused() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client = await setup.client()
            await client.ask(stream=True, headers={"X-StopGuard-Resume": "maybe"})
            assert b" 400 " in await client.until(b"\r\n\r\n")

    run(main())


def test_an_answer_that_is_no_stream_is_passed_on() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client = await setup.client()
            await client.ask(stream=True, temperature=0)
            engine = await setup.engines[0].next()
            engine.json({"error": "too long"}, status=b"400 Bad Request")
            status, _, body = await client.response()
            assert (status, body) == (400, b'{"error": "too long"}')
            await settled(setup)

    run(main())


def test_a_tool_parser_in_the_stream_ends_what_can_be_promised() -> None:
    async def main() -> None:
        async with resumable() as setup:
            client, first, tracked = await begin(setup)
            thinking = chunk([12], "")
            thinking["choices"][0]["delta"] = {"reasoning_content": "hm"}
            send(first, thinking)
            await client.until(b"hm")
            assert way(setup).can(tracked).exactness is Exactness.NEVER
            send(first, chunk([13], "c", "stop"))
            first.end_stream()
            assert text_of(await client.until(b"\r\n0\r\n\r\n")) == "abc"
            await settled(setup)

    run(main())


def test_the_settings_have_limits() -> None:
    from stopguard.errors import ConfigurationError

    with pytest.raises(ConfigurationError):
        ResumeSettings(tries=0)
    assert msgspec.structs.asdict(ResumeSettings())["failover"] is False
