"""What the plugin says of a scheduler, and does to it, on an imitation of vLLM's core (the real one: tests/engines)."""

from __future__ import annotations

import os
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stopguard.probe import wire
from stopguard_vllm import plugin
from stopguard_vllm.plugin_attach import attach, missing_points
from stopguard_vllm.plugin_front_end import RANKS_VARIABLE, attach_front_end, attach_launcher, ranks_of
from stopguard_vllm.plugin_probe import ENDED_MARK, QUIET_SECONDS, SchedulerProbe, outer_id
from tests.vllm.imitation import Block, Core, Request, RequestStatus, Scheduler, balance
from tests.vllm.scheduler_rig import ID, OURS, Rig, short

# ---- what is said --------------------------------------------------------------------------------------


def test_a_normal_life() -> None:
    rig = Rig()
    rig.add(prompt=30, tokens=3)
    for _ in range(3):
        rig.core.step()
    assert rig.sink.told(wire.TokensComputed, wire.TokensEmitted) == [
        f"Added {short()} 30 {OURS}",
        f"Moved {short()} running",
        f"BlocksHeld {short()} 2",
        f"TokensComputed {short()} 3",
        f"TokensEmitted {short()} 3",
        f"BlocksHeld {short()} 1",
        f"BlocksReturned {short()} 3 False",
        f"Moved {short()} gone",
        f"Finished {short()} length",
    ]


def test_steps_in_which_only_tokens_come_are_told_together() -> None:
    rig = Rig()
    rig.add(prompt=5)
    rig.core.step()
    rig.sink.sent.clear()
    rig.core.step()
    rig.core.step()
    assert rig.sink.sent == []
    rig.at += QUIET_SECONDS
    rig.core.step()
    (frame,) = rig.sink.sent
    assert [(type(event), event.tokens) for event in frame.events] == [
        (wire.TokensComputed, 4),
        (wire.TokensEmitted, 4),
    ]
    assert (frame.running_now, frame.waiting_now, frame.blocks_free_now) == (1, 0, 39)


def test_an_abort_between_steps() -> None:
    rig = Rig()
    rig.add()
    rig.core.step()
    rig.sink.sent.clear()
    rig.abort(ID)
    rig.probe.flush()
    assert rig.sink.told() == [f"BlocksReturned {short()} 2 False", f"Moved {short()} gone", f"AbortApplied {short()}"]


def test_an_abort_during_a_step_makes_its_token_stale() -> None:
    rig = Rig()
    rig.add()
    rig.core.step()
    rig.probe.flush()
    rig.sink.sent.clear()
    rig.core.step(during=lambda: rig.abort(ID))
    events = rig.sink.events
    assert [type(event).__name__ for event in events] == [
        *("BlocksReturned", "Moved", "TokensComputed", "AbortApplied", "TokensDropped"),
    ]
    assert events[-1] == wire.TokensDropped(ID, events[-1].at, 1, True)
    assert balance(events)[ID] == (-2, 0)


def test_an_abort_with_two_steps_under_way_waits_for_both() -> None:
    rig = Rig()
    rig.add()
    rig.core.step()
    first, second = rig.scheduler.schedule(), rig.scheduler.schedule()
    rig.abort(ID)
    sampled = SimpleNamespace(sampled_token_ids=[[7]], req_id_to_index={ID: 0})
    rig.scheduler.update_from_output(first, sampled)
    assert balance(rig.sink.events)[ID] == (0, 1)
    rig.scheduler.update_from_output(second, sampled)  # the last step of all: nothing after it would send its events
    assert balance(rig.sink.events)[ID] == (0, 0)


def test_an_abort_for_nobody_is_said_to_be_for_nobody() -> None:
    rig = Rig()
    rig.abort("chatcmpl-x-12345678")
    rig.probe.flush()
    assert rig.sink.told() == ["AbortNoop l-x-12345678"]


def test_a_stop_string_is_an_end_and_no_stop() -> None:
    rig = Rig()
    rig.add()
    rig.core.step()
    rig.probe.abort_arrived([ID, ENDED_MARK + ID])
    rig.abort(ID, ENDED_MARK + ID)
    rig.probe.flush()
    told = rig.sink.told()
    assert f"Finished {short()} stop" in told
    assert not [line for line in told if line.startswith(("AbortApplied", "AbortNoop"))]
    assert [line for line in told if line.startswith("AbortArrived")] == [f"AbortArrived {short()}"]


