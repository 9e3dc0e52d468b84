"""How the gateway speaks to SGLang. Facts are of sglang 0.5.23.

**Ids.** The body field `rid` becomes the request's id on the routes that generate. Headers are not read. Other routes
do not take it (`/v1/messages`, `/v1/responses`), or refuse it with a list of inputs (`/v1/embeddings`: "The rid should
be a list", `io_struct.EmbeddingReqInput`). A second live request with the same id gets 400. Aborts match by prefix
(`Scheduler.abort_request`: `req.rid.startswith`), so a client that chose `a` could be the end of whoever is called
`ab`: only we set ids, of one length.

**Doors.** `POST /abort_request {"rid": …}` answers 200 with an empty body before the scheduler has seen anything, and
the same for unknown ids; it is worth no more than that. What proves the stop is the end of the response that the
request had: the scheduler gives the KV back (`release_kv_cache`) before it streams the last output, and a queued
request's echo is sent when it has left the queue. So our stream is kept open until SGLang itself ends it. With `n` > 1
the children have ids of chance and the door does nothing: there, and on routes without `rid`, only the connection is
left. Closing it is noticed at once while a stream flows, else within 4 s (`SGLANG_REQUEST_STATE_WAIT_TIMEOUT`).

**The lost abort.** One that comes while the request is still parked in the TokenizerManager (a pause, the tokenization)
finds nothing, and `ReqState.abort_sent` then swallows every later one. While it is parked, closing the connection of a
stream drops it; afterwards nothing from outside stops it. The plugin mends this.

**Gauges** are of `/v1/loads` (`loads`), in tokens. `/health_generate` (and `/health`) runs a generation of its own, so
that is never asked.
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
from stopguard.engines.ids import OUR_ID
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import CLOSE_CONNECTION, AbortAnswer, Door, DoorKind, EngineProfile, RetryPolicy, StopCause
from stopguard_sglang.loads import LOADS_PATH, Loads, gauges_of, read_loads
from stopguard_sglang.observer import SGLangObserver
from stopguard_sglang.resumption import RESUMPTION

__all__ = ["ABORT_DOOR", "SGLangAdapter"]

ABORT_DOOR: Final = Door(name="abort_request", kind=DoorKind.CALL, worth=Evidence.ACCEPTED)

#: Routes whose bodies take `rid` (`entrypoints/openai/protocol.py`, `managers/io_struct.py`).
_NAMED_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/generate", "/invocations"})

#: Routes that stop, pause or change the server for everybody (`entrypoints/http_server.py`).
_CONTROL_PATHS: Final = frozenset({
    *("/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/slow_down", "/pd_role_switch"),
    *("/open_session", "/close_session", "/configure_logging", "/freeze_gc", "/set_internal_state", "/set_trace_level"),
    *("/start_profile", "/stop_profile", "/load_lora_adapter", "/load_lora_adapter_from_tensors"),
    *("/unload_lora_adapter", "/add_external_corpus", "/remove_external_corpus", "/scale_elastic_ep"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/weights_checker", "/get_weights_by_name"),
    *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
    *("/update_weights_from_ipc", "/update_weight_version", "/begin_weight_update", "/end_weight_update"),
    *("/init_weights_update_group", "/destroy_weights_update_group", "/init_weights_send_group_for_remote_instance"),
    *("/send_weights_to_remote_instance", "/start_expert_distribution_record", "/stop_expert_distribution_record"),
    *("/dump_expert_distribution_record", "/hicache/storage-backend", "/hicache/storage-backend/clear"),
})  # fmt: skip


class SGLangAdapter(OpenAIEngine):
    """One SGLang server behind `base_url`."""

    fingerprint_paths: ClassVar[tuple[str, ...]] = (LOADS_PATH,)
    launch_needs: ClassVar[LaunchNeeds] = LaunchNeeds(
        programs=("sglang", "sglang.launch_server"),
        plugin="stopguard",
        plugin_list_variable="SGLANG_PLUGINS",
        notes="SGLang's idle scheduler spins on one core; --sleep-on-idle lets it rest",
    )
    observer = SGLangObserver

    def __init__(self, name: str, base_url: str, **connection: Unpack[Connection]) -> None:
        super().__init__(name, base_url, **connection)
        self.profile = EngineProfile(
            name=name,
            doors=(ABORT_DOOR, CLOSE_CONNECTION),
            best_evidence=Evidence.GAUGE,
            stream_end_is_ack=True,
            # A running request ends with the step in flight; one in a prefill with its piece, up to half a second
            # on a CPU. What has not ended by then may never have got the abort: close as well.
            retry=RetryPolicy(tries_per_door=1, first_wait_seconds=0.5, factor=1.5),
        )
        self.placement = IdPlacement(body_field="rid", body_paths=_NAMED_PATHS)
        self.owned_body_fields = frozenset({"rid"})
        self.control_paths = _CONTROL_PATHS
        self.gauge_seconds = 0.05
        self.capabilities = Capabilities(
            aborts_by_id=True,
            aborts_children=False,
            matches_by_prefix=True,
            priority_field="priority",
            token_ids_field="return_token_ids",
            gauge_unit=GaugeUnit.TOKENS,
            endless_fields={"ignore_eos": True},
        )
        self.resumption = RESUMPTION

    @staticmethod
    def recognises(facts: EngineFacts) -> float:
        """`/v1/models` names the owner "sglang"; `/v1/loads` is a route of its own."""
        owners = {entry.get("owned_by") for entry in facts.models}
        if owners and "sglang" not in owners:
            return 0.0
        loads = facts.json(LOADS_PATH)
        if isinstance(loads, dict) and isinstance(loads.get("loads"), list):
            return 0.95
        return 0.6 if owners else 0.0

    async def identify(self) -> Identity:
        return Identity(kind="sglang", version=(await self._loads()).version)

    async def gauges(self) -> EngineGauges | None:
        at = monotonic()
        return gauges_of(await self._loads(), at)

    async def abort(self, request_id: str, door_name: str, cause: StopCause) -> AbortReply:
        if door_name != ABORT_DOOR.name:
            return AbortReply(answer=AbortAnswer.FAILED)
        if OUR_ID.fullmatch(request_id) is None:
            # The beginning of an id is the beginning of others: with several tokenizer workers it reaches them all.
            return AbortReply(answer=AbortAnswer.UNKNOWN)
        try:
            await self.request("POST", "/abort_request", json={"rid": request_id})
        except EngineUnreachable:
            return AbortReply(answer=AbortAnswer.FAILED)
        return AbortReply(answer=AbortAnswer.ACCEPTED)

    async def _loads(self) -> Loads:
        response = await self.get(LOADS_PATH)
        try:
            return read_loads(response.content)
        except msgspec.DecodeError as error:
            raise EngineUnreachable(f"engine {self.name}: /v1/loads answered with something else: {error}") from None
