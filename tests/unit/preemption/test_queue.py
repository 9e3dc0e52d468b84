"""The queue: order, fairness between tenants, promotion, and a bound on how long anybody waits."""

from __future__ import annotations

import math
from collections import Counter
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stopguard.preemption import FairQueue

LEVELS = 3
PROMOTE = 10.0


def queue(limit: int = 100) -> FairQueue[str]:
    return FairQueue(limit=limit, levels=LEVELS, promote_seconds=PROMOTE)


def offer(
    line: FairQueue[str],
    item: str,
    at: float,
    *,
    tenant: str = "t",
    weight: float = 1.0,
    rank: int = 0,
    pool: str = "e",
) -> tuple[bool, str | None]:
    return line.offer(item, tenant=tenant, weight=weight, rank=rank, pool=pool, arrived_at=at, at=at)


def order(line: FairQueue[str], at: float) -> list[str]:
    found = []
    while (picked := line.pick(at, lambda item: item)) is not None:
        found.append(picked[0])
        line.verify()
    return found


def test_one_class_and_one_tenant_go_in_the_order_of_arrival() -> None:
    line = queue()
    for number in range(5):
        offer(line, f"r{number}", float(number))
    assert order(line, 5.0) == ["r0", "r1", "r2", "r3", "r4"]


def test_a_higher_class_goes_first() -> None:
    line = queue()
    offer(line, "low", 0.0)
    offer(line, "middle", 1.0, rank=1)
    offer(line, "high", 2.0, rank=2)
    assert order(line, 3.0) == ["high", "middle", "low"]


def test_whoever_waits_rises_and_is_then_older_than_what_came_later() -> None:
    line = queue()
    offer(line, "old", 0.0)
    offer(line, "new", 19.0, rank=2)
    assert line.level_of("old") == 1
    assert order(line, 19.5) == ["new", "old"]
    offer(line, "old", 0.0)
    offer(line, "new", 19.0, rank=2)
    assert order(line, 20.0) == ["old", "new"]


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    line = queue()
    for number in range(6):
        offer(line, f"many{number}", 0.0, tenant="many")
    offer(line, "few0", 1.0, tenant="few")
    offer(line, "few1", 1.0, tenant="few")
    assert order(line, 2.0) == ["many0", "few0", "many1", "few1", "many2", "many3", "many4", "many5"]


def test_a_weight_is_a_share() -> None:
    line = queue()
    for number in range(30):
        offer(line, f"heavy{number}", 0.0, tenant="heavy", weight=3.0)
        offer(line, f"light{number}", 0.0, tenant="light")
    first = [item.rstrip("0123456789") for item in order(line, 1.0)[:20]]
    assert Counter(first) == {"heavy": 15, "light": 5}


def test_many_new_names_gain_nothing() -> None:
    line = queue()
    for number in range(3):
        offer(line, f"old{number}", 0.0, tenant="old")
    served = []
    for number in range(12):
        # Another tenant each time, that has never been there.
        offer(line, f"new{number}", 1.0, tenant=f"new{number}")
        picked = line.pick(2.0, lambda item: item)
        assert picked is not None
        served.append(picked[0])
    assert {"old0", "old1", "old2"} <= set(served)


def test_a_full_engine_holds_up_nobody_whose_engine_is_free() -> None:
    line = queue()
    offer(line, "a", 0.0, pool="full")
    offer(line, "b", 1.0, pool="free")
    assert line.pick(2.0, lambda item: item if item == "b" else None) == ("b", "b", 0)
    assert line.pick(2.0, lambda item: None) is None
    assert len(line) == 1


def test_a_full_queue_turns_away_the_newest_of_the_least_urgent() -> None:
    line = queue(limit=3)
    offer(line, "a", 0.0)
    offer(line, "b", 1.0)
    offer(line, "c", 2.0, rank=1)
    assert line.full_for("t", 1.0, 0)
    assert offer(line, "d", 3.0) == (False, None)
    assert not line.full_for("t", 1.0, 2)
    assert offer(line, "urgent", 3.0, rank=2) == (True, "b")
    assert "b" not in line
    assert line.displaced == 1


def test_a_full_queue_makes_room_for_a_tenant_with_less_than_its_share() -> None:
    line = queue(limit=4)
    for number in range(4):
        offer(line, f"greedy{number}", float(number), tenant="greedy")
    assert offer(line, "greedy4", 5.0, tenant="greedy") == (False, None)
    assert offer(line, "modest0", 5.0, tenant="modest") == (True, "greedy3")
    assert offer(line, "modest1", 5.0, tenant="modest") == (True, "greedy2")
    # Now it has its half.
    assert offer(line, "modest2", 5.0, tenant="modest") == (False, None)


def test_whoever_has_risen_is_not_displaced_by_the_class_to_which_it_rose() -> None:
    line = queue(limit=1)
    offer(line, "old", 0.0)
    assert offer(line, "newer", 15.0, rank=1) == (False, None)
    assert offer(line, "urgent", 15.0, rank=2) == (True, "old")


def test_ahead_and_levels() -> None:
    line = queue()
    offer(line, "a", 0.0, pool="e1")
    offer(line, "b", 0.0, rank=2, pool="e1")
    offer(line, "c", 0.0, rank=1, pool="e2")
    assert line.ahead_of(0, "e1") == 2
    assert line.ahead_of(1, "e1") == 1
    assert line.highest_level(lambda pool: pool == "e2") == 1
    assert line.highest_level(lambda pool: pool == "e3") == -1


