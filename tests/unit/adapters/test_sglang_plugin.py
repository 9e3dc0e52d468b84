"""The parts of SGLang's plugin that need no SGLang: records, frames, whole ids, measured releases, preemption."""

from __future__ import annotations

import enum
import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stopguard.probe import wire
from stopguard_sglang import plugin, plugin_front, plugin_hooks, plugin_scheduler
from stopguard_sglang.plugin_front import FrontWatch, new_child_id
from stopguard_sglang.plugin_scheduler import SchedulerWatch, parent_of

OURS = "sg-" + "ab" * 16


class Sender:
    """Keeps what is sent; `wanted` are commands that have come."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.wanted: deque[wire.Command] = deque()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def commands(self) -> list[wire.Command]:
        taken = list(self.wanted)
        self.wanted.clear()
        return taken

    @property
    def events(self) -> list[wire.Event]:
        return [event for frame in self.sent if isinstance(frame, wire.Frame) for event in frame.events]


class Req:
    """A request as SGLang's scheduler keeps it."""

    def __init__(self, rid: str, prompt: int = 4, **params: Any) -> None:
        self.rid = rid
        self.origin_input_ids = [0] * prompt
        self.output_ids: list[int] = []
        self.send_token_offset = 0
        self.kv = SimpleNamespace(holds_kv=False, kv_allocated_len=0, cache_protected_len=0, is_kv_released=True)
        self.finished_reason: Any = None
        self.sampling_params = SimpleNamespace(**{"max_new_tokens": 16, **params})
        self.is_retracted = False

    def finished(self) -> bool:
        return self.finished_reason is not None

    def hold(self, tokens: int) -> None:
        self.kv.holds_kv, self.kv.kv_allocated_len, self.kv.is_kv_released = True, tokens, False

    def say(self, tokens: int, sent: int | None = None) -> None:
        self.output_ids += [1] * tokens
        self.send_token_offset = len(self.output_ids) if sent is None else sent


class Batch:
    def __init__(self, *reqs: Req, decode: bool = True) -> None:
        self.reqs = list(reqs)
        self.forward_mode = SimpleNamespace(is_extend=lambda: not decode, is_decode=lambda: decode)
        self.batch_is_full = True

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[index] for index in keep_indices]


class Pool:
    """Allocator and tree in one: `free` tokens, the rest is held or locked."""

    def __init__(self, size: int) -> None:
        self.free = size
        self.page_size = 1
        self.free_group = None

    def available_size(self) -> int:
        return self.free

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0


@pytest.fixture
def scheduler() -> Any:
    pool = Pool(100)
    return SimpleNamespace(
        token_to_kv_pool_allocator=pool,
        tree_cache=pool,
        waiting_queue=[],
        result_queue=deque(),
        chunked_req=None,
        req_to_token_pool=None,
        hisparse_coordinator=None,
    )


@pytest.fixture
def watch(scheduler: Any) -> SchedulerWatch:
    watch = SchedulerWatch()
    watch.scheduler = scheduler
    watch._started = watch._measures = True
    watch.sender = Sender()  # type: ignore[assignment]
    return watch


def sender_of(watch: SchedulerWatch) -> Sender:
    sender: Any = watch.sender
    assert isinstance(sender, Sender)
    return sender


