"""llama.cpp's server (`llama-server`, and everything that embeds it).

What a stop is worth here, measured with the server in xllamacpp 2026.10.11549 (docs/engines/llamacpp.md):

* **The connection is the only door.** A stream ends 1 to 7 ms after it is closed. An answer that is not streamed, and
  any request that has not got its first token, is looked after by a thread that waits for results one second at a
  time (`server_response::recv_with_timeout`) and looks at its client only when such a second passes without
  *anybody's* result. So a stop is noticed within a second on a quiet server, and not at all while a neighbour streams.
* **There is no ack.** `DELETE /v1/stream?conv_id=` answers 204 to every id. It stops only streams that have begun,
  where closing does the same, and a request that bears `X-Conversation-Id` goes on when its client leaves, by design.
  With our id there, our own death would leave work behind, so it is never sent; and clients' are taken out, since
  theirs would make their own disconnects void.
* **Looking puts off.** `/slots` and `/metrics` go through the same queue, and each answer starts every waiting
  thread's second anew. A poll of more than 1 Hz is a neighbour that never ends. Readings are therefore two seconds
  apart, and the first one comes when a second without us has passed.

* **No connection is used twice.** The server promises ``Keep-Alive: timeout=5, max=100`` and closes a connection
  without a word after its first or second stream; a request that is sent at that moment is lost (measured: 120 of 300
  that followed a stream at once, none of 300 that followed an answer which is not streamed).

Routes: tools/server/server.cpp; the waiting: tools/server/server-queue.cpp of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, ClassVar, Final, Unpack

import msgspec

from stopguard.engines import Capabilities, EngineFacts, EngineUnreachable, GaugeUnit, Identity, LaunchNeeds
from stopguard.engines.openai import Connection, OpenAIEngine
from stopguard.engines.resumption import Resumption
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import CLOSE_CONNECTION, EngineProfile
from stopguard_llamacpp.pages import metric, read_props, read_slots
from stopguard_llamacpp.resumption import RESUMPTION

__all__ = ["GAUGE_SECONDS", "LlamaCppAdapter"]

#: A reading every two seconds leaves a second in which a client can be missed.
GAUGE_SECONDS: Final = 2.0
#: How long the server is left alone before a reading, so that a stop that was just made has had its second.
_LOOK_AFTER_SECONDS: Final = 1.1
_SERVER: Final = "llama.cpp"
#: More slots than any server has.
_SLOTS_MAX: Final = 256


class LlamaCppAdapter(OpenAIEngine):
    """One llama.cpp server behind `base_url`."""

    fingerprint_paths: ClassVar[tuple[str, ...]] = ("/props",)
    resumption: ClassVar[Resumption] = RESUMPTION
    launch_needs: ClassVar[LaunchNeeds] = LaunchNeeds(
        programs=("llama-server", "llama_server", "llama-serve"),
        # By default `/metrics` is off, and slots + 4 threads serve HTTP: with more requests even /health waits.
        arguments=("--metrics", "--threads-http=64"),
        notes="llama.cpp notices a client that leaves a non-streamed answer only in a second without any other output",
    )

    def __init__(self, name: str, base_url: str, **connection: Unpack[Connection]) -> None:
        super().__init__(name, base_url, **connection)
        self.profile = EngineProfile(name=name, doors=(CLOSE_CONNECTION,), best_evidence=Evidence.GAUGE)
        # Nothing in the server takes an id from X-Request-Id; it is there for its log and for proxies in between.
        self.owned_headers = frozenset({"x-conversation-id"})
        self.control_paths = frozenset(
            {
                *("/slots", "/props", "/metrics", "/lora-adapters"),
                *("/v1/stream", "/v1/streams/lookup", "/v1/chat/completions/control"),
                *("/models/load", "/models/unload", "/tools", "/cors-proxy"),
                # /slots/0?action=erase: a path of its own for each slot.
                *(f"/slots/{number}" for number in range(_SLOTS_MAX)),
            }
        )
        self.reuse_connections = False
        self.gauge_seconds = GAUGE_SECONDS
        self.capabilities = Capabilities(
            gauge_unit=GaugeUnit.TOKENS, token_ids_field="return_tokens", endless_fields={"ignore_eos": True}
        )
        self._metrics_on = True

    @staticmethod
    def recognises(facts: EngineFacts) -> float:
        """It names itself in `Server`, and as owner of its models behind a proxy that takes the header away."""
        if facts.header("/v1/models", "server").lower() == _SERVER:
            return 1.0
        if any(model.get("owned_by") == "llamacpp" for model in facts.models):
            return 0.95
        props = facts.json("/props")
        return 0.9 if isinstance(props, dict) and {"total_slots", "default_generation_settings"} <= set(props) else 0.0

    @staticmethod
    def observer(*arguments: Any) -> Any:
        """The audit's eyes (`stopguard.audit.target.Maker`); the gateway itself needs no audit."""
        from stopguard_llamacpp.observer import LlamaCppObserver  # noqa: PLC0415

        return LlamaCppObserver(*arguments)

    async def identify(self) -> Identity:
        """Also finds out which of its pages are switched on, and with them what can be proved."""
        response = await self.get("/props")
        try:
            props = read_props(response.content)
        except msgspec.MsgspecError as error:
            raise EngineUnreachable(f"engine {self.name}: /props is not llama.cpp's: {error}") from None
        self._metrics_on = props.endpoint_metrics and props.endpoint_slots
        # Without /metrics nobody says how many wait, and a sum that lacks a part proves nothing.
        self.gauge_seconds = GAUGE_SECONDS if self._metrics_on else 0.0
        best = Evidence.GAUGE if self._metrics_on else Evidence.SENT
        unit = GaugeUnit.TOKENS if self._metrics_on else GaugeUnit.NONE
        self.profile = msgspec.structs.replace(self.profile, best_evidence=best)
        self.capabilities = msgspec.structs.replace(self.capabilities, gauge_unit=unit, slots=props.total_slots)
        return Identity(kind="llamacpp", version=props.build_info)

    async def gauges(self) -> EngineGauges | None:
        """Reads `/metrics` and `/slots` together, a good second after it was asked for; see the module."""
        if not self._metrics_on:
            return None
        await asyncio.sleep(_LOOK_AFTER_SECONDS)
        at = monotonic()
        metrics, slots = await asyncio.gather(self.get("/metrics"), self.get("/slots"))
        samples = metric(metrics.text)
        try:
            page = read_slots(slots.content)
            running, waiting = int(samples["requests_processing"]), int(samples["requests_deferred"])
        except (msgspec.MsgspecError, KeyError) as error:
            raise EngineUnreachable(f"engine {self.name}: its pages are not llama.cpp's: {error}") from None
        return EngineGauges(
            at=at,
            running=running,
            waiting=waiting,
            blocks_used=page.tokens_used,
            blocks_total=page.tokens_total,
            slots_used=page.processing,
        )