@pytest.mark.parametrize(
    ("internal", "owner"),
    [(ID, OURS), (f"0_{ID}", OURS), ("chatcmpl-x-12345678", ""), ("1_cmpl-x-0-12345678", "cmpl-x-0-12345678")],
)
def test_a_part_says_whose_it_is(internal: str, owner: str) -> None:
    rig = Rig()
    rig.add(internal)
    rig.probe.flush()
    (event,) = rig.sink.events
    assert isinstance(event, wire.Added)
    assert event.parent_id == owner
    assert rig.probe.snapshot(1).requests[0].parent_id == owner


def test_preemption_by_the_scheduler_and_return() -> None:
    rig = Rig()
    request = rig.add(prompt=30)
    rig.core.step()
    rig.sink.sent.clear()
    rig.scheduler.running.remove(request)
    rig.scheduler._preempt_request(request, 0.0)
    rig.core.step()
    assert rig.sink.told() == [
        f"BlocksReturned {short()} 2 False",
        f"Preempted {short()} 30",
        f"Moved {short()} preempted",
        f"Resumed {short()}",
        f"Moved {short()} running",
        f"BlocksHeld {short()} 2",
    ]


def test_fenced_blocks_come_back_behind_their_fence() -> None:
    rig = Rig(defers=True)
    rig.add()
    rig.core.step()
    rig.sink.sent.clear()
    rig.core.step(during=lambda: rig.abort(ID))
    told = rig.sink.told()
    assert told[0] == f"BlocksFenced {short()} 2 9"
    assert f"BlocksReturned {short()} 2 True" in told


@pytest.mark.parametrize("moment", ["at the stop", "at the fence"])
def test_a_block_that_does_not_come_back_behind_its_fence_stays_there(moment: str) -> None:
    rig = Rig(defers=True)
    rig.add(prompt=100)
    rig.core.step()
    free, free_blocks = type(rig.scheduler)._free_request_blocks, rig.scheduler.pool.free_blocks
    if moment == "at the stop":

        class Keeps(Scheduler):
            def _free_request_blocks(self, request: Request) -> None:
                self.req_to_blocks[request.request_id][2].ref_cnt += 1
                free(self, request)

        rig.hooks.remove()
        rig.scheduler.__class__ = Keeps
        attach(rig.scheduler, rig.probe, rig.hooks)
    else:
        rig.scheduler.pool.free_blocks = lambda blocks: free_blocks(list(blocks)[1:])  # type: ignore[method-assign]
    rig.probe.flush()
    rig.sink.sent.clear()

    def abort() -> None:
        rig.abort(ID)
        (row,) = rig.probe.snapshot(1).requests
        assert (row.place, row.blocks_held, row.blocks_fenced) == ("gone", 0, 7)

    rig.core.step(during=abort)
    told = rig.sink.told()
    assert f"BlocksFenced {short()} 7 9" in told
    assert f"BlocksReturned {short()} 6 True" in told
    (row,) = rig.probe.snapshot(1).requests
    assert (row.place, row.blocks_held, row.blocks_fenced, row.parent_id) == ("gone", 0, 1, OURS)


def test_a_fence_that_is_not_done_is_left_alone() -> None:
    rig = Rig(defers=True)
    rig.add()
    rig.core.step()
    first = rig.scheduler.schedule()
    rig.abort(ID)
    rig.probe.flush()
    rig.sink.sent.clear()
    rig.scheduler.processed_step_seq = 8
    rig.scheduler._drain_deferred_frees()
    rig.probe.flush()
    assert rig.sink.told() == []
    rig.scheduler.processed_step_seq = 9
    rig.scheduler.update_from_output(first, SimpleNamespace(sampled_token_ids=[], req_id_to_index={}))
    assert f"BlocksReturned {short()} 2 True" in rig.sink.told()


def test_a_block_that_did_not_come_back_stays_in_the_books() -> None:
    rig = Rig()
    rig.add(prompt=100)
    rig.core.step()
    free_blocks = rig.scheduler.pool.free_blocks

    def keeps_one(blocks: Any) -> None:
        free_blocks(list(blocks)[1:])

    rig.scheduler.pool.free_blocks = keeps_one  # type: ignore[method-assign]
    rig.abort(ID)
    rig.probe.flush()
    assert balance(rig.sink.events)[ID] == (1, 0)