def kinds_of(events: list[wire.Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def kinds(watch: SchedulerWatch) -> list[str]:
    return kinds_of(sender_of(watch).events)


def hook_up(monkeypatch: pytest.MonkeyPatch, watch: SchedulerWatch) -> None:
    """Let the hooks of each step call this one."""
    monkeypatch.setattr(plugin_hooks, "watch", watch)
    for name in ("turn", "scheduled", "flush"):
        monkeypatch.setattr(plugin_hooks, f"_{name}", getattr(watch, name))


def test_without_a_collector_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOPGUARD_COLLECTOR", raising=False)

    touched: list[bool] = []
    monkeypatch.setattr(plugin, "_register", lambda: touched.append(True))
    plugin.register()
    assert not touched


def test_a_plugin_that_cannot_be_set_up_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STOPGUARD_COLLECTOR", "/tmp/nowhere.sock")
    monkeypatch.setenv("STOPGUARD_COLLECTOR_TOKEN", "a-token-that-is-long-enough")
    monkeypatch.setattr(plugin, "_register", lambda: 1 / 0)
    plugin.register()
    assert "SGLang runs without it" in caplog.text


@pytest.mark.parametrize(
    ("absent", "said", "attached"),
    [
        ("nothing", "all 18 hook points of SGLang", 18),
        ("send_abort_output", "no Scheduler.send_abort_output (its queues are searched 50 times a second", 17),
        # Books without it would call each request a leak: only what mends the front end is put in.
        ("release_kv_cache", "StopGuard's probe is off: SGLang  has no common.release_kv_cache", 6),
    ],
)
def test_a_version_that_lacks_something_is_watched_in_part_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, absent: str, said: str, attached: int
) -> None:
    registered: list[str] = []
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookType = enum.Enum("Way", {"B": "before", "A": "after", "R": "around"})  # type: ignore[misc, attr-defined]
    registry.HookRegistry = SimpleNamespace(  # type: ignore[attr-defined]
        register=lambda target, function, how: registered.append(target)
    )
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(plugin.Hook, "exists", lambda hook: not hook.target.endswith(absent))
    monkeypatch.setattr(plugin_scheduler.watch, "greet", lambda *_: None)
    monkeypatch.setattr(plugin_front.watch, "greet", lambda *_: None)
    with caplog.at_level("INFO", "stopguard.probe"):
        plugin._register()
    assert said in caplog.text
    assert len(registered) == attached


def test_a_normal_life_is_told_once(watch: SchedulerWatch) -> None:
    req = Req(OURS)
    watch.entered(req)
    req.hold(4)
    watch.scheduled(Batch(req, decode=False))
    req.say(1)
    watch.flush()
    req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})
    record = watch.known(req)
    assert record is not None
    watch.released(record, 4, 0)
    watch.flush()
    assert kinds(watch) == [
        *("Added", "Moved", "BlocksHeld", "TokensComputed", "TokensEmitted"),
        *("BlocksReturned", "Finished", "Moved"),
    ]
    assert not watch.records
    assert [frame.sequence for frame in sender_of(watch).sent] == [1, 2]


def test_steps_that_only_bring_tokens_are_told_together(
    watch: SchedulerWatch, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 100.0
    for module in (plugin_scheduler, plugin_hooks):
        monkeypatch.setattr(module, "monotonic", lambda: at)
    hook_up(monkeypatch, watch)
    req = Req(OURS)
    watch.entered(req)
    req.hold(4)

    def step(batch: Batch) -> None:
        plugin_hooks.ingest(None, scheduler)
        plugin_hooks.next_batch(lambda _: SimpleNamespace(batch_to_run=batch), scheduler)
        plugin_hooks.read_results(lambda *_: None, scheduler, batch)

    step(Batch(req, decode=False))
    frames = sender_of(watch).sent
    assert kinds(watch) == ["Added", "Moved", "BlocksHeld"], "that it runs is told at once"
    told, batch = len(frames), Batch(req)
    watch.decode_mode = batch.forward_mode
    for _ in range(3):
        at += plugin_scheduler.QUIET_SECONDS / 4
        req.hold(req.kv.kv_allocated_len + 1)
        req.say(1)
        step(batch)
    assert len(frames) == told
    at += plugin_scheduler.QUIET_SECONDS / 4
    step(batch)
    assert frames[-1].events == [
        wire.BlocksHeld(OURS, at, 3),
        wire.TokensComputed(OURS, at, 3),
        wire.TokensEmitted(OURS, at, 3),
    ]
    assert len(frames) == told + 1


def test_a_command_is_seen_in_a_quiet_turn(
    watch: SchedulerWatch, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook_up(monkeypatch, watch)
    watch.entered(Req(OURS))
    for _ in range(2):
        plugin_hooks.ingest(None, scheduler)
    assert not watch.attention
    sender_of(watch).wanted.append(wire.Command(7, "snapshot"))
    watch.nudge()
    plugin_hooks.ingest(None, scheduler)
    assert isinstance(sender_of(watch).sent[-1], wire.Snapshot)


def test_who_is_paused_is_counted_first(watch: SchedulerWatch) -> None:
    req = Req(OURS)
    watch.entered(req)
    watch.scheduled(Batch(req, decode=False))
    req.say(5)
    watch.paused("in_place")
    assert kinds_of(watch.events)[-3:] == ["TokensComputed", "TokensEmitted", "Moved"]


def test_health_generations_are_no_requests(watch: SchedulerWatch) -> None:
    watch.entered(Req("HEALTH_CHECK_1"))
    assert not watch.records
    assert not watch.events


def test_an_abort_hits_whole_ids_and_the_children_of_ours(watch: SchedulerWatch) -> None:
    names = ["abc", "abcd", OURS, f"{OURS}_0", f"{OURS}.{'0' * 32}"]
    reqs = {name: Req(name) for name in names}
    for req in reqs.values():
        watch.entered(req)

    def hit_by(rid: str) -> set[str]:
        hidden = watch.abort_comes(rid, False)
        found = {name for name, req in reqs.items() if req.rid.startswith(rid)}
        watch.abort_went(hidden)
        return found

    assert hit_by("abc") == {"abc"}
    assert hit_by("ab") == set()
    assert hit_by(OURS) == {OURS, f"{OURS}_0", f"{OURS}.{'0' * 32}"}
    assert [req.rid for req in reqs.values()] == names, "every id is as it was"


def test_an_abort_of_nobody_reaches_nobody(monkeypatch: pytest.MonkeyPatch, watch: SchedulerWatch) -> None:
    monkeypatch.setattr(plugin_hooks, "watch", watch)
    asked: list[Any] = []
    plugin_hooks.abort(lambda *each: asked.append(each), None, SimpleNamespace(rid="", abort_all=False))
    assert not asked


def test_an_abort_that_finds_nothing_says_so(watch: SchedulerWatch) -> None:
    watch.abort_comes("abc", False)
    watch.flush()
    assert kinds(watch) == ["AbortNoop"]


def test_tokens_that_went_nowhere_stay_on_their_request(
    watch: SchedulerWatch, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_hooks, "watch", watch)
    req = Req(OURS)
    watch.entered(req)
    pool = scheduler.token_to_kv_pool_allocator
    req.hold(20)
    pool.free -= 20
    watch.scheduled(Batch(req, decode=False))
    req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "stop"})

    def release(req: Req, tree: Any, *, checkpoint: bool) -> None:
        pool.free += 12  # eight are forgotten
        req.kv.holds_kv, req.kv.kv_allocated_len, req.kv.is_kv_released = False, 0, True

    plugin_hooks.release(release, req, pool, checkpoint=True)
    watch.flush()
    returned = [event for event in sender_of(watch).events if isinstance(event, wire.BlocksReturned)]
    assert [event.blocks for event in returned] == [12]


