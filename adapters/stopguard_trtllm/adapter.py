"""How the gateway speaks to `trtllm-serve`: a server that can be told of a stop in one way only, and shows it late.

* **Ids** are internal integers; no header and no field gives a request another. So nothing of ours is placed.
* **The one door** is closing the connection. The stock server looks at it once a second (`await_disconnected`), and
  what it then does, `promise.abort()`, goes into the same queue as new work and is never answered. The worker may
  refuse it (KV in transmission, a load by a connector, a preemption under way) and tries again each loop. The door is
  worth SENT.
* **Connections are not used again**, unless the patch is in place: a watcher of the stock server was reported to live,
  and to keep its request's output alive, as long as the connection (NVIDIA/TensorRT-LLM#13777).
* **Evidence** comes from the iteration records (see `iterations`), which have to be switched on
  (`enable_iter_perf_stats: true`), and are best read with `return_perf_metrics: true`. `/prometheus/metrics` is no
  evidence: its gauges are set when a *response* is completed, and a stopped stream never is.

Nothing of this could be run against the engine itself, which does not start without CUDA: see the README beside this
file.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic
from typing import ClassVar, Final, Unpack

import httpx
import msgspec

from stopguard.engines import (
    Capabilities,
    EngineFacts,
    EngineUnreachable,
    GaugeUnit,
    Identity,
    IdPlacement,
    LaunchNeeds,
)
from stopguard.engines.openai import Connection, OpenAIEngine
from stopguard.engines.protocol import ModelEntry
from stopguard.engines.recognition import CERTAIN
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import CLOSE_CONNECTION, EngineProfile
from stopguard_trtllm.iterations import Iterations, newest_record
from stopguard_trtllm.observer import TensorRTLLMObserver

__all__ = ["PATCH", "TensorRTLLMAdapter"]

#: For `trtllm-serve --custom_module_dirs`.
PATCH: Final = Path(__file__).resolve().parent / "patch"
#: As `stopguard_trtllm.patch` writes it; not imported, since importing the patch applies it.
_PATCHED: Final = ("x-stopguard-disconnects", "event-driven")


class TensorRTLLMAdapter(OpenAIEngine):
    """One `trtllm-serve` behind `base_url`."""

    fingerprint_paths: ClassVar[tuple[str, ...]] = ()
    launch_needs: ClassVar[LaunchNeeds] = LaunchNeeds(
        programs=("trtllm-serve",),
        arguments=(f"--custom_module_dirs={PATCH}",),
        notes="stops are proved only with enable_iter_perf_stats and return_perf_metrics in --extra_llm_api_options",
    )
    observer = TensorRTLLMObserver

    def __init__(self, name: str, base_url: str, **connection: Unpack[Connection]) -> None:
        super().__init__(name, base_url, **connection)
        self.placement = IdPlacement()
        self.reuse_connections = False
        # A reading takes the records away from everybody else, so no more than are of use.
        self.gauge_seconds = 0.25
        self.control_paths = frozenset(
            {
                *("/metrics", "/perf_metrics", "/kv_cache_events"),  # emptied by whoever reads them
                *("/release_memory", "/resume_memory", "/update_weights", "/steady_clock_offset"),
            }
        )
        self.capabilities = Capabilities(
            refuses_aborts=True, gauge_unit=GaugeUnit.BLOCKS, endless_fields={"ignore_eos": True}
        )
        self._iterations = Iterations()
        self._reading = asyncio.Lock()
        self._take_evidence(Evidence.SENT)

    @staticmethod
    def recognises(facts: EngineFacts) -> float:
        """Its list of models says who owns them (`tensorrt_llm/serve/openai_protocol.py: ModelCard`)."""
        if not any(model.get("owned_by") == "tensorrt_llm" for model in facts.models):
            return 0.0
        # StopGuard's reference engine says so too when it imitates this one, and may still say what it is.
        return 0.6 if facts.header("/v1/models", "x-reference-engine") else CERTAIN

    @property
    def patched(self) -> bool:
        """Whether the server said that its disconnects are events, when it was last asked."""
        return self.reuse_connections

    async def identify(self) -> Identity:
        return Identity(kind="trtllm", version=await self._ask_version())

    async def models(self) -> tuple[ModelEntry, ...]:
        """Also the moment to learn whether the patch is there and whether iterations are recorded: the server may have
        been started anew, and an engine that has never run has recorded nothing.
        """
        models = await super().models()
        await self._ask_version()
        if self._iterations.newest is None:
            try:
                await self.gauges()
            except EngineUnreachable:
                self._take_evidence(Evidence.SENT)
        return models

    async def gauges(self) -> EngineGauges | None:
        async with self._reading:
            began_at = monotonic()
            try:
                response = await self.get("/metrics")
                record = newest_record(response.content)
            except EngineUnreachable:
                # Nothing can be proved by what does not answer in time: later stops are called unconfirmed, not leaks.
                self._take_evidence(Evidence.SENT)
                raise
            except msgspec.DecodeError as error:
                self._take_evidence(Evidence.SENT)
                raise EngineUnreachable(
                    f"engine {self.name}: /metrics is no list of iteration records: {error}"
                ) from None
            self._iterations.read(record, began_at, monotonic())
            gauges = self._iterations.gauges(began_at)
            self._take_evidence(Evidence.SENT if gauges is None else Evidence.GAUGE)
            return gauges

    async def _ask_version(self) -> str:
        """Its version, and whether the patch is in place; empty where the server has no such route."""
        response = await self.request("GET", "/version", expected=(200, 404))
        name, value = _PATCHED
        self.reuse_connections = response.headers.get(name) == value
        try:
            return str(response.json()["version"]) if response.status_code == httpx.codes.OK else ""
        except (ValueError, KeyError, TypeError):
            return ""

    def _take_evidence(self, best: Evidence) -> None:
        self.profile = EngineProfile(name=self.name, doors=(CLOSE_CONNECTION,), best_evidence=best)