def test_a_shared_block_is_returned_by_each_of_its_holders() -> None:
    rig = Rig()
    first, second = rig.add("cmpl-one-0-12345678"), rig.add("cmpl-two-0-12345678")
    rig.core.step()
    shared: Block = rig.scheduler.req_to_blocks[first.request_id][0]
    mine = rig.scheduler.req_to_blocks[second.request_id]
    rig.scheduler.pool.free_blocks([mine[0]])
    mine[0] = shared
    shared.ref_cnt += 1
    rig.abort(first.request_id)
    rig.abort(second.request_id)
    rig.probe.flush()
    assert all(blocks == 0 for blocks, _ in balance(rig.sink.events).values())


def test_a_shared_block_that_is_kept_is_seen_too() -> None:
    rig = Rig()
    rig.add()
    rig.core.step()
    shared: Block = rig.scheduler.req_to_blocks[ID][0]
    shared.ref_cnt += 1  # somebody else holds it
    free_blocks = rig.scheduler.pool.free_blocks
    rig.scheduler.pool.free_blocks = lambda blocks: free_blocks(  # type: ignore[method-assign]
        [block for block in blocks if block is not shared]
    )
    rig.abort(ID)
    rig.probe.flush()
    assert balance(rig.sink.events)[ID][0] == 1


def test_blocks_that_went_on_the_way_are_returned_in_the_end() -> None:
    """Behind a sliding window vLLM gives blocks back and puts its null block in their places."""
    rig = Rig()
    rig.add(prompt=100)
    rig.core.step()
    blocks = rig.scheduler.req_to_blocks[ID]
    rig.scheduler.pool.free_blocks(blocks[:3])
    for place in range(3):
        blocks[place] = Block()
        blocks[place].is_null, blocks[place].ref_cnt = True, 2  # it is never free
    rig.abort(ID)
    rig.probe.flush()
    assert balance(rig.sink.events)[ID][0] == 0
    assert rig.scheduler.pool.get_num_free_blocks() == 40


def _transferring(rig: Rig) -> Request:
    """A request whose three blocks a KV connector fills from elsewhere."""
    rig.scheduler.connector = object()
    rig.probe = SchedulerProbe(rig.scheduler, rig.sink, rig.clock)
    request = Request(ID)
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    rig.scheduler.requests[ID] = request
    rig.scheduler.req_to_blocks[ID] = rig.scheduler.pool.take(3)
    rig.scheduler.deferred_waiting.add(request)
    rig.probe.scheduled(NO_STEP)
    return request


NO_STEP = SimpleNamespace(
    scheduled_new_reqs=(), scheduled_cached_reqs=SimpleNamespace(req_ids=(), new_block_ids=(), resumed_req_ids=())
)


def test_a_transfer_from_elsewhere_is_a_place_of_its_own() -> None:
    rig = Rig()
    request = _transferring(rig)
    request.status = RequestStatus.WAITING
    rig.probe.scheduled(NO_STEP)
    assert rig.sink.told() == [
        f"Moved {short()} transferring",
        f"BlocksHeld {short()} 3",
        f"Moved {short()} waiting",
    ]


def test_one_that_is_stopped_during_its_transfer_is_there_until_that_is_over() -> None:
    rig = Rig()
    request = _transferring(rig)
    rig.sink.sent.clear()
    before = rig.probe.before_finish([ID])
    request.status = RequestStatus.FINISHED_ABORTED
    rig.scheduler.deferred_waiting.discard(request)
    rig.probe.finished_from_outside(before, RequestStatus.FINISHED_ABORTED)
    rig.probe.scheduled(NO_STEP)
    assert rig.sink.told() == [f"AbortApplied {short()}"]
    (row,) = rig.probe.snapshot(1).requests
    assert (row.place, row.blocks_held) == ("transferring", 3)
    blocks = rig.probe.before_free(request)
    rig.scheduler._free_blocks(request)
    rig.probe.freed(blocks, request)
    rig.probe.flush()
    assert rig.sink.told() == [f"BlocksReturned {short()} 3 False", f"Moved {short()} gone"]


