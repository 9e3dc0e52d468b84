"""What `stopguard audit` sees of a `trtllm-serve`: its iteration records, and nothing of single requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stopguard.audit.errors import TargetLost, TargetUnreachable
from stopguard.audit.target import Control, Facts, PlainObserver, Reading, TargetModel
from stopguard.engines import Identity
from stopguard.errors import ConfigurationError
from stopguard.ledger import Evidence
from stopguard_trtllm.iterations import Iterations, newest_record

__all__ = ["TensorRTLLMObserver"]


class TensorRTLLMObserver(PlainObserver):
    """One `trtllm-serve`, seen through `/metrics`. Its totals are those of its last iteration."""

    def __init__(self, control: Control, clock: Callable[[], float], model: TargetModel, observe: str = "") -> None:
        if observe not in {"", "metrics"}:
            raise ConfigurationError(f"--observe {observe}: trtllm-serve shows metrics only")
        self._control = control
        self._clock = clock
        self._iterations = Iterations()
        features: dict[str, dict[str, Any]] = {"endless": {"ignore_eos": True}}
        if model.adapters:
            features["lora"] = {"model": model.adapters[0]}
        self.facts = Facts(
            kind="trtllm",
            grade=Evidence.GAUGE,
            safe_interval_seconds=0.1,
            observed_by="the iteration records of /metrics, which are emptied by reading them",
            features=features,
        )

    async def identify(self) -> Identity:
        answer = await self._control("GET", "/version")
        told = answer.json()
        if answer.status != 200 or not isinstance(told, dict) or "version" not in told:
            raise TargetUnreachable("this is no trtllm-serve: /version does not say which it is")
        await self.read()
        return Identity(kind="trtllm", version=str(told["version"]))

    async def read(self) -> Reading | None:
        """`None` until there has been an iteration, or with `enable_iter_perf_stats` off."""
        began_at = self._clock()
        answer = await self._control("GET", "/metrics")
        if answer.status != 200:
            raise TargetLost(f"the engine does not answer /metrics any more: {answer.failure or answer.status}")
        try:
            record = newest_record(answer.body)
        except msgspec.DecodeError as error:
            raise TargetLost(f"/metrics is no list of iteration records: {error}") from None
        self._iterations.read(record, began_at, self._clock())
        gauges, newest = self._iterations.gauges(self._clock()), self._iterations.newest
        if gauges is None or newest is None:
            return None
        cache = newest.kv_cache_stats
        return Reading(
            gauges=gauges,
            preempted=newest.paused,
            blocks_missing=None
            if cache is None
            else cache.max_num_blocks - cache.free_num_blocks - cache.used_num_blocks,
            steps_total=newest.iter,
        )

    def place(self, tag: str) -> tuple[dict[str, str], dict[str, Any]]:
        return {}, {}

    def engine_id(self, tag: str, response_id: str) -> str:
        return ""
