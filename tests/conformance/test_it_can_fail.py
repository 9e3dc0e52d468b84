"""The suite itself: engines with a fault, and adapters that promise too much, do not pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from stopguard.engines import AbortReply, Capabilities
from stopguard.engines.resumption import Ask, EngineCall
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import CLOSE_CONNECTION, AbortAnswer, Door, DoorKind, EngineProfile, StopCause
from stopguard.testing.conformance import Conformance, Subject
from stopguard.testing.staging import StagingFailed
from stopguard_refengine.adapter import ReferenceEngineAdapter
from stopguard_refengine.resumption import ReferenceResumption
from tests.conformance.imitations import imitation

Check = Callable[[Conformance, Subject], None]


def left(state: str) -> Check:
    return lambda suite, subject: suite.test_a_client_that_leaves_is_stopped(subject, state)


def preempted(way: str) -> Check:
    return lambda suite, subject: suite.test_whoever_makes_room_loses_nothing(subject, way)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("abort-lost", left("decode")),
        ("disconnect-masked", left("decode")),
        ("disconnect-ignored-before-first-token", left("prefill")),
        ("disconnect-ignored-without-stream", left("non_streaming")),
        ("child-survives", Conformance.test_every_choice_ends_with_its_request),
        ("global-stop-flag", left("queued")),
        ("blocks-leaked-on-abort", Conformance.test_gauges_see_a_request_and_return),
        ("running-gauge-drifts", Conformance.test_gauges_see_a_request_and_return),
    ],
)
def test_a_faulty_engine_does_not_pass(fault: str, check: Check) -> None:
    with (
        imitation("vllm", truth=True, faults=(fault,)) as engine,
        Subject("ref", engine.url, settle_seconds=1.5, long_tokens=900) as subject,
        pytest.raises((AssertionError, StagingFailed)),
    ):
        check(Conformance(), subject)


class Boaster(ReferenceEngineAdapter):
    """Claims that a probe is inside."""

    def __init__(self, name: str, base_url: str, **options: Any) -> None:
        super().__init__(name, base_url, **options)
        self.profile = msgspec.structs.replace(self.profile, best_evidence=Evidence.PROBE)


class Silent(ReferenceEngineAdapter):
    """Has a door that it does not mention among its capabilities, and that does nothing."""

    def __init__(self, name: str, base_url: str, **options: Any) -> None:
        super().__init__(name, base_url, **options)
        door = Door(name="nothing", kind=DoorKind.CALL, worth=Evidence.ACCEPTED)
        self.profile = EngineProfile(name=name, doors=(door, CLOSE_CONNECTION), best_evidence=Evidence.GAUGE)

    async def abort(self, request_id: str, door_name: str, cause: StopCause) -> AbortReply:
        return AbortReply(answer=AbortAnswer.ACCEPTED)


class Deaf(Silent):
    """The same, and says that the door is one."""

    def __init__(self, name: str, base_url: str, **options: Any) -> None:
        super().__init__(name, base_url, **options)
        self.capabilities = msgspec.structs.replace(self.capabilities, aborts_by_id=True)


class Careless(Deaf):
    """Passes on whatever it is given, to an engine that matches by prefix."""

    async def abort(self, request_id: str, door_name: str, cause: StopCause) -> AbortReply:
        await self.request("POST", "/abort_request", json={"rid": request_id})
        return AbortReply(answer=AbortAnswer.ACCEPTED)


class Blind(ReferenceEngineAdapter):
    """Its gauges are always of an idle engine."""

    async def gauges(self) -> EngineGauges | None:
        found = await super().gauges()
        return None if found is None else msgspec.structs.replace(found, running=0, waiting=0)


class Unitless(ReferenceEngineAdapter):
    """Counts blocks and does not say so."""

    def __init__(self, name: str, base_url: str, **options: Any) -> None:
        super().__init__(name, base_url, **options)
        self.capabilities = Capabilities(endless_fields=self.capabilities.endless_fields)


class LosesToken(ReferenceResumption):
    """Goes on one token too early."""

    def resume(self, ask: Ask, prompt_ids: Sequence[int], delivered_ids: Sequence[int]) -> EngineCall:
        return super().resume(ask, prompt_ids, delivered_ids[:-1])


class StartsAgain(ReferenceResumption):
    """Forgets what was delivered."""

    def resume(self, ask: Ask, prompt_ids: Sequence[int], delivered_ids: Sequence[int]) -> EngineCall:
        return super().resume(ask, prompt_ids, ())


class Forgetful(ReferenceEngineAdapter):
    """Its streams do not go on where they were cut."""

    resumption = LosesToken()


class Amnesiac(ReferenceEngineAdapter):
    """Its streams begin anew."""

    resumption = StartsAgain()


@pytest.mark.parametrize(
    ("adapter", "policy", "check"),
    [
        (Boaster, "vllm", Conformance.test_it_claims_no_more_than_follows),
        (Silent, "vllm", Conformance.test_it_claims_no_more_than_follows),
        (Deaf, "vllm", Conformance.test_each_door_opens),
        (Careless, "sglang", Conformance.test_knocking_does_no_harm),
        (Blind, "vllm", Conformance.test_gauges_see_a_request_and_return),
        (Unitless, "vllm", Conformance.test_gauges_see_a_request_and_return),
        (Forgetful, "vllm", preempted("gateway")),
        (Amnesiac, "vllm", preempted("gateway")),
    ],
)
def test_an_adapter_that_promises_too_much_does_not_pass(
    adapter: type[ReferenceEngineAdapter], policy: str, check: Check
) -> None:
    with imitation(policy, truth=True) as engine:
        made = adapter("odd", engine.url)
        made.placement = msgspec.structs.replace(made.placement, body_field="rid" if policy == "sglang" else "")
        with Subject("odd", engine.url, engine=made, settle_seconds=2.0) as subject, pytest.raises(AssertionError):
            check(Conformance(), subject)


def test_an_unknown_grade_is_refused() -> None:
    with pytest.raises(Exception, match="'certain' is no grade of evidence"):
        Subject("ref", "http://127.0.0.1:1", expected={"decode": "certain"})
