"""What a request has beside its blocks, and each of it kept: on the imitation of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stopguard.probe import wire
from tests.vllm.imitation import Scheduler
from tests.vllm.scheduler_rig import ID, Rig, short

OTHER = "cmpl-other-0-12345678"


def slots(rig: Rig) -> list[str]:
    """What was said of slots since the last time."""
    rig.probe.flush()
    return [line for line in rig.sink.told() if line.startswith("Slot")]


def taken(*kinds: str, name: str = ID) -> list[str]:
    return [f"SlotTaken {short(name)} {kind} 1" for kind in kinds]


def returned(*kinds: str, name: str = ID) -> list[str]:
    return [f"SlotReturned {short(name)} {kind} 1" for kind in kinds]


def test_a_request_without_any_says_nothing_of_them() -> None:
    rig = Rig()
    rig.add()
    rig.core.step()
    rig.abort(ID)
    assert slots(rig) == []
    assert rig.probe.slots.held == {}


ALL: dict[str, Any] = {"lora": 1, "inputs": ("image",), "structured": True}


def test_taken_when_it_is_there_and_returned_at_a_stop() -> None:
    rig = Rig()
    rig.add(**ALL)
    assert slots(rig) == taken("grammar")
    rig.core.step()
    assert slots(rig) == taken("encoder", "lora")
    rig.core.step()
    assert slots(rig) == []
    rig.abort(ID)
    assert slots(rig) == returned("encoder", "grammar", "lora")
    assert rig.probe.slots.held == {}


def test_returned_at_an_end_of_its_own() -> None:
    rig = Rig()
    rig.add(tokens=1, **ALL)
    rig.core.step()
    assert slots(rig) == [*taken("grammar", "encoder", "lora"), *returned("encoder", "grammar", "lora")]


def test_a_preempted_request_keeps_its_grammar_only() -> None:
    rig = Rig()
    rig.add(**ALL)
    rig.core.step()
    slots(rig)
    rig.order("preempt")
    assert slots(rig) == returned("encoder", "lora")
    rig.order("resume")
    rig.core.step()
    assert slots(rig) == taken("encoder", "lora")
    rig.order("preempt")
    rig.order("abort")
    assert slots(rig) == [*returned("encoder", "lora"), *returned("grammar")]


def test_an_encoder_output_counts_once_for_each_request_that_keeps_it() -> None:
    rig = Rig()
    request = rig.add(inputs=("one", "two", "one"))
    rig.add(OTHER, inputs=("two",))
    rig.core.step()
    assert sorted(slots(rig)) == sorted([*taken("encoder", "encoder"), *taken("encoder", name=OTHER)])
    manager = rig.scheduler.encoder_cache_manager
    manager.free_encoder_input(request, 0)
    assert slots(rig) == []  # its third input is the same picture
    manager.free_encoder_input(request, 2)
    assert slots(rig) == returned("encoder")
    rig.abort(OTHER)
    assert slots(rig) == returned("encoder", name=OTHER)
    manager.reset()
    assert slots(rig) == returned("encoder")
    rig.abort(ID)
    assert slots(rig) == []


def test_without_adapters_none_is_looked_for() -> None:
    rig = Rig()
    rig.scheduler.lora_config = None  # type: ignore[assignment]
    bare = Rig.around(rig.core)
    bare.add(lora=1)
    bare.core.step()
    assert slots(bare) == []


# ---- kept ----------------------------------------------------------------------------------------------


def row(rig: Rig) -> dict[wire.SlotKind, int]:
    """The slots in a snapshot's one row, which is of a request that is gone."""
    (one,) = rig.probe.snapshot(1).requests
    assert (one.request_id, one.place) == (ID, "gone")
    return one.slots


