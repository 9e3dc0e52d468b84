"""How the gateway speaks to vLLM (facts from vLLM 0.32 unless another version is named).

**Ids.** `X-Request-Id: X` becomes the external id `chatcmpl-X`, `cmpl-X-INDEX` (one a prompt) and so on by route
(`entrypoints/**/serving.py`), to which vLLM adds eight random digits for its internal one. Two live requests may
bear one header, and an abort by it then ends both: the header is ours alone, and so is the body's `request_id`.

**Doors.** Closing the connection is the stock door. Uvicorn sees it at once, in every state, and it always reaches
the API server that has the request. `POST /abort_requests` (with `VLLM_SERVER_DEV_MODE=1`, or `--tokens-only`) and
`POST /inference/v1/abort_requests` (`--enable-scale-out`) are second doors where they exist. Their 200 says that
ids were given, not that they were known; an *empty* list aborts everything that runs, so that none is ever sent; and
behind several API servers they reach only the one that happens to accept the call.

**Evidence.** The front end ends a stream before its core has heard of the abort, so the end of a stream is no ack.
Prometheus' gauges are (`metrics`), of the last step's end. With the plugin the scheduler itself says so.
"""

from __future__ import annotations

from time import monotonic
from typing import ClassVar, Final, Unpack

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
from stopguard.engines.resumption import Resumption
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import CLOSE_CONNECTION, AbortAnswer, Door, DoorKind, EngineProfile, StopCause
from stopguard_vllm import observing
from stopguard_vllm.metrics import Recency, parse
from stopguard_vllm.names import ABORT_PATHS, METRICS_PATH, NOBODY, external_ids
from stopguard_vllm.resumption import RESUMPTION

__all__ = ["VLLMAdapter"]

_ABORT_DOOR: Final = "abort_requests"

_CONTROL_PATHS: Final = frozenset(
    f"/{name}"
    for name in (
        *("abort_requests", "inference/v1/abort_requests", "pause", "resume", "is_paused", "server_info"),
        *("sleep", "wake_up", "is_sleeping", "release_kv_cache_memory", "collective_rpc"),
        *("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "start_profile", "stop_profile"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update"),
        *("start_draft_weight_update", "update_weights", "finish_weight_update", "update_weight_version"),
        *("weight_info", "weight_checker", "get_world_size", "scale_elastic_ep", "is_scaling_elastic_ep"),
        *("fault_tolerance/apply", "fault_tolerance/status", "v1/load_lora_adapter", "v1/unload_lora_adapter"),
        *("metrics", "load", "kv_event_sources"),
    )
)
#: A page takes about 7 ms of an API server's time; twenty a second, only while a stop is pending, is 14 % of one core.
_GAUGE_SECONDS: Final = 0.05
#: Longer than a step takes: a chunk of 8,192 prompt tokens was seen to take 1.2 s on a CPU.
_STILL_SECONDS: Final = 2.0