def test_an_aborted_request_says_what_it_threw_away(watch: SchedulerWatch, scheduler: Any) -> None:
    req = Req(OURS)
    watch.entered(req)
    req.hold(6)
    watch.scheduled(Batch(req, decode=False))
    watch.abort_comes(OURS, False)
    req.say(5, sent=3)
    req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "abort", "status_code": None})
    scheduler.result_queue.append((Batch(req), None))  # the step in flight computes it once more
    record = watch.known(req)
    assert record is not None
    watch.released(record, 6, 0)
    watch.flush()
    dropped = [
        (event.tokens, event.stale) for event in sender_of(watch).events if isinstance(event, wire.TokensDropped)
    ]
    assert dropped == [(2, False), (1, True)]
    assert kinds(watch)[-3:] == ["AbortApplied", "Finished", "Moved"]


def test_a_prompt_computed_for_children_is_no_end_of_their_request(watch: SchedulerWatch) -> None:
    req = Req(f"{OURS}.{'1' * 32}", max_new_tokens=0)
    watch.entered(req)
    req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})
    record = watch.known(req)
    assert record is not None
    watch.released(record, 0, 0)
    watch.flush()
    assert "Finished" not in kinds(watch)


def test_a_refused_request_is_not_a_stop(watch: SchedulerWatch) -> None:
    req = Req(OURS)
    watch.entered(req)
    watch.echoed(req, {"type": "abort", "status_code": 503, "message": "The request queue is full."})
    watch.flush()
    (finished,) = (event for event in sender_of(watch).events if isinstance(event, wire.Finished))
    assert finished.reason == "rejected"


def test_without_echoes_whoever_is_in_no_queue_has_ended(watch: SchedulerWatch, scheduler: Any) -> None:
    """SGLang before 0.5.23 sends its echoes from many places."""
    watch.greet("0.5.22", [], ["Scheduler.send_abort_output"])
    scheduler.running_batch = scheduler.last_batch = None
    stays, goes = Req("stays"), Req(OURS)
    for req in (stays, goes):
        watch.entered(req)
    scheduler.waiting_queue.append(stays)
    watch.abort_comes(OURS, False)
    watch.turn(scheduler)
    assert kinds(watch)[-3:] == ["AbortApplied", "Finished", "Moved"]
    assert list(watch.records) == ["stays"]