def test_a_grammar_that_outlives_its_request_is_kept_and_comes_back_late() -> None:
    rig = Rig()
    request = rig.add(structured=True)
    assert request.structured_output_request is not None
    kept = [request.structured_output_request.grammar]
    del request
    rig.core.step()
    rig.abort(ID)
    assert slots(rig) == taken("grammar")
    assert row(rig) == {"grammar": 1}
    kept.clear()
    assert slots(rig) == returned("grammar")
    assert rig.probe.snapshot(1).requests == []


def test_what_is_kept_is_looked_at_again_although_the_engine_is_idle() -> None:
    rig, waits = Rig(), list[float]()
    rig.probe.slots.look_again = waits.append
    request = rig.add(structured=True)
    assert request.structured_output_request is not None
    kept = [request.structured_output_request.grammar]
    del request
    rig.abort(ID)
    for _ in range(3):
        rig.probe.flush()
    assert waits == [0.5], "one at a time"
    for _ in range(9):
        rig.at += waits[-1]
        rig.probe.flush()
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    kept.clear()
    rig.probe.flush()
    rig.at += 64
    rig.probe.flush()
    assert len(waits) == 10
    assert slots(rig)[-1:] == returned("grammar")


def test_nothing_is_concluded_from_a_grammar_whose_request_is_in_some_variable() -> None:
    rig = Rig()
    request = rig.add(structured=True)
    rig.core.step()
    rig.abort(ID)
    assert slots(rig) == [*taken("grammar"), *returned("grammar")]
    assert request.is_finished()


@pytest.mark.parametrize("grammar", [None, RuntimeError("no grammar"), 7], ids=["unfinished", "failed", "no weak one"])
def test_a_grammar_that_cannot_be_watched_goes_with_its_request(grammar: object) -> None:
    rig = Rig()
    request = rig.add(structured=True)
    assert request.structured_output_request is not None
    request.structured_output_request.grammar = grammar
    del request
    rig.abort(ID)
    assert slots(rig) == [*taken("grammar"), *returned("grammar")]


def test_an_encoder_output_that_still_names_it_is_kept() -> None:
    rig = Rig()
    rig.add(inputs=("image",))
    rig.core.step()
    manager = rig.scheduler.encoder_cache_manager

    class Keeps(set[str]):
        def discard(self, element: object) -> None:
            """The fault."""

    manager.cached["image"] = Keeps(manager.cached["image"])
    rig.abort(ID)
    assert slots(rig) == taken("encoder")
    assert row(rig) == {"encoder": 1}


def test_one_that_is_over_and_still_among_those_that_run_keeps_its_adapter() -> None:
    rig = Rig()
    request = rig.add(lora=1)
    rig.core.step()
    rig.abort(ID)
    rig.scheduler.running.append(request)  # the fault
    assert slots(rig) == taken("lora")
    assert row(rig) == {"lora": 1}
    rig.scheduler.running.remove(request)
    assert slots(rig) == returned("lora")


def test_a_snapshot_says_what_everybody_has() -> None:
    rig = Rig()
    rig.add(**ALL)
    rig.core.step()
    (one,) = rig.probe.snapshot(1).requests
    assert one.slots == {"grammar": 1, "encoder": 1, "lora": 1}


def test_an_encoder_decoder_says_that_it_does_not_say() -> None:
    class Other(Scheduler):
        def __init__(self) -> None:
            super().__init__()
            self.encoder_cache_manager = object()  # type: ignore[assignment]

    rig = Rig(scheduler=Other())
    assert rig.missing == ("encoder_cache_manager.cached",)


@pytest.fixture(autouse=True)
def _no_hook_failed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Rig] = []
    begin = Rig.__init__

    def remember(self: Rig, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        made.append(self)

    monkeypatch.setattr(Rig, "__init__", remember)
    yield
    assert [guard.name for rig in made for guard in rig.hooks.guards if guard.failures] == []


def test_events_follow_the_request_they_are_about() -> None:
    """A slot before its request would be nobody's."""
    rig = Rig()
    rig.add(**ALL)
    rig.core.step()
    kinds = [type(event) for event in rig.sink.events]
    assert kinds.index(wire.Added) < kinds.index(wire.SlotTaken)