class VLLMAdapter(OpenAIEngine):
    """One vLLM server behind `base_url`, with any number of API servers and data-parallel engines."""

    fingerprint_paths: ClassVar[tuple[str, ...]] = ("/version", METRICS_PATH)
    launch_needs: ClassVar[LaunchNeeds] = LaunchNeeds(
        programs=("vllm", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"),
        plugin="stopguard",
        plugin_list_variable="VLLM_PLUGINS",
    )
    resumption: ClassVar[Resumption] = RESUMPTION
    observer = observing.VLLMObserver

    def __init__(self, name: str, base_url: str, **connection: Unpack[Connection]) -> None:
        super().__init__(name, base_url, **connection)
        self.profile = EngineProfile(name=name, doors=(CLOSE_CONNECTION,), best_evidence=Evidence.GAUGE)
        self.placement = IdPlacement(header="X-Request-Id")
        # A client that chooses its rank defeats the balance, and one that resumes another's KV reads it.
        self.owned_headers = frozenset({"x-request-id", "x-data-parallel-rank"})
        self.owned_body_fields = frozenset({"request_id", "kv_transfer_params"})
        self.control_paths = _CONTROL_PATHS
        self.gauge_seconds = _GAUGE_SECONDS
        self.capabilities = Capabilities(
            priority_field="priority",
            lower_is_more_urgent=True,
            token_ids_field="return_token_ids",
            gauge_unit=GaugeUnit.BLOCKS,
            endless_fields={"ignore_eos": True},
        )
        self._recency = Recency(_STILL_SECONDS)
        self._abort_path = ""

    @staticmethod
    def recognises(facts: EngineFacts) -> float:
        """Its own word in the list of models, or its names among the metrics."""
        if any(name.startswith("vllm:") for name in facts.metric_names):
            return 1.0
        if facts.metric_names:
            return 0.0
        if any(entry.get("owned_by") == "vllm" for entry in facts.models):
            # Servers that imitate vLLM say so too; with its /version and no metrics (--disable-log-stats) it is one.
            version = facts.json("/version")
            known = isinstance(version, dict) and set(version) == {"version"}
            return 0.9 if known and facts.status(METRICS_PATH) else 0.5
        return 0.0

    async def identify(self) -> Identity:
        """Its version; also which abort door it has, and whether it shows gauges."""
        response = await self.get("/version")
        try:
            version = str(response.json()["version"])
        except (ValueError, KeyError, TypeError):
            raise EngineUnreachable(f"engine {self.name}: /version does not say which vLLM this is") from None
        self._recency = Recency(_STILL_SECONDS)
        self._abort_path = await self._find_abort_path()
        doors: tuple[Door, ...] = (CLOSE_CONNECTION,)
        if self._abort_path:
            doors += (Door(name=_ABORT_DOOR, kind=DoorKind.CALL, worth=Evidence.ACCEPTED),)
        shows_gauges = await self._shows_gauges()
        self.gauge_seconds = _GAUGE_SECONDS if shows_gauges else 0.0
        if not self.profile.probed:
            best = Evidence.GAUGE if shows_gauges else max(door.worth for door in doors)
            self.profile = msgspec.structs.replace(self.profile, doors=doors, best_evidence=best)
        self.capabilities = msgspec.structs.replace(
            self.capabilities,
            aborts_by_id=bool(self._abort_path),
            aborts_children=bool(self._abort_path),
            gauge_unit=GaugeUnit.BLOCKS if shows_gauges else GaugeUnit.NONE,
        )
        return Identity(kind="vllm", version=version)

    async def _find_abort_path(self) -> str:
        """The abort route that this server has and lets us use: it is asked to abort a request that nobody has.

        0.32 has the route under `/inference` always, and answers 403 unless it was started with `--enable-scale-out`.
        """
        for path in ABORT_PATHS:
            try:
                await self.request("POST", path, json={"request_ids": [NOBODY]})
            except EngineUnreachable:
                continue
            return path
        return ""

    async def _shows_gauges(self) -> bool:
        """Not with `--disable-log-stats`."""
        try:
            return parse((await self.get(METRICS_PATH)).content) is not None
        except EngineUnreachable:
            return False

    async def gauges(self) -> EngineGauges | None:
        at = monotonic()
        numbers = parse((await self.get(METRICS_PATH)).content)
        if numbers is None:
            raise EngineUnreachable(f"engine {self.name}: {METRICS_PATH} shows no gauges of vLLM's")
        return EngineGauges(
            at=at,
            running=numbers.running,
            waiting=numbers.waiting,
            blocks_used=numbers.blocks_used,
            blocks_total=numbers.blocks_total,
            block_tokens=numbers.block_tokens or None,
            holds_since=self._recency.hold_since(at, numbers),
        )

    async def abort(self, request_id: str, door_name: str, cause: StopCause) -> AbortReply:
        if door_name != _ABORT_DOOR or not self._abort_path or not request_id:
            return AbortReply(answer=AbortAnswer.FAILED)
        try:
            await self.request("POST", self._abort_path, json={"request_ids": external_ids(request_id)})
        except EngineUnreachable:
            return AbortReply(answer=AbortAnswer.FAILED)
        return AbortReply(answer=AbortAnswer.ACCEPTED)