def test_a_snapshot_has_every_request(watch: SchedulerWatch) -> None:
    req = Req(OURS)
    watch.entered(req)
    req.hold(4)
    watch.scheduled(Batch(req, decode=False))
    sender_of(watch).wanted.append(wire.Command(7, "snapshot"))
    watch.turn(watch.scheduler)
    frame, snapshot = sender_of(watch).sent
    assert isinstance(snapshot, wire.Snapshot)
    assert (snapshot.command_id, snapshot.sequence) == (7, frame.sequence)
    assert [(row.request_id, row.place, row.blocks_held) for row in snapshot.requests] == [(OURS, "running", 4)]


def test_an_idle_scheduler_answers_without_waking(watch: SchedulerWatch) -> None:
    sender_of(watch).wanted += [wire.Command(1, "snapshot"), wire.Command(2, "abort", OURS)]
    watch.nudge()
    snapshot, answer = sender_of(watch).sent
    assert snapshot.requests == []
    assert answer.answer == "unknown"


class TestPreemption:
    @pytest.fixture
    def released(self, watch: SchedulerWatch) -> list[Req]:
        """Who was released; the engine's own hook reports the retraction as it does in SGLang."""
        done: list[Req] = []

        def release(*, req: Req, **_: Any) -> None:
            done.append(req)
            req.is_retracted = True
            watch.retracted(req)

        watch.preempter._release = release
        return done

    def order(self, watch: SchedulerWatch, action: wire.Action, number: int) -> None:
        sender_of(watch).wanted.append(wire.Command(number, action, OURS))
        watch.turn(watch.scheduler)

    def answers(self, watch: SchedulerWatch) -> dict[int, str]:
        return {each.command_id: each.answer for each in sender_of(watch).sent if isinstance(each, wire.CommandAnswer)}

    def test_a_running_request_is_taken_out_between_steps(self, watch: SchedulerWatch, released: list[Req]) -> None:
        req, other = Req(OURS), Req("other")
        for each in (req, other):
            watch.entered(each)
        running = Batch(req, other)
        watch.scheduled(Batch(req, other, decode=False))
        self.order(watch, "preempt", 1)
        assert not released
        watch.preempter.between_steps({"running_batch": running, "last_batch": running})
        assert released == [req]
        assert running.reqs == [other]
        assert self.answers(watch) == {1: "applied"}

    def test_it_waits_for_its_prefill(self, watch: SchedulerWatch, released: list[Req]) -> None:
        req = Req(OURS)
        watch.entered(req)
        prefill = Batch(req, decode=False)
        watch.scheduled(prefill)
        self.order(watch, "preempt", 1)
        watch.preempter.between_steps({"running_batch": Batch(), "last_batch": prefill})
        assert not released
        assert self.answers(watch) == {}
        running = Batch(req)
        watch.preempter.between_steps({"running_batch": running, "last_batch": running})
        assert released == [req]

    @pytest.mark.parametrize("penalty", [{"presence_penalty": 0.5}, {"repetition_penalty": 1.1}])
    def test_penalties_are_refused(self, watch: SchedulerWatch, released: list[Req], penalty: dict[str, Any]) -> None:
        req = Req(OURS, **penalty)
        watch.entered(req)
        self.order(watch, "preempt", 1)
        watch.preempter.between_steps({"running_batch": Batch(req), "last_batch": None})
        assert self.answers(watch) == {1: "refused"}
        assert not released

    def test_it_stays_away_for_a_step(self, watch: SchedulerWatch, scheduler: Any, released: list[Req]) -> None:
        req = Req(OURS)
        watch.entered(req)
        watch.scheduled(Batch(req, decode=False))
        back: list[Req] = []
        scheduler._add_request_to_queue = lambda req, is_retracted: back.append(req)
        self.order(watch, "preempt", 1)
        watch.preempter.between_steps({"running_batch": Batch(req), "last_batch": None})
        assert watch.preempter._resume(OURS) == "refused"
        self.order(watch, "resume", 2)
        assert self.answers(watch)[2] == "accepted"
        assert back == [req]

    def test_a_queued_request_is_held(self, watch: SchedulerWatch, scheduler: Any, released: list[Req]) -> None:
        req = Req(OURS)
        watch.entered(req)
        scheduler.waiting_queue.append(req)
        self.order(watch, "hold", 1)
        watch.preempter.between_steps({"running_batch": Batch(), "last_batch": None})
        assert scheduler.waiting_queue == []
        self.order(watch, "resume", 2)
        assert scheduler.waiting_queue == [req]
        assert {"Preempted", "Resumed"} <= set(kinds(watch))

    def test_an_abort_finds_a_held_request(self, watch: SchedulerWatch, scheduler: Any, released: list[Req]) -> None:
        req = Req(OURS)
        watch.entered(req)
        scheduler.waiting_queue.append(req)
        self.order(watch, "hold", 1)
        watch.preempter.between_steps({"running_batch": Batch(), "last_batch": None})
        watch.abort_comes(OURS, False)
        assert scheduler.waiting_queue == [req]
        assert not watch.preempter.parked

    def test_an_unknown_request_is_unknown(self, watch: SchedulerWatch, released: list[Req]) -> None:
        watch.entered(Req("other"))
        self.order(watch, "preempt", 1)
        assert self.answers(watch) == {1: "unknown"}


