"""How the gateway speaks to a reference engine (`stopguard refengine serve`).

The reference engine imitates others, so its doors differ by policy; closing the connection is one that
each of them has. What it does not imitate is its own truth under `/ref/`: gauges that are never late,
and with a probe its frames. Evidence from outside is therefore GAUGE; whoever embeds the engine and hands its
frames to `stopguard.stops.observe_frame` raises the profile to PROBE.
"""

from __future__ import annotations

from time import monotonic
from typing import ClassVar, Unpack

import msgspec

from stopguard.engines import Capabilities, EngineFacts, EngineUnreachable, GaugeUnit, Identity, LaunchNeeds
from stopguard.engines.openai import Connection, OpenAIEngine
from stopguard.engines.resumption import Resumption
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import CLOSE_CONNECTION, EngineProfile
from stopguard_refengine.resumption import RESUMPTION

__all__ = ["ReferenceEngineAdapter"]

_HEADER = "x-reference-engine"


class ReferenceEngineAdapter(OpenAIEngine):
    """One reference engine behind `base_url`."""

    fingerprint_paths: ClassVar[tuple[str, ...]] = ("/ref/gauges",)
    resumption: ClassVar[Resumption] = RESUMPTION
    launch_needs: ClassVar[LaunchNeeds] = LaunchNeeds(programs=("refengine",), plugin="stopguard")

    def __init__(self, name: str, base_url: str, **connection: Unpack[Connection]) -> None:
        super().__init__(name, base_url, **connection)
        self.profile = EngineProfile(name=name, doors=(CLOSE_CONNECTION,), best_evidence=Evidence.GAUGE)
        self.control_paths = frozenset({"/ref/snapshot", "/ref/gauges", "/ref/pause", "/ref/resume", "/ref/log"})
        self.gauge_seconds = 0.02
        self.capabilities = Capabilities(
            gauge_unit=GaugeUnit.BLOCKS, token_ids_field="return_token_ids", endless_fields={"ignore_eos": True}
        )

    @staticmethod
    def recognises(facts: EngineFacts) -> float:
        """Every answer of it says so; without its truth it can only be taken for the engine that it imitates."""
        if facts.status("/ref/gauges"):
            return 2.0 if facts.status("/ref/gauges") == 200 and facts.header("/ref/gauges", _HEADER) else 0.0
        return 0.5 if facts.header("/v1/models", _HEADER) else 0.0

    async def identify(self) -> Identity:
        response = await self.get("/ref/gauges")
        return Identity(kind="ref", version=response.headers.get(_HEADER, ""))

    async def gauges(self) -> EngineGauges | None:
        at = monotonic()  # before the call: the gauges are at least as new as this
        response = await self.get("/ref/gauges")
        try:
            read = msgspec.json.decode(response.content, type=_Gauges)
        except msgspec.DecodeError as error:
            raise EngineUnreachable(f"engine {self.name}: /ref/gauges answered with something else: {error}") from None
        return EngineGauges(
            at=at,
            running=read.running,
            waiting=read.waiting + read.preempted + read.paused + read.transferring,
            blocks_used=read.blocks_held + read.blocks_fenced,
            blocks_total=read.blocks_total,
            slots_used=sum(read.slots_held.values()),
        )


class _Gauges(msgspec.Struct):
    """The part of `/ref/gauges` that is used, in places, blocks and slots."""

    running: int
    waiting: int
    preempted: int
    paused: int
    transferring: int
    blocks_total: int
    blocks_held: int
    blocks_fenced: int
    slots_held: dict[str, int]
