"""How an audit looks at SGLang from outside: `/v1/loads`, and its abort route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from stopguard.audit.errors import TargetLost, TargetUnreachable
from stopguard.audit.target import Control, Facts, PlainObserver, Reading, TargetModel
from stopguard.engines import AbortReply, Identity
from stopguard.errors import ConfigurationError
from stopguard.ledger import Evidence
from stopguard.stops import AbortAnswer
from stopguard_sglang.loads import LOADS_PATH, Loads, gauges_of, read_loads

__all__ = ["SGLangObserver"]

_SAFE_INTERVAL_SECONDS: Final = 0.05


class SGLangObserver(PlainObserver):
    """Watches one SGLang server over HTTP."""

    def __init__(self, control: Control, clock: Callable[[], float], model: TargetModel, observe: str = "") -> None:
        if observe not in {"", "metrics"}:
            raise ConfigurationError(f"--observe {observe}: from outside SGLang is observed by its loads only")
        self._control = control
        self._clock = clock
        features: dict[str, dict[str, Any]] = {
            "endless": {"ignore_eos": True},
            "structured": {"response_format": {"type": "json_object"}},
        }
        if model.adapters:
            features["lora"] = {"model": model.adapters[0]}
        self.facts = Facts(
            kind="sglang",
            grade=Evidence.GAUGE,
            safe_interval_seconds=_SAFE_INTERVAL_SECONDS,
            observed_by="/v1/loads (running, waiting, KV tokens; up to 15 decode steps old)",
            abort_door=True,
            matches_by_prefix=True,
            features=features,
        )

    async def identify(self) -> Identity:
        answer = await self._control("GET", LOADS_PATH)
        loads = _decoded(answer.body) if answer.status == 200 else None
        if loads is None:
            raise TargetUnreachable("this is no SGLang server of 0.5 or later: /v1/loads does not answer with loads")
        return Identity(kind="sglang", version=loads.version)

    async def read(self) -> Reading | None:
        asked_at = self._clock()
        answer = await self._control("GET", LOADS_PATH)
        loads = _decoded(answer.body) if answer.status == 200 else None
        if loads is None:
            raise TargetLost(f"the engine does not answer /v1/loads any more: {answer.failure or answer.status}")
        gauges = gauges_of(loads, asked_at)
        return None if gauges is None else Reading(gauges=gauges)

    async def abort(self, engine_id: str) -> AbortReply:
        if not engine_id:
            return AbortReply(answer=AbortAnswer.FAILED)
        answer = await self._control("POST", "/abort_request", {"rid": engine_id})
        return AbortReply(answer=AbortAnswer.ACCEPTED if answer.status == 200 else AbortAnswer.FAILED)

    def place(self, tag: str) -> tuple[dict[str, str], dict[str, Any]]:
        return {}, {"rid": tag}

    def engine_id(self, tag: str, response_id: str) -> str:
        return response_id or tag


def _decoded(body: bytes) -> Loads | None:
    try:
        return read_loads(body)
    except msgspec.DecodeError:
        return None
