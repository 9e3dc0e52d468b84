"""How the audit looks at DeepInfer: by the scheduler's own counts behind its HTTP face, as often as it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from stopguard.audit.errors import TargetLost, TargetUnreachable
from stopguard.audit.target import Control, Facts, PlainObserver, Reading, TargetModel
from stopguard.engines import AbortReply, Identity
from stopguard.errors import ConfigurationError
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import AbortAnswer
from stopguard_deepinfer.adapter import GAUGES_PATH, DeepInferGauges

__all__ = ["DeepInferObserver"]

#: Some steps: a stop is finished two steps after it was applied.
_SAFE_INTERVAL_SECONDS: Final = 0.02


class DeepInferObserver(PlainObserver):
    """Watches one engine; see `stopguard.audit.target.Observer`."""

    def __init__(self, control: Control, clock: Callable[[], float], model: TargetModel, observe: str = "") -> None:
        if observe not in {"", "metrics"}:
            raise ConfigurationError(f"--observe {observe}: DeepInfer can be watched by metrics")
        self._control = control
        self._clock = clock
        self.facts = Facts(
            kind="deepinfer",
            grade=Evidence.GAUGE,
            safe_interval_seconds=_SAFE_INTERVAL_SECONDS,
            observed_by=f"{GAUGES_PATH}: the scheduler's own counts",
            abort_door=True,
            features={"endless": {}},
        )

    async def identify(self) -> Identity:
        if await self._read() is None:
            raise TargetUnreachable(f"{GAUGES_PATH} is missing: this is no DeepInfer behind StopGuard's face")
        return Identity(kind="deepinfer")

    async def read(self) -> Reading | None:
        read = await self._read()
        if read is None:
            raise TargetLost(f"the engine does not answer {GAUGES_PATH} any more")
        return Reading(
            gauges=EngineGauges(
                at=self._clock(),
                running=read.running + read.ending,
                waiting=read.waiting,
                blocks_used=read.blocks_used,
                blocks_total=read.blocks_total,
            ),
            steps_total=read.steps_total,
            generated_tokens_total=read.generated_tokens_total,
            aborts_total=read.aborts_total,
        )

    async def _read(self) -> DeepInferGauges | None:
        answer = await self._control("GET", GAUGES_PATH)
        try:
            return msgspec.json.decode(answer.body, type=DeepInferGauges)
        except msgspec.MsgspecError:
            return None

    async def abort(self, engine_id: str) -> AbortReply:
        answer = await self._control("POST", "/abort", {"request_id": engine_id})
        said = answer.json()
        if answer.status != 200 or not isinstance(said, dict):
            return AbortReply(answer=AbortAnswer.FAILED)
        # 0 may mean "in flight" and may mean "not here". The audit knocks once, so that a lost abort shows.
        return AbortReply(answer=AbortAnswer.ACCEPTED if said.get("aborted") else AbortAnswer.UNKNOWN)

    def engine_id(self, tag: str, response_id: str) -> str:
        return tag
