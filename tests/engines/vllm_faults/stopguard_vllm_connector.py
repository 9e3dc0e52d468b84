"""A KV connector for vLLM that transfers nothing, for tests only: with it (and steps ahead) vLLM defers its frees.

While the fault `slow_transfer` is on, it says of each new prompt that its KV comes from elsewhere, and takes
`TRANSFER_SECONDS` for it. What "arrives" is whatever was in those blocks.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

TRANSFER_SECONDS = 1.0

active = importlib.import_module("stopguard_vllm_faults").active


@dataclass
class Begun(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where this is checked
    """Requests whose transfer begins with this step."""

    names: list[str] = field(default_factory=list)


class IdleConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One instance in each scheduler, one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.begun: list[str] = []
        self.known: set[str] = set()
        self.due: dict[str, float] = {}

    # ---- in the scheduler --------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = request.num_prompt_tokens - 1 - num_computed_tokens
        if tokens <= 0 or request.request_id in self.known or not active("slow_transfer"):
            return 0, False
        return tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.known.add(request.request_id)
            self.begun.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Begun:
        begun, self.begun = self.begun, []
        return Begun(begun)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self.known.discard(request.request_id)
        return False, None

    request_finished_all_groups = request_finished

    # ---- in the worker -----------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        for name in self._get_connector_metadata().names:
            self.due[name] = monotonic() + TRANSFER_SECONDS

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        done = {name for name, due_at in self.due.items() if due_at <= monotonic()}
        for name in done:
            del self.due[name]
        return None, done or None

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **named: Any) -> None: ...

    def wait_for_save(self) -> None: ...
