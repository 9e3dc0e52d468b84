"""A plugin for vLLM that breaks it on purpose, for tests only: each fault is on while the file that
`STOPGUARD_TEST_FAULTS` names has its name in it.

`keep_block`: a finished request's first block never comes back. `keep_grammar`: nor does its grammar, until the fault
is off and another request has come. `encoder_output`: each request has an output in the encoder's cache, although the
model has no encoder; `keep_encoder_output`: that is never given back. `lose_abort`: the core forgets aborts that
front ends send. `lose_every_abort`: the scheduler carries none out. `slow_registration`: the front end waits a while
after it has sent a request to the core. `unmended`: the front end sends no abort of its own accord. `asynchronous`
(at the start only): steps are scheduled ahead, which vLLM refuses on a CPU. `slow_transfer` is the connector's.
"""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REGISTRATION_SECONDS = 1.5


def active(fault: str) -> bool:
    """Whether the fault is on now."""
    try:
        return fault in Path(os.environ["STOPGUARD_TEST_FAULTS"]).read_text().split()
    except (KeyError, OSError):
        return False


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import AsyncMPClient, DPAsyncMPClient

    if hasattr(Scheduler, "faulty"):
        return
    Scheduler.faulty = True
    _keep_block(Scheduler)
    _keep_grammar(Scheduler)
    _encoder_output(Scheduler)
    _lose_aborts(Scheduler, EngineCore)
    _lose_front_end_aborts(AsyncLLM)
    for client in (AsyncMPClient, DPAsyncMPClient):
        _slow_registration(client)
    if active("asynchronous"):
        _schedule_ahead()


def _keep_block(scheduler: Any) -> None:
    original = scheduler._free_request_blocks

    @functools.wraps(original)
    def free(self: Any, request: Any) -> None:
        if request.is_finished() and active("keep_block"):
            table = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id)
            if table:
                table[0].ref_cnt += 1
        original(self, request)

    scheduler._free_request_blocks = free


def _keep_grammar(scheduler: Any) -> None:
    add, free = scheduler.add_request, scheduler._free_request_blocks
    kept: list[Any] = []

    @functools.wraps(add)
    def add_request(self: Any, request: Any) -> None:
        add(self, request)
        if kept and not active("keep_grammar"):
            kept.clear()

    @functools.wraps(free)
    def free_request_blocks(self: Any, request: Any) -> None:
        if request.is_finished() and request.structured_output_request is not None and active("keep_grammar"):
            kept.append(request.structured_output_request.grammar)
        free(self, request)

    scheduler.add_request, scheduler._free_request_blocks = add_request, free_request_blocks


def _encoder_output(scheduler: Any) -> None:
    schedule, free = scheduler.schedule, scheduler._free_request
    inputs: dict[str, Any] = {}

    @functools.wraps(schedule)
    def schedule_step(self: Any, *arguments: Any) -> Any:
        output = schedule(self, *arguments)
        for new in output.scheduled_new_reqs if active("encoder_output") else ():
            picture = SimpleNamespace(identifier=f"picture of {new.req_id}")
            inputs[new.req_id] = SimpleNamespace(
                request_id=new.req_id, mm_features=[picture], get_num_encoder_embeds=lambda _: 0
            )
            self.encoder_cache_manager.allocate(inputs[new.req_id], 0)
        return output

    @functools.wraps(free)
    def free_request(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        owner, manager = inputs.pop(request.request_id, None), self.encoder_cache_manager
        if owner is not None and active("keep_encoder_output"):
            manager.request_cached_ids.pop(request.request_id)  # what remains is the name of who keeps it
        elif owner is not None:
            manager.free(owner)
        return free(self, request, *arguments, **named)

    scheduler.schedule, scheduler._free_request = schedule_step, free_request


def _lose_aborts(scheduler: Any, core: Any) -> None:
    finish, abort = scheduler.finish_requests, core.abort_requests

    @functools.wraps(finish)
    def finish_requests(self: Any, ids: Any, status: Any) -> Any:
        return [] if status.name == "FINISHED_ABORTED" and active("lose_every_abort") else finish(self, ids, status)

    @functools.wraps(abort)
    def abort_requests(self: Any, ids: Any) -> None:
        if not active("lose_abort"):
            abort(self, ids)

    scheduler.finish_requests, core.abort_requests = finish_requests, abort_requests


def _lose_front_end_aborts(async_llm: Any) -> None:
    original = async_llm.abort

    @functools.wraps(original)
    async def abort(self: Any, *arguments: Any, **named: Any) -> None:
        if not active("unmended"):
            await original(self, *arguments, **named)

    async_llm.abort = abort


def _slow_registration(client: Any) -> None:
    original = client.add_request_async

    @functools.wraps(original)
    async def add_request_async(self: Any, request: Any) -> None:
        await original(self, request)
        if active("slow_registration"):
            await asyncio.sleep(REGISTRATION_SECONDS)

    client.add_request_async = add_request_async


def _schedule_ahead() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