class TestFront:
    def test_children_are_known_by_the_id_of_their_request(self) -> None:
        request = SimpleNamespace(rid=f"{OURS}_0")

        def regenerate(request: Any) -> str:
            request.rid = "0" * 32
            return "0" * 32

        assert new_child_id(regenerate, request) == request.rid == f"{OURS}.{'0' * 32}"
        assert parent_of(request.rid) == OURS
        manager = SimpleNamespace(rid_to_state={request.rid: None, "sg-other": None})
        assert FrontWatch().children_of(manager, OURS) == [request.rid]

    def test_the_ids_of_others_are_left_alone(self) -> None:
        request = SimpleNamespace(rid="abc")

        def regenerate(request: Any) -> str:
            request.rid = "1" * 32
            return "1" * 32

        assert new_child_id(regenerate, request) == "1" * 32
        manager = SimpleNamespace(rid_to_state={"abcd": None})
        assert FrontWatch().children_of(manager, "abc") == []

    @pytest.mark.parametrize("missing", ["_validate_and_resolve_lora", "_release_lora_once"])
    def test_where_only_half_of_a_lora_is_seen_none_is(self, missing: str) -> None:
        """SGLang 0.5.21 has the one and not the other: each request with an adapter would be called a leak."""
        watch = FrontWatch()
        watch.greet("0.5.21", [], [])
        watch.lora_taken(SimpleNamespace(rid=OURS, lora_id="adapter"))
        assert watch.loras == {OURS: 1}
        watch = FrontWatch()
        watch.greet("0.5.21", [], [f"TokenizerManager.{missing}"])
        watch.lora_taken(SimpleNamespace(rid=OURS, lora_id="adapter"))
        watch.lora_given_back(SimpleNamespace(obj=SimpleNamespace(rid=OURS)))
        assert not watch.loras
        assert watch.sequence == 0

    def test_an_abort_that_came_too_early_is_sent_again(self) -> None:
        state = SimpleNamespace(abort_sent=True)
        sent: list[str] = []
        manager = SimpleNamespace(rid_to_state={OURS: state}, abort_request=sent.append)
        watch = FrontWatch()
        watch.dispatched(manager, OURS)
        assert sent == [OURS]
        assert not state.abort_sent
        watch.dispatched(manager, OURS)
        assert sent == [OURS]


def test_a_request_and_its_children_get_another_priority(watch: SchedulerWatch) -> None:
    """SGLang sorts its queue by the attribute in each step, so that no place has to change."""
    req, child, other = Req(OURS), Req(f"{OURS}.{'f' * 32}"), Req("other")
    for each in (req, child, other):
        watch.entered(each)
    sender_of(watch).wanted.append(wire.Command(1, "prioritise", OURS, priority=10))
    sender_of(watch).wanted.append(wire.Command(2, "prioritise", OURS[:-1], priority=99))
    watch.turn(watch.scheduler)
    answers = [each.answer for each in sender_of(watch).sent if isinstance(each, wire.CommandAnswer)]
    assert answers == ["applied", "unknown"]
    assert [getattr(each, "priority", None) for each in (req, child, other)] == [10, 10, None]
