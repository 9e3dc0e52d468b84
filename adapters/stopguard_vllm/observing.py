"""How an audit looks at vLLM from outside: its Prometheus page, and its abort route where there is one.

vLLM counts no cancels: `request_success_total{finished_reason="abort"}` exists and stays where it is, since an
aborted request leaves no statistics (`v1/engine/output_processor.py: abort_requests`). The audit's own scenario
finds that; the counter is read here as it is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from stopguard.audit.errors import TargetLost, TargetUnreachable
from stopguard.audit.target import Control, Facts, PlainObserver, Reading, TargetModel
from stopguard.engines import AbortReply, Identity
from stopguard.errors import ConfigurationError
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import AbortAnswer
from stopguard_vllm.metrics import parse
from stopguard_vllm.names import ABORT_PATHS, METRICS_PATH, NOBODY, external_ids

__all__ = ["VLLMObserver"]

_SAFE_INTERVAL_SECONDS: Final = 0.05


class VLLMObserver(PlainObserver):
    """Watches one vLLM server over HTTP."""

    def __init__(self, control: Control, clock: Callable[[], float], model: TargetModel, observe: str = "") -> None:
        if observe not in {"", "metrics"}:
            raise ConfigurationError(f"--observe {observe}: from outside vLLM is observed by its metrics only")
        self._control = control
        self._clock = clock
        self._abort_path = ""
        features: dict[str, dict[str, Any]] = {
            "endless": {"ignore_eos": True},
            "structured": {"response_format": {"type": "json_object"}},
        }
        if model.adapters:
            features["lora"] = {"model": model.adapters[0]}
        self.facts = Facts(
            kind="vllm",
            grade=Evidence.GAUGE,
            safe_interval_seconds=_SAFE_INTERVAL_SECONDS,
            observed_by=f"{METRICS_PATH} (running, waiting, KV blocks in use; of the end of the last step)",
            features=features,
        )

    async def identify(self) -> Identity:
        answer = await self._control("GET", "/version")
        said = answer.json()
        if answer.status != 200 or not isinstance(said, dict) or "version" not in said:
            raise TargetUnreachable("this is no vLLM server: /version does not answer with a version")
        if parse((await self._control("GET", METRICS_PATH)).body) is None:
            raise TargetUnreachable("this vLLM shows no metrics (--disable-log-stats?): audit it as --engine openai")
        for path in ABORT_PATHS:
            if (await self._control("POST", path, {"request_ids": [NOBODY]})).status == 200:
                self._abort_path = path
                self.facts = msgspec.structs.replace(self.facts, abort_door=True)
                break
        return Identity(kind="vllm", version=str(said["version"]))

    async def read(self) -> Reading | None:
        answer = await self._control("GET", METRICS_PATH)
        numbers = parse(answer.body) if answer.status == 200 else None
        if numbers is None:
            raise TargetLost(f"the engine does not answer {METRICS_PATH} any more: {answer.failure or answer.status}")
        return Reading(
            gauges=EngineGauges(
                at=self._clock(),
                running=numbers.running,
                waiting=numbers.waiting,
                blocks_used=numbers.blocks_used,
                blocks_total=numbers.blocks_total,
            ),
            generated_tokens_total=numbers.generation_tokens_total,
            aborts_total=numbers.aborts_total,
        )

    async def abort(self, engine_id: str) -> AbortReply:
        if not self._abort_path or not engine_id:
            return AbortReply(answer=AbortAnswer.FAILED)
        answer = await self._control("POST", self._abort_path, {"request_ids": external_ids(engine_id)})
        return AbortReply(answer=AbortAnswer.ACCEPTED if answer.status == 200 else AbortAnswer.FAILED)

    def engine_id(self, tag: str, response_id: str) -> str:
        # The id in a response is that of the request, and not always one that the abort route knows: with a list of
        # prompts each has its own (`external_ids`).
        return tag
