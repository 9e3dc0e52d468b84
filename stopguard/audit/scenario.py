"""What a scenario is, and the table of all of them in the order in which they are staged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from stopguard.audit.plan import Load, Plan
from stopguard.audit.stage import Stage

__all__ = ["SCENARIOS", "Scenario", "scenario"]

Run = Callable[[Stage], Awaitable[None]]


class Scenario(msgspec.Struct, frozen=True):
    """One staged state and its stop. `stages` says in one sentence what is done."""

    name: str
    title: str
    stages: str
    run: Run
    load: Callable[[Plan], Load]
    #: Whether it says anything about a gateway that is audited through.
    via: bool = True


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str, title: str, *, requests: int | Callable[[Plan], int], at_once: int | None = None, long: int = 0,
    via: bool = True,
) -> Callable[[Run], Run]:  # fmt: skip
    """Put a scenario into the table. Its docstring is what it stages."""

    def count(plan: Plan) -> int:
        return requests(plan) if callable(requests) else requests

    def load(plan: Plan) -> Load:
        return Load(requests=count(plan), at_once=count(plan) if at_once is None else at_once, long=long)

    def register(run: Run) -> Run:
        stages = " ".join((run.__doc__ or "").split())
        SCENARIOS[name] = Scenario(name, title, stages, run, load, via)
        return run

    return register
