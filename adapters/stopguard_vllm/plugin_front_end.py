"""What the plugin does in vLLM's launcher and API servers. Nothing here sends anything to the collector.

**Lost registration** (vLLM 0.32 `v1/engine/async_llm.py: AsyncLLM._add_request`): for `n` = 1 a request is registered
with the front end before `await add_request_async`. A client that leaves during that await cancels it; `generate`
then has no queue and aborts nothing, although the request may be on its way to the core, where it runs to its end
for nobody. (For `n` > 1 `add_request` does abort.) Here the abort is sent in that case too.

**Stop strings**: the front end finds them, and ends the request by an abort that looks to the core like any other
(`output_processor.py: reqs_to_abort`). The ids of those are sent a second time with a mark before them, which the
scheduler does not know and ignores, so that the probe can tell an end from a stop.

**Ranks**: a data-parallel core of a model without experts is told that it is alone
(`ParallelConfig.reconfigure_for_independent_dp_rank`). The launcher leaves word in the environment of its children.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from stopguard.probe.sender import guard
from stopguard_vllm.plugin_probe import ENDED_MARK

__all__ = ["ABORT_VALUE", "RANKS_VARIABLE", "attach_front_end", "attach_launcher", "ranks_of"]

logger = logging.getLogger("stopguard.vllm")

ABORT_VALUE: Final = b"\x01"
"""`EngineCoreRequestType.ABORT` on the wire (`v1/engine/__init__.py`)."""
RANKS_VARIABLE: Final = "STOPGUARD_VLLM_RANKS"
"""FIRST:COUNT, set by the launcher for its engine cores."""
_ENDED_MAX: Final = 65_536


def attach_front_end(async_llm: Any, output_processor: Any, client: Any) -> tuple[str, ...]:
    """Wrap the three classes of the API process, each once; returns the points that are not there."""
    missing = []
    if callable(getattr(async_llm, "_add_request", None)) and callable(getattr(async_llm, "abort", None)):
        _mend_registration(async_llm)
    else:
        missing.append("AsyncLLM._add_request")
    if callable(getattr(output_processor, "process_outputs", None)) and callable(getattr(client, "_send_input", None)):
        _mark_ends(output_processor, client)
    else:
        missing.append("OutputProcessor.process_outputs")
    return tuple(missing)


def _mend_registration(async_llm: Any) -> None:
    original = async_llm._add_request
    if hasattr(original, "stopguard"):
        return

    @functools.wraps(original)
    async def add_request(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return await original(self, request, *arguments, **named)
        except BaseException:
            try:
                await self.abort(request.request_id, internal=True)
            except Exception:
                logger.warning("StopGuard could not abort %s, which its client left early", request.request_id)
            raise

    add_request.stopguard = True  # type: ignore[attr-defined]
    async_llm._add_request = add_request


def _mark_ends(output_processor: Any, client: Any) -> None:
    process, send = output_processor.process_outputs, client._send_input
    if hasattr(process, "stopguard"):
        return
    ended: set[str] = set()

    @functools.wraps(process)
    def process_outputs(*arguments: Any, **named: Any) -> Any:
        result = process(*arguments, **named)
        note(result)
        return result

    @functools.wraps(send)
    def send_input(self: Any, request_type: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        return send(
            self, request_type, (mark(request_type, request) if ended else None) or request, *arguments, **named
        )

    @guard("process_outputs")
    def note(result: Any) -> None:
        if result.reqs_to_abort and len(ended) < _ENDED_MAX:
            ended.update(result.reqs_to_abort)

    @guard("_send_input")
    def mark(request_type: Any, request: Any) -> list[str] | None:
        if request_type.value != ABORT_VALUE or not isinstance(request, list):
            return None
        marked = ended.intersection(request)
        ended.difference_update(marked)
        return [*request, *(ENDED_MARK + name for name in marked)]

    process_outputs.stopguard = True  # type: ignore[attr-defined]
    output_processor.process_outputs = process_outputs
    client._send_input = send_input


def attach_launcher(core_manager: Any) -> None:
    """Wrap `CoreEngineProcManager`, which starts the engine cores."""
    original = core_manager.__init__
    if hasattr(original, "stopguard"):
        return

    names = inspect.signature(original)

    @functools.wraps(original)
    def init(*arguments: Any, **named: Any) -> None:
        try:
            given = names.bind(*arguments, **named).arguments
            _leave_word(given["vllm_config"].parallel_config, given["start_index"], given["local_engine_count"])
        except Exception as error:  # another vLLM: its cores will say that they are alone
            logger.warning("StopGuard does not know how many engine cores there are: %s", error)
        original(*arguments, **named)

    init.stopguard = True  # type: ignore[attr-defined]
    core_manager.__init__ = init


def _leave_word(parallel: Any, first: int, local_count: int) -> None:
    # Behind a balancer of somebody else this server is an engine by itself, with the ranks that it starts.
    if getattr(parallel, "data_parallel_external_lb", False) or getattr(parallel, "data_parallel_hybrid_lb", False):
        os.environ[RANKS_VARIABLE] = f"{first}:{local_count}"
    else:
        os.environ[RANKS_VARIABLE] = f"0:{parallel.data_parallel_size}"


def ranks_of(engine_index: int, environment: Mapping[str, str]) -> tuple[int, int]:
    """(this core's rank, how many there are), as the launcher has said; alone where it has not."""
    first, _, count = environment.get(RANKS_VARIABLE, "").partition(":")
    if not (first.isdecimal() and count.isdecimal()):
        return (0, 1) if engine_index == 0 else (engine_index, engine_index + 1)
    return engine_index - int(first), int(count)
