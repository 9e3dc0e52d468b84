"""Classes: how urgent a request may be, whoever asks for it.

A client can ask for a class in three ways, the first of which counts: the header `X-StopGuard-Class`, OpenAI's
`service_tier`, or the `priority` of the engines' own APIs. What it gets is the least of what it asked for and its
tenant's ceiling, so nobody can raise themselves; asking for less is always granted. What an engine is sent as a
priority is the class's own urgency, never the client's number.

Facts: OpenAI's `service_tier` is one of auto, default, flex, scale, priority (openai-python 2.x
`types/chat/completion_create_params.py`). vLLM's `priority` serves lower numbers first (`vllm/v1/core/sched`,
"lower means earlier"), SGLang's higher ones unless told otherwise (`--schedule-low-priority-values-first`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stopguard.errors import ClientError
from stopguard.preemption.settings import ClassSettings, PreemptionSettings, TenantStanding

__all__ = ["ChangedTooOften", "Claim", "Classes", "ClassesOff", "Granted", "PriorityClass", "UnknownClass"]

_ORDINARY = TenantStanding()
_PLAIN_TIERS = frozenset({"auto", "default"})


class UnknownClass(ClientError):
    """A client asked by header for a class that is not configured."""


class ClassesOff(ClientError):
    """A class is to be changed where there is one for all."""


class ChangedTooOften(ClientError):
    """A request's class has been changed as often as it may be."""

    status_hint = 429


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True):
    """One class. `rank` counts the classes below it: 0 is the least urgent."""

    name: str
    rank: int
    urgency: int
    preempts: bool
    preemptible: bool


class Granted(msgspec.Struct, frozen=True, gc=False):
    """The class that a request got, and the one it asked for if that was more."""

    priority_class: PriorityClass
    lowered_from: str = ""


class Claim(msgspec.Struct, kw_only=True):
    """What one request may claim: its class, its tenant, and how much room it will need, as far as can be known.

    `prompt_tokens` is an estimate until the engine says better; `max_tokens` is what the client allows. `returned`:
    it made room once and is sent again, before those of its class that came while it waited. `served_as` is the
    class to which it has risen by waiting, which is the one that its engine is told. `changes` counts how often its
    class was changed while it lived.
    """

    priority_class: PriorityClass
    tenant: str
    weight: float
    arrived_at: float
    prompt_tokens: int = 0
    max_tokens: int | None = None
    returned: bool = False
    served_as: PriorityClass | None = None
    changes: int = 0

    def engine_priority(self, *, lower_is_more_urgent: bool) -> int:
        """Its urgency as an engine gets it, with the sign that the engine wants."""
        urgency = (self.served_as or self.priority_class).urgency + self.returned
        return -urgency if lower_is_more_urgent else urgency

    @property
    def rank(self) -> int:
        return self.priority_class.rank

    def blocks(self, block_tokens: int, output_tokens: int = 0) -> int:
        """The KV blocks that it needs to go on with `output_tokens` behind it: its context and one more token."""
        return -(-(self.prompt_tokens + output_tokens + 1) // max(1, block_tokens))


class Classes:
    """The configured classes, in the order of their urgency."""

    def __init__(self, settings: PreemptionSettings) -> None:
        by_urgency = sorted(settings.classes.items(), key=lambda named: named[1].urgency)
        self.ranked = tuple(_ranked(rank, name, each) for rank, (name, each) in enumerate(by_urgency))
        self.by_name: Mapping[str, PriorityClass] = {each.name: each for each in self.ranked}
        self.default = self.by_name[settings.default_class]
        self._ceiling = self.by_name[settings.ceiling]
        self._tenants = settings.tenants

    @property
    def top(self) -> int:
        """The rank of the most urgent class."""
        return len(self.ranked) - 1

    def weight(self, tenant: str) -> float:
        """The tenant's share of a contended queue, relative to 1."""
        return self._tenants.get(tenant, _ORDINARY).weight

    def grant(
        self,
        tenant: str,
        *,
        header: str = "",
        tier: str = "",
        priority: int | None = None,
        lower_is_more_urgent: bool = True,
    ) -> Granted:
        """The class of a request that asks like this. `UnknownClass` when its header names none of ours.

        An unknown `service_tier` is the engine's affair and counts as none; `priority` is read with the
        engine's own sign.
        """
        standing = self._tenants.get(tenant, _ORDINARY)
        usual = self.by_name[standing.usual_class] if standing.usual_class else self.default
        ceiling = self.by_name[standing.ceiling] if standing.ceiling else self._ceiling
        if header:
            asked = self.named(header, "X-StopGuard-Class")
        elif tier and tier not in _PLAIN_TIERS:
            asked = self._of_tier(tier, usual)
        elif priority is not None and not tier:
            asked = self._of_urgency(-priority if lower_is_more_urgent else priority)
        else:
            asked = usual
        if asked.rank > ceiling.rank:
            return Granted(ceiling, asked.name)
        return Granted(asked)

    def named(self, name: str, where: str = "class") -> PriorityClass:
        """The class `name`, in whatever case. `UnknownClass` begins with `where` it stood."""
        found = self.by_name.get(name.lower())
        if found is None:
            known = ", ".join(self.by_name)
            raise UnknownClass(f"{where} {name[:64]!r} is no class here; there are: {known}")
        return found

    def _of_tier(self, tier: str, usual: PriorityClass) -> PriorityClass:
        """Flex is the least that there is, priority the most; a class of that name goes before both."""
        own = self.by_name.get(tier)
        if own is not None:
            return own
        return {"flex": self.ranked[0], "priority": self.ranked[-1], "scale": self.ranked[-1]}.get(tier, usual)

    def _of_urgency(self, urgency: int) -> PriorityClass:
        """The most urgent class that is not above `urgency`."""
        found = self.ranked[0]
        for each in self.ranked:
            if each.urgency <= urgency:
                found = each
        return found


def _ranked(rank: int, name: str, settings: ClassSettings) -> PriorityClass:
    return PriorityClass(
        name=name,
        rank=rank,
        urgency=settings.urgency,
        preempts=settings.preempts,
        preemptible=settings.preemptible,
    )
