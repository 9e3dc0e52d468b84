"""Another priority for a request that lives, on an imitation of a scheduler that sorts."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from stopguard.probe import wire
from stopguard_vllm.plugin_commands import actions_of
from tests.vllm.imitation import Request
from tests.vllm.scheduler_rig import Rig


class Prioritised(Request):
    """Sorted as `vllm/v1/request.py` does: the lower number first, then whoever came first."""

    def __init__(self, number: int, priority: int) -> None:
        super().__init__(f"chatcmpl-{name(number)}-12345678")
        self.priority = priority
        self.arrival_time = float(number)

    def __lt__(self, other: Prioritised) -> bool:
        return (self.priority, self.arrival_time) < (other.priority, other.arrival_time)


class Heap:
    """`PriorityRequestQueue`: no order but the heap's, which a changed key would break."""

    def __init__(self) -> None:
        self.heap: list[Any] = []

    def append(self, request: Any) -> None:
        heapq.heappush(self.heap, request)

    add_request = append

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = set(map(id, requests))
        self.heap = [each for each in self.heap if id(each) not in gone]
        heapq.heapify(self.heap)

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(self.heap))


def name(number: int) -> str:
    return f"sg-{number:032x}"


def sorting() -> Rig:
    rig = Rig()
    rig.scheduler.waiting = Heap()  # type: ignore[assignment]
    rig.scheduler.policy = SimpleNamespace(value="priority")  # type: ignore[attr-defined]
    return rig


def prioritise(rig: Rig, number: int, priority: int) -> str:
    rig.sink.waiting.append(wire.Command(1, "prioritise", name(number), priority=priority))
    rig.commands.run()
    return rig.sink.answers[-1][0]


def test_whoever_waits_is_sorted_anew() -> None:
    rig = sorting()
    for number, priority in enumerate((0, 0, -5, 3, 0)):
        rig.scheduler.add_request(Prioritised(number, priority))
    assert prioritise(rig, 3, -10) == "applied"
    assert prioritise(rig, 2, 9) == "applied"
    queue: Any = rig.scheduler.waiting
    order = [heapq.heappop(queue.heap).request_id for _ in range(5)]
    assert [int(each[12:44], 16) for each in order] == [3, 0, 1, 4, 2]


def test_whoever_runs_only_gets_the_number() -> None:
    rig = sorting()
    running = Prioritised(1, 0)
    rig.scheduler.requests[running.request_id] = running
    rig.scheduler.running.append(running)
    assert prioritise(rig, 1, -10) == "applied"
    assert running.priority == -10
    assert not list(rig.scheduler.waiting)


def test_nobody_else_is_touched() -> None:
    rig = sorting()
    other = Prioritised(17, 0)
    rig.scheduler.add_request(other)
    assert prioritise(rig, 1, -10) == "unknown"
    assert other.priority == 0


@pytest.mark.parametrize(("policy", "sorts"), [("fcfs", False), ("priority", True), (None, False)])
def test_only_a_scheduler_that_sorts_says_that_it_can(policy: str | None, sorts: bool) -> None:
    rig = Rig()
    if policy is not None:
        rig.scheduler.policy = SimpleNamespace(value=policy)  # type: ignore[attr-defined]
    assert ("prioritise" in actions_of(rig.core)) is sorts
    assert {"preempt", "hold", "resume", "snapshot"} <= set(actions_of(rig.core))