def test_a_storm_leaves_nothing() -> None:
    choices = random.Random(7)
    rig = Rig(blocks=400, defers=True)
    for number in range(200):
        rig.add(f"cmpl-{number}-0-12345678", prompt=choices.randrange(1, 60), tokens=choices.randrange(1, 9))
        alive = list(rig.scheduler.requests)
        match choices.randrange(4):
            case 0:
                rig.core.step(during=lambda alive=alive: rig.abort(choices.choice(alive)))
            case 1 if rig.scheduler.running:
                victim = choices.choice(rig.scheduler.running)
                rig.scheduler.running.remove(victim)
                rig.scheduler._preempt_request(victim, 0.0)
            case 2:
                rig.abort(choices.choice(alive))
            case _:
                rig.core.step()
    while rig.scheduler.requests:
        rig.core.step()
    rig.core.step()
    rig.probe.flush()
    events = rig.sink.events
    assert set(balance(events).values()) == {(0, 0)}
    added = [event.request_id for event in events if isinstance(event, wire.Added)]
    gone = [event.request_id for event in events if isinstance(event, wire.Moved) and event.place == "gone"]
    assert sorted(added) == sorted(gone)
    assert rig.scheduler.pool.get_num_free_blocks() == 400
    assert not rig.failed


# ---- commands ------------------------------------------------------------------------------------------


def test_abort_by_our_id_ends_the_children_and_nobody_else_and_tells_the_front_end() -> None:
    rig = Rig()
    for name in (f"0_{ID}", f"1_{ID}", ID.replace("a", "b"), f"chatcmpl-{OURS[:-1]}b-12345678"):
        rig.add(name)
    rig.core.step()
    assert rig.order("abort") == "applied"
    assert rig.core.told == [f"0_{ID}", f"1_{ID}"]
    assert len(rig.scheduler.requests) == 2


@pytest.mark.parametrize("name", ["", "sg-", OURS[:-1], OURS + "0", "chatcmpl-", ID[:-1], "*"])
def test_only_an_exact_name_is_one(name: str) -> None:
    rig = Rig()
    rig.add()
    rig.core.step()
    assert rig.order("abort", name) == "unknown"
    assert rig.scheduler.requests


@pytest.mark.parametrize(
    ("internal", "name"),
    [(ID, OURS), (f"1_{ID}", OURS), ("cmpl-x-0-12345678", "cmpl-x-0"), ("2_chatcmpl-y-12345678", "chatcmpl-y")],
)
def test_the_name_that_a_client_may_know(internal: str, name: str) -> None:
    assert outer_id(internal) == name


def test_an_abort_after_the_end_finds_it_gone() -> None:
    rig = Rig()
    rig.add(tokens=1)
    rig.core.step()
    assert rig.order("abort") == "gone"
    assert rig.order("abort", "sg-" + "c" * 32) == "unknown"


def test_an_abort_that_the_scheduler_does_not_carry_out_is_no_success() -> None:
    rig = Rig()
    rig.add()
    rig.scheduler.finish_requests = lambda request_ids, finished_status: []  # type: ignore[method-assign]
    assert rig.order("abort") == "failed"


def test_preempt_hold_and_resume() -> None:
    rig = Rig()
    running, waiting = rig.add(prompt=30), None
    rig.core.step()
    assert rig.order("preempt") == "applied"
    assert rig.scheduler.pool.get_num_free_blocks() == 40
    assert not rig.scheduler.running
    assert not rig.scheduler.waiting
    rig.core.step()
    assert running.num_output_tokens == 1
    snapshot = rig.probe.snapshot(1)
    assert [(row.place, row.blocks_held) for row in snapshot.requests] == [("preempted", 0)]
    assert snapshot.waiting_now == 1
    assert rig.order("preempt") == "applied"  # twice is once
    assert rig.order("resume") == "applied"
    assert rig.order("resume") == "gone"
    rig.core.step()
    assert running.num_output_tokens == 2
    other = "sg-" + "b" * 32
    waiting = rig.add(f"cmpl-{other}-0-12345678")
    assert rig.order("hold", other) == "applied"
    rig.core.step()
    assert waiting.num_output_tokens == 0
    assert [row.place for row in rig.probe.snapshot(1).requests] == ["running", "paused"]
    assert rig.order("hold") == "refused"  # it runs
    assert rig.order("resume", other) == "applied"
    rig.core.step()
    assert waiting.num_output_tokens == 1
    assert set(balance(rig.sink.events).values()) == {(3, 0), (2, 0)}


def test_an_abort_finds_what_is_parked() -> None:
    rig = Rig()
    rig.add()
    rig.core.step()
    rig.order("preempt")
    rig.abort(ID)
    assert not rig.probe.parked
    assert not rig.scheduler.requests
    assert rig.order("resume") == "gone"


