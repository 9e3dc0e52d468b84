"""Ways: how a request is taken off its engine so that it can go on later, and what that is worth.

There are two kinds. *Inside*, the engine's own scheduler preempts it between two steps and holds it: exact
for nearly everything. *At the gateway*, StopGuard stops it at the engine, keeps its client's stream open, and
lets it go on by token ids: exact only for what can be continued from token ids. A way says which of the three
verdicts holds for a request, and a request whose verdict is NEVER is never chosen.

Who reports what: the edge orders a preemption from the controller (`stops.preempt`) and then calls the way;
the way tells the controller the moment at which the engine has let go (`stops.preempted`), in the same turn of
the loop in which it knows, since a cancel may come in the next one. The answer of `preempt` and `resume` only
tells the edge how it ended.
"""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from stopguard.stops import Tracked

__all__ = ["EXACT", "Exactness", "Gone", "Outcome", "Parked", "Refused", "Running", "Verdict", "Way", "WayKind"]


class WayKind(enum.StrEnum):
    """Where the request waits while it is preempted."""

    INSIDE = "inside"
    """In the engine, held by its probe."""
    GATEWAY = "gateway"
    """With us: stopped at the engine, its client's stream kept open."""


class Exactness(enum.IntEnum):
    """How the stream goes on, compared with one that nobody disturbed."""

    NEVER = 0
    APPROXIMATE = 1
    """Plausible, but not the same tokens: only where the client agreed."""
    EXACT = 2


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """Whether a request may be preempted by a way. `reason` is a short stable word unless it is exact."""

    exactness: Exactness
    reason: str = ""


EXACT = Verdict(Exactness.EXACT)


class Parked(msgspec.Struct, frozen=True, gc=False):
    """The engine has let go of it and it waits. `recompute_tokens` will have to be computed again, as far as known."""

    recompute_tokens: int = 0


class Running(msgspec.Struct, frozen=True, gc=False):
    """It goes on. `recomputed_tokens` were computed again for it, as far as known."""

    recomputed_tokens: int = 0


class Refused(msgspec.Struct, frozen=True, gc=False):
    """It did not happen and nothing was changed. `retry_after_seconds` 0: when there is an occasion."""

    reason: str
    retry_after_seconds: float = 0.0


class Gone(msgspec.Struct, frozen=True, gc=False):
    """It ended meanwhile (finished, was cancelled, its engine died): nothing waits for it any more."""


Outcome = Parked | Running | Refused | Gone


class Way(Protocol):
    """One way to preempt at one or several engines.

    `can` is asked for each candidate at each decision: it must be cheap, change nothing, and be right for the
    request as it stands at this moment. `preempt` and `resume` never raise for what engines and clients do:
    they answer.
    """

    kind: WayKind

    def can(self, tracked: Tracked) -> Verdict:
        """Whether this request can be preempted this way now, and how well it would go on."""
        ...

    async def preempt(self, tracked: Tracked) -> Parked | Refused | Gone:
        """Take it off its engine. The controller has it in PREEMPTING already."""
        ...

    async def resume(self, tracked: Tracked) -> Running | Refused | Gone:
        """Let it go on. Inside, the controller has it in RESUMING; at the gateway it is SHELVED until dispatched."""
        ...
