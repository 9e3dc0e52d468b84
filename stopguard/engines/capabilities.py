"""What an engine can, as data: capabilities, what a launch of it needs, and the evidence that follows from a profile.

An adapter states these once. The gateway's heart does not read them (all that it needs is in the
`EngineProfile`); preemption, the conformance suite, the audit and `stopguard run` do.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from stopguard.ledger import Evidence
from stopguard.stops import EngineProfile

__all__ = ["Capabilities", "GaugeUnit", "LaunchNeeds", "derived_evidence"]


class GaugeUnit(enum.StrEnum):
    """What `EngineGauges.blocks_used` and `blocks_total` count at one engine."""

    NONE = "none"
    BLOCKS = "blocks"
    TOKENS = "tokens"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine can. The defaults are those of a server about which nothing is known."""

    #: Some door of kind CALL stops one request by our id.
    aborts_by_id: bool = False
    #: That door, given our id, also stops each child of a request with `n` > 1; else only the connection does.
    aborts_children: bool = False
    #: An abort also reaches live requests whose ids only begin like the given one.
    matches_by_prefix: bool = False
    #: An abort may be answered "not now": it has to be tried again.
    refuses_aborts: bool = False
    #: It understands `n` > 1.
    many_choices: bool = True
    #: One named request can be preempted and resumed, from inside.
    preempts: bool = False
    #: The body field of a request's priority; empty where there is none.
    priority_field: str = ""
    lower_is_more_urgent: bool = False
    #: The body field (true or false) that asks for output token ids; empty where they cannot be had.
    token_ids_field: str = ""
    gauge_unit: GaugeUnit = GaugeUnit.NONE
    #: How many requests it runs at once, each in a slot that has its KV; 0 where room is not dealt out like that.
    slots: int = 0
    #: The body fields that ask not to stop at the end token.
    endless_fields: Mapping[str, Any] = {}


class LaunchNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's command needs so that StopGuard works with it (`stopguard run`).

    `programs` are words of a command line that give the engine away. `plugin` is our name in its plugin system and
    `plugin_list_variable` the allow-list of that system, which is extended where the user has set one. `environment`
    is set where the user has not; `arguments` (``--name`` or ``--name=value``) are added where the command does not
    have them. `notes` is printed at the start.
    """

    programs: tuple[str, ...] = ()
    plugin: str = ""
    plugin_list_variable: str = ""
    environment: Mapping[str, str] = {}
    arguments: tuple[str, ...] = ()
    notes: str = ""


def derived_evidence(profile: EngineProfile, *, gauges: bool) -> Evidence:
    """The best evidence that can follow from a profile's doors, and from gauges where there are some.

    What an adapter writes into `EngineProfile.best_evidence` may not be more than this: a grade that nothing
    can reach would make every stop there a leak.
    """
    grades = [Evidence.SENT, *(door.worth for door in profile.doors)]
    if profile.stream_end_is_ack:
        grades.append(Evidence.STREAM_CLOSED)
    if gauges:
        grades.append(Evidence.GAUGE)
    if profile.probed:
        grades.append(Evidence.PROBE)
    return max(grades)