def test_children_are_parked_together() -> None:
    rig = Rig()
    rig.add(f"0_{ID}")
    rig.core.step()
    rig.add(f"1_{ID}")
    assert rig.order("preempt") == "applied"
    assert sorted(rig.probe.parked) == [f"0_{ID}", f"1_{ID}"]
    assert rig.order("resume") == "applied"
    rig.core.step()
    assert len(rig.scheduler.running) == 2


def test_who_may_not_be_preempted() -> None:
    rig = Rig()
    request = rig.add()
    rig.core.step()
    request.resumable = True
    assert rig.order("preempt") == "unsupported"
    request.resumable = False
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert rig.order("hold") == "refused"
    request.status = RequestStatus.RUNNING
    rig.scheduler.connector = object()
    assert rig.order("preempt") == "unsupported"
    assert not rig.probe.parked


# ---- attaching -----------------------------------------------------------------------------------------


def test_an_unknown_scheduler_is_left_alone() -> None:
    scheduler = Scheduler()
    assert missing_points(scheduler) == ()
    del scheduler.kv_cache_manager.coordinator.single_type_managers
    assert missing_points(scheduler) == ("kv_cache_manager.coordinator.single_type_managers",)
    assert "schedule" in missing_points(SimpleNamespace())


def test_taken_off_nothing_is_left() -> None:
    rig = Rig()
    rig.hooks.remove()
    rig.hooks.remove()
    assert [name for name, value in vars(rig.scheduler).items() if callable(value)] == []


def test_a_hook_that_throws_never_reaches_the_engine() -> None:
    rig = Rig()
    rig.add()
    rig.probe.stepped = lambda *arguments: None  # type: ignore[method-assign]
    rig.probe._tables = [None]  # type: ignore[list-item]
    rig.core.step()
    for number in range(12):
        rig.add(f"cmpl-{number}-0-12345678")
        rig.abort(f"cmpl-{number}-0-12345678")
    assert rig.failed == ["_free_request_blocks (before)"]


def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    class AsyncLLM:
        async def _add_request(self, request: Any) -> None: ...
        async def abort(self, name: str, internal: bool = False) -> None: ...

    class EngineCoreProc(Core):
        def process_input_sockets(self, *arguments: Any) -> str:
            return "reads"

    class AsyncMPClient:
        def _send_input(self, request_type: Any, request: Any, engine: Any = None) -> Any:
            return request

    class OutputProcessor:
        def process_outputs(self) -> Any:
            return SimpleNamespace(reqs_to_abort=[ID])

    class CoreEngineProcManager:
        def __init__(self, local_engine_count: int, start_index: int, local_start_index: int, vllm_config: Any) -> None:
            self.started = local_engine_count

    classes = SimpleNamespace(
        AsyncLLM=AsyncLLM,
        EngineCoreProc=EngineCoreProc,
        AsyncMPClient=AsyncMPClient,
        OutputProcessor=OutputProcessor,
        CoreEngineProcManager=CoreEngineProcManager,
    )
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.version": {"__version__": "0.32.0"},
        "vllm.v1": {},
        "vllm.v1.request": {"RequestStatus": RequestStatus},
        "vllm.v1.engine": {"EngineCoreRequestType": SimpleNamespace(WAKEUP="wake", ABORT="abort")},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.engine.core": {"EngineCoreProc": EngineCoreProc},
        "vllm.v1.engine.core_client": {"AsyncMPClient": AsyncMPClient},
        "vllm.v1.engine.output_processor": {"OutputProcessor": OutputProcessor},
        "vllm.v1.engine.utils": {"CoreEngineProcManager": CoreEngineProcManager},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return classes


def _attributes(classes: SimpleNamespace) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(kind)) for name, kind in vars(classes).items()}


def test_without_a_collector_it_does_nothing_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = _fake_vllm(monkeypatch)
    before = _attributes(classes)
    monkeypatch.delenv("STOPGUARD_COLLECTOR", raising=False)
    plugin.register()
    assert _attributes(classes) == before
    monkeypatch.setenv("STOPGUARD_COLLECTOR", "/nowhere/collector.sock")
    plugin.register()
    changed = {name for name, values in _attributes(classes).items() if values != before[name]}
    assert changed == set(before)
    once = _attributes(classes)
    plugin.register()  # vLLM may load a plugin more than once
    assert _attributes(classes) == once


