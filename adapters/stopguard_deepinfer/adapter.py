"""DeepInfer behind an HTTP face (`face`): what its scheduler's answers are worth. Facts are of deepinfer 0.1.0.

* **Ids** come in `X-Request-Id`. All choices and prompts of one request share it, and `abort_sequence` takes every
  sequence that bears it, so an abort reaches the children.
* **`POST /abort` answers with what `abort_request` returned.** More than 0: the scheduler has marked the sequences, and
  will not schedule them again; that is *accepted*, and the blocks come back one or two steps later. 0 is *try again*,
  never *gone*: while a prefill step is in flight its sequences are in neither of the queues that an abort looks into
  (`csrc/engine/scheduler.hpp: abort_sequence`). A request that has ended answers 0 for ever, which its closed stream
  or the gauges tell first.
* **Gauges** are the scheduler's own counts, in sequences and blocks, and cost it nothing. A finished sequence counts
  until a later step has taken it out of its queue and its blocks are back.
* A request that is aborted between two chunks of its prompt leaves the queues and keeps its blocks. No door frees them;
  `inprocess` does, inside. From outside it shows as blocks that nobody runs for.
* The prefill engine of a pair never aborts.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, ClassVar, Final, Unpack

import msgspec

from stopguard.engines import (
    AbortReply,
    Capabilities,
    Connection,
    EngineFacts,
    EngineUnreachable,
    GaugeUnit,
    Identity,
    IdPlacement,
    LaunchNeeds,
    OpenAIEngine,
)
from stopguard.engines.ids import OUR_ID
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import CLOSE_CONNECTION, AbortAnswer, Door, DoorKind, EngineProfile, RetryPolicy, StopCause

__all__ = ["ABORT_DOOR", "DeepInferAdapter", "DeepInferGauges"]

ABORT_DOOR: Final = Door(name="abort", kind=DoorKind.CALL, worth=Evidence.ACCEPTED)
GAUGES_PATH: Final = "/deepinfer/gauges"
_GAUGE_SECONDS: Final = 0.1
#: Some prefill steps: until the scheduler may have the sequences in a queue again.
_TRY_AGAIN_SECONDS: Final = 0.05


class DeepInferGauges(msgspec.Struct):
    """The face's gauges; sequences in sequences, blocks in blocks. `ending`: finished, and still in a queue."""

    running: int
    waiting: int
    ending: int
    blocks_used: int
    blocks_total: int
    block_tokens: int
    steps_total: int
    generated_tokens_total: int
    aborts_total: int
    preemptions_total: int


class DeepInferAdapter(OpenAIEngine):
    """One DeepInfer engine behind `base_url`."""

    fingerprint_paths: ClassVar[tuple[str, ...]] = (GAUGES_PATH,)
    launch_needs: ClassVar[LaunchNeeds] = LaunchNeeds(programs=("deepinfer", "stopguard_deepinfer"))

    def __init__(self, name: str, base_url: str, **connection: Unpack[Connection]) -> None:
        super().__init__(name, base_url, **connection)
        self.profile = EngineProfile(
            name=name,
            # Asking comes before closing: a face that aborts once for a client that left may be told 0, and rest.
            doors=(ABORT_DOOR, CLOSE_CONNECTION),
            best_evidence=Evidence.GAUGE,
            # A prefill hides the request from an abort for some steps, mostly less than a second. Not oftener: each
            # knock waits for its turn between two steps, and a storm of them keeps the gauges from being read.
            retry=RetryPolicy(tries_per_door=10, first_wait_seconds=0.1, factor=1.4, tries=16),
        )
        self.placement = IdPlacement(header="X-Request-Id")
        self.control_paths = frozenset({"/abort", GAUGES_PATH})
        self.gauge_seconds = _GAUGE_SECONDS
        self.capabilities = Capabilities(
            aborts_by_id=True, aborts_children=True, refuses_aborts=True, gauge_unit=GaugeUnit.BLOCKS
        )

    @staticmethod
    def recognises(facts: EngineFacts) -> float:
        """The owner of its models, or its gauges."""
        if any(model.get("owned_by") == "deepinfer" for model in facts.models):
            return 1.0
        gauges = facts.json(GAUGES_PATH)
        return 0.95 if isinstance(gauges, dict) and "blocks_used" in gauges else 0.0

    @staticmethod
    def observer(*arguments: Any) -> Any:
        """The audit's eyes (`stopguard.audit.target.Maker`); the gateway itself needs no audit."""
        from stopguard_deepinfer.observer import DeepInferObserver  # noqa: PLC0415

        return DeepInferObserver(*arguments)

    async def identify(self) -> Identity:
        await self.get(GAUGES_PATH)
        return Identity(kind="deepinfer")

    async def gauges(self) -> EngineGauges | None:
        at = monotonic()
        response = await self.get(GAUGES_PATH)
        try:
            read = msgspec.json.decode(response.content, type=DeepInferGauges)
        except msgspec.MsgspecError as error:
            raise EngineUnreachable(
                f"engine {self.name}: {GAUGES_PATH} answered with something else: {error}"
            ) from None
        return EngineGauges(
            at=at,
            running=read.running + read.ending,
            waiting=read.waiting,
            blocks_used=read.blocks_used,
            blocks_total=read.blocks_total,
            block_tokens=read.block_tokens,
        )

    async def abort(self, request_id: str, door_name: str, cause: StopCause) -> AbortReply:
        if OUR_ID.fullmatch(request_id) is None:
            return AbortReply(answer=AbortAnswer.UNKNOWN)
        try:
            response = await self.request("POST", "/abort", json={"request_id": request_id})
            aborted = response.json()["aborted"]
        except (EngineUnreachable, ValueError, KeyError, TypeError):
            return AbortReply(answer=AbortAnswer.FAILED)
        if aborted:
            return AbortReply(answer=AbortAnswer.ACCEPTED)
        return AbortReply(answer=AbortAnswer.REFUSED, retry_after_seconds=_TRY_AGAIN_SECONDS)