class QueueMachine(RuleBasedStateMachine):
    """Anybody comes, goes and is served in any order; each served request must have waited within its bound."""

    WEIGHTS: ClassVar = {"a": 1.0, "b": 1.0, "c": 3.0, "d": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.line = queue(limit=12)
        self.at = 0.0
        self.names = 0
        self.standing: dict[str, tuple[str, int, float]] = {}
        # How many were picked while this request was at the top of the levels, other than itself.
        self.passed_at_top: Counter[str] = Counter()
        self.bounds: dict[str, float] = {}

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.at += seconds
        self.line.promote(self.at)

    @rule(tenant=st.sampled_from(list(WEIGHTS)), rank=st.integers(0, LEVELS - 1))
    def somebody_comes(self, tenant: str, rank: int) -> None:
        self.names += 1
        name = f"r{self.names}"
        waits, displaced = offer(self.line, name, self.at, tenant=tenant, weight=self.WEIGHTS[tenant], rank=rank)
        if displaced is not None:
            assert waits
            gone_tenant, gone_rank, _ = self.standing.pop(displaced)
            assert gone_rank <= rank
            assert gone_tenant != tenant or gone_rank < rank
        if waits:
            self.standing[name] = (tenant, rank, self.at)

    @precondition(lambda self: bool(self.standing))
    @rule(data=st.data())
    def somebody_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.standing)))
        assert self.line.remove(name)
        assert not self.line.remove(name)
        del self.standing[name]

    @precondition(lambda self: bool(self.standing))
    @rule(data=st.data(), rank=st.integers(0, LEVELS - 1))
    def somebody_changes_class(self, data: st.DataObject, rank: int) -> None:
        """It keeps the time that it has waited."""
        name = data.draw(st.sampled_from(sorted(self.standing)))
        assert self.line.rerank(name, rank, self.at)
        assert not self.line.rerank("nobody", rank, self.at)
        tenant, _, arrived_at = self.standing[name]
        self.standing[name] = (tenant, rank, arrived_at)
        # Others may have come to the top before it, or it before them: bounds count from here.
        self.bounds.clear()
        self.passed_at_top.clear()

    @precondition(lambda self: bool(self.standing))
    @rule()
    def somebody_is_served(self) -> None:
        top = [name for name in self.standing if self.line.level_of(name) == LEVELS - 1]
        for name in top:
            if name not in self.bounds:
                self.bounds[name] = self.bound(name)
        picked = self.line.pick(self.at, lambda item: item)
        assert picked is not None
        served, _, level = picked
        assert level == max([*(self.level(name) for name in self.standing)])
        del self.standing[served]
        for name in top:
            if name != served:
                self.passed_at_top[name] += 1
                assert self.passed_at_top[name] <= self.bounds[name], (name, self.bounds[name])

    def level(self, name: str) -> int:
        _, rank, arrived_at = self.standing[name]
        return min(LEVELS - 1, rank + int((self.at - arrived_at) / PROMOTE))

    def bound(self, name: str) -> float:
        """Picks that may go before `name` from now on, at most: its tenant's older ones, and the others' shares.

        Newer ones of its own tenant never go before it, so the number of the older ones cannot grow.
        """
        tenant, _, arrived_at = self.standing[name]
        older = sum(
            other != name and (owner, came_at <= arrived_at) == (tenant, True)
            for other, (owner, _, came_at) in self.standing.items()
        )
        weight = self.WEIGHTS[tenant]
        return (older + 1) * sum(each / weight + 1 for each in self.WEIGHTS.values())

    @invariant()
    def it_is_consistent_and_bounded(self) -> None:
        self.line.verify()
        assert len(self.line) == len(self.standing) <= 12
        for name in self.standing:
            assert self.line.level_of(name) == self.level(name)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    rank=st.integers(0, LEVELS - 1),
    weight=st.sampled_from([0.25, 1.0, 4.0]),
    rivals=st.lists(st.sampled_from([0.5, 1.0, 8.0]), min_size=1, max_size=5),
    picks_a_second=st.sampled_from([0.5, 1.0, 5.0]),
)
def test_nobody_starves_beside_endless_more_urgent_work(
    rank: int, weight: float, rivals: list[float], picks_a_second: float
) -> None:
    """One request beside rivals that always have the most urgent work waiting: it is served within its bound."""
    line = queue(limit=1000)
    at, number = 0.0, 0
    offer(line, "me", at, tenant="me", weight=weight, rank=rank)
    risen_after = (LEVELS - 1 - rank) * PROMOTE
    share_after = math.ceil(sum(rival / weight + 1 for rival in rivals)) + 1
    bound = risen_after + (share_after + 1) / picks_a_second
    while at <= bound:
        for name, rival in enumerate(rivals):
            for _ in range(2):
                number += 1
                offer(line, f"r{number}", at, tenant=f"rival{name}", weight=rival, rank=LEVELS - 1)
        picked = line.pick(at, lambda item: item)
        assert picked is not None
        if picked[0] == "me":
            return
        # The queue stays small: whoever is not served soon gives up.
        for item in list(line):
            if item != "me" and len(line) > 100:
                line.remove(item)
        at += 1 / picks_a_second
    raise AssertionError(f"still waiting after {bound} s")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=5))
def test_backlogged_tenants_get_their_shares(weights: list[float]) -> None:
    """Over any stretch no tenant is ahead of its share by more than one request and what rounding costs."""
    line = queue(limit=10_000)
    for name, weight in enumerate(weights):
        for number in range(200):
            offer(line, f"{name}.{number}", 0.0, tenant=str(name), weight=weight)
    served: Counter[str] = Counter()
    for _ in range(100):
        picked = line.pick(0.0, lambda item: item)
        assert picked is not None
        served[picked[0].partition(".")[0]] += 1
        paces = [served[str(name)] / weight for name, weight in enumerate(weights)]
        slack = 1 / min(weights) + 1 / max(weights)
        assert max(paces) - min(paces) <= slack + 1e-9