def test_without_a_token_the_core_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = _fake_vllm(monkeypatch)
    monkeypatch.setenv("STOPGUARD_COLLECTOR", "/nowhere/collector.sock")
    monkeypatch.delenv("STOPGUARD_COLLECTOR_TOKEN", raising=False)
    plugin.register()
    core = classes.EngineCoreProc()
    before = set(vars(core)) | set(vars(core.scheduler))
    assert core.process_input_sockets() == "reads"
    assert set(vars(core)) | set(vars(core.scheduler)) == before


def test_a_core_is_attached_and_woken_for_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = _fake_vllm(monkeypatch)
    monkeypatch.setenv("STOPGUARD_COLLECTOR", "/nowhere/collector.sock")
    monkeypatch.setenv("STOPGUARD_COLLECTOR_TOKEN", "0123456789abcdef")
    core = classes.EngineCoreProc()
    attached = plugin.attach_core(core)
    assert attached is not None
    try:
        assert attached.sender.on_command is not None
        attached.sender.on_command()
        assert core.input_queue.get_nowait() == ("wake", None)
        core._handle_client_request("add", Request(ID))
        core.step()
        attached.sender._commands.append(wire.Command(1, "abort", OURS))
        core._handle_client_request("wake", None)
        assert core.told == [ID]
        core._handle_client_request("add", Request(ID))
        core.step()
        attached.sender._commands.append(wire.Command(2, "preempt", OURS))
        core._handle_client_request("wake", None)
        assert list(attached.probe.parked) == [ID]
        core.runs = False
        core._handle_client_request("wake", None)
        assert not attached.probe.parked  # a drain has to see it
        core.aborts_queue.put_nowait([ID])
        assert attached.probe.slots.look_again is not None
        attached.probe.slots.look_again(0.0)
        assert core.input_queue.get(timeout=10) == ("wake", None)
        assert attached.probe.urgent
        attached.failed("schedule")
        assert "schedule" not in vars(core.scheduler)
        assert "_handle_client_request" not in vars(core)
    finally:
        attached.sender.close()


# ---- launcher and API server -----------------------------------------------------------------------------


def test_a_registration_that_is_cut_off_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    classes = _fake_vllm(monkeypatch)
    aborted: list[tuple[str, bool]] = []
    arrived = asyncio.Event()

    class Front(classes.AsyncLLM):  # type: ignore[misc, name-defined]
        async def _add_request(self, request: Any) -> None:
            arrived.set()
            await asyncio.sleep(3600)

        async def abort(self, name: str, internal: bool = False) -> None:
            aborted.append((name, internal))

    attach_front_end(Front, classes.OutputProcessor, classes.AsyncMPClient)

    async def leave() -> None:
        task = asyncio.create_task(Front()._add_request(Request(ID)))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert aborted == [(ID, True)]


def test_aborts_of_stop_strings_are_marked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = _fake_vllm(monkeypatch)
    assert attach_front_end(classes.AsyncLLM, classes.OutputProcessor, classes.AsyncMPClient) == ()
    client, abort = classes.AsyncMPClient(), SimpleNamespace(value=b"\x01")
    assert client._send_input(abort, [ID]) == [ID]
    classes.OutputProcessor().process_outputs()
    assert client._send_input(SimpleNamespace(value=b"\x00"), [ID]) == [ID]
    assert client._send_input(abort, ["other"]) == ["other"]
    assert client._send_input(abort, [ID, "other"]) == [ID, "other", ENDED_MARK + ID]
    assert client._send_input(abort, [ID]) == [ID]


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = _fake_vllm(monkeypatch)
    monkeypatch.setenv(RANKS_VARIABLE, "")
    attach_launcher(classes.CoreEngineProcManager)
    parallel = SimpleNamespace(data_parallel_size=4)
    config = SimpleNamespace(parallel_config=parallel)
    classes.CoreEngineProcManager(local_engine_count=2, start_index=2, local_start_index=0, vllm_config=config)
    assert ranks_of(3, dict(os.environ)) == (3, 4)
    parallel.data_parallel_external_lb = True
    classes.CoreEngineProcManager(1, 3, 0, SimpleNamespace(parallel_config=parallel))
    assert ranks_of(3, dict(os.environ)) == (0, 1)
    assert ranks_of(0, {}) == (0, 1)
    assert classes.CoreEngineProcManager(1, 0, 0, None).started == 1  # what is not understood is still called
