"""The engine from outside: doors, detection, what acts when, preempt and resume, pauses, limits."""

from __future__ import annotations

import msgspec
import pytest

from stopguard.errors import ConfigurationError, LimitReached
from stopguard.probe import wire
from stopguard.refengine import (
    POLICIES,
    DuplicateRequest,
    EngineConfig,
    EngineCrashed,
    NotSupported,
    ReferenceEngine,
    RequestRejected,
    RequestSpec,
    SamplingParameters,
)
from stopguard.refengine.driver import VirtualDriver
from stopguard.refengine.interface import TimeWentBackwards
from tests.unit.refengine.storms import undisturbed

HOLDING = [name for name, policy in POLICIES.items() if policy.holds]


def spec(name: str = "r", prompt: int = 20, max_tokens: int = 30, n: int = 1, **more: object) -> RequestSpec:
    tokens = tuple(300 + (position * 7 + sum(map(ord, name))) % 90 for position in range(prompt))
    sampling = SamplingParameters(max_tokens=max_tokens, n=n, ignore_eos=True)
    return msgspec.structs.replace(RequestSpec(name, tokens, sampling), **more)


def start(policy: str, *specs: RequestSpec, **config: object) -> VirtualDriver:
    engine = ReferenceEngine(msgspec.structs.replace(EngineConfig(), **config), policy)
    driver = VirtualDriver(engine, steps_max=20_000, after_step=lambda _: engine.verify())
    for one in specs:
        engine.submit(one, 0.0)
    return driver


def until_tokens(driver: VirtualDriver, name: str, count: int) -> None:
    assert driver.run_while(lambda: len(driver.sequence(name).tokens) < count)


def kinds(driver: VirtualDriver, name: str) -> list[str]:
    return [type(event).__name__ for event in driver.events(name)]


# Normal life ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_runs_to_its_end(policy: str) -> None:
    one = spec(max_tokens=17)
    driver = start(policy, one)
    driver.run()
    sequence = driver.sequence("r")
    assert sequence.finish_reason == "length"
    assert sequence.tokens == undisturbed(one, block_tokens=16)
    assert sequence.usage is not None
    assert msgspec.structs.astuple(sequence.usage) == (20, 17, 0)
    assert driver.engine.snapshot(driver.now).settled
    names = kinds(driver, "r")
    assert names[:2] == ["Added", "Moved"]
    assert names.count("Finished") == 1
    assert set(names[-4:]) >= {"Finished", "Moved", "BlocksReturned"}
    assert names.count("TokensEmitted") == 17


@pytest.mark.parametrize("policy", POLICIES)
def test_children_are_named_sampled_and_counted_apart(policy: str) -> None:
    one = spec(n=3, max_tokens=8)
    driver = start(policy)
    names = driver.engine.submit(one, 0.0)
    assert len(set(names)) == 3
    driver.run()
    added = {event.request_id: event.parent_id for event in driver.events() if isinstance(event, wire.Added)}
    assert added == dict.fromkeys(names, "r")
    outputs = [driver.sequence("r", index).tokens for index in range(3)]
    assert outputs == [undisturbed(one, index, 16) for index in range(3)]
    assert outputs[0] != outputs[1] != outputs[2]


def test_a_prefix_is_computed_once() -> None:
    driver = start("vllm", spec("a", prompt=64))
    driver.run()
    driver.engine.submit(msgspec.structs.replace(spec("a", prompt=64), request_id="b"), driver.now)
    driver.run()
    usage = driver.sequence("b").usage
    assert usage is not None
    assert usage.cached_tokens == 48  # 64 is four blocks, but one token has to be computed
    assert driver.sequence("b").tokens == driver.sequence("a").tokens


def test_a_speculative_request_takes_two_tokens_a_step_and_says_the_same() -> None:
    plain, drafted = start("vllm", spec()), start("vllm", spec(speculative=True))
    plain.run()
    drafted.run()
    assert plain.sequence("r").tokens == drafted.sequence("r").tokens
    assert drafted.engine.gauges().steps_total < plain.engine.gauges().steps_total * 0.7


def test_priority_sorts_the_queue() -> None:
    driver = start("vllm", spec("a"), spec("b"), spec("c", priority=3), max_running=1)
    driver.run()
    moved = [
        event.request_id for event in driver.events() if isinstance(event, wire.Moved) and event.place == "running"
    ]
    assert moved == ["c", "a", "b"]


def test_a_much_more_urgent_request_preempts_at_admission_where_the_engine_does_that() -> None:
    for policy, preempted in (("sglang", 1), ("vllm", 0)):
        driver = start(policy, spec("low", prompt=100, max_tokens=60), blocks=12)
        until_tokens(driver, "low", 20)
        driver.engine.submit(spec("high", prompt=100, max_tokens=20, priority=20), driver.now)
        driver.run()
        assert driver.engine.gauges().preemptions_total == preempted
        assert driver.sequence("low").tokens == undisturbed(spec("low", prompt=100, max_tokens=60), block_tokens=16)


def test_the_driver_is_told_when_to_come_back() -> None:
    driver = start("vllm", spec())
    engine = driver.engine
    assert engine.next_event_at(0.0) == 0.0
    driver.step()
    ends_at = engine.next_event_at(0.0)
    assert ends_at is not None
    assert ends_at > 0.0
    frame = engine.step(ends_at / 2).frame  # too early: nothing happens
    assert frame.events == []
    assert engine.next_event_at(ends_at / 2) == ends_at
    driver.run()
    assert engine.next_event_at(driver.now) is None


def test_time_never_goes_back() -> None:
    driver = start("vllm")
    driver.engine.step(5.0)
    with pytest.raises(TimeWentBackwards):
        driver.engine.step(4.0)
    with pytest.raises(TimeWentBackwards):
        driver.engine.submit(spec(), 1.0)
    assert driver.engine.snapshot(5.0).settled


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (spec(""), "needs an id"),
        (spec(prompt=0), "empty"),
        (spec(max_tokens=0), "at least 1"),
        (spec(n=0), "at least 1"),
        (spec(prompt=5000), "this engine holds"),
        (spec(images=99), "encoder slots"),
        (RequestSpec("r", (10**6,)), "token ids are"),
    ],
)
def test_what_can_never_run_is_refused_and_nothing_is_kept(wrong: RequestSpec, says: str) -> None:
    driver = start("vllm")
    with pytest.raises(RequestRejected, match=says):
        driver.engine.submit(wrong, 0.0)
    assert driver.engine.snapshot(0.0).settled


def test_one_live_id_one_request_and_not_more_than_fit() -> None:
    driver = start("vllm", spec("a"), max_running=1, max_waiting=1)
    with pytest.raises(DuplicateRequest):
        driver.engine.submit(spec("a"), 0.0)
    driver.engine.submit(spec("b"), 0.0)
    with pytest.raises(LimitReached):
        driver.engine.submit(spec("c"), 0.0)
    driver.run()
    driver.engine.submit(spec("a"), driver.now)  # free again
    driver.run()
    assert driver.engine.snapshot(driver.now).settled


def test_commands_do_not_pile_up_without_a_limit() -> None:
    engine = start("vllm").engine
    engine.submit(spec(), 0.0)
    engine.client_gone("r", 0.0)
    for _ in range(65_535):
        engine.abort("nobody", 0.0)
    with pytest.raises(LimitReached, match="commands"):
        engine.abort("nobody", 0.0)
    with pytest.raises(LimitReached, match="commands"):
        engine.submit(spec("late"), 0.0)
    engine.step(0.0)  # what the engine notices itself still gets in
    assert engine.snapshot(0.0).settled


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match="vllm"):
        ReferenceEngine(EngineConfig(), "nothing")
    with pytest.raises(ConfigurationError, match="fence-skipped"):
        ReferenceEngine(EngineConfig(), "vllm", ["nothing"])
    with pytest.raises(ConfigurationError, match="probability"):
        ReferenceEngine(EngineConfig(), "vllm", ["fence-skipped:2"])


# Doors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "known", "unknown", "ends"),
    [
        ("vllm", ("accepted", 200, 1), ("accepted", 200, 1), "abort"),
        ("sglang", ("accepted", 200, 0), ("accepted", 200, 0), "abort"),
        ("llamacpp", ("accepted", 204, 0), ("accepted", 204, 0), "abort"),
        ("trtllm", ("no_door", 404, 0), ("no_door", 404, 0), "length"),
        ("deepinfer", ("aborted", 200, 1), ("unknown", 200, 0), "abort"),
    ],
)
def test_what_the_api_door_says_and_does(
    policy: str, known: tuple[str, int, int], unknown: tuple[str, int, int], ends: str
) -> None:
    driver = start(policy, spec())
    until_tokens(driver, "r", 3)
    answer = driver.engine.abort("nobody", driver.now)
    assert (answer.kind, answer.status, answer.count) == unknown
    answer = driver.engine.abort("r", driver.now)
    assert (answer.kind, answer.status, answer.count) == known
    driver.run()
    assert driver.sequence("r").finish_reason == ends


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("door", ["api", "socket", "inside"])
def test_abort_is_idempotent_before_during_and_after(policy: str, door: str) -> None:
    driver = start(policy, spec("r"), spec("other"))
    engine = driver.engine
    engine.abort("r", 0.0, door)  # type: ignore[arg-type]
    until_tokens(driver, "other", 3)
    for _ in range(2):
        engine.abort("r", driver.now, door)  # type: ignore[arg-type]
    driver.run()
    engine.abort("r", driver.now, door)  # type: ignore[arg-type]
    driver.run()
    assert [name for name in kinds(driver, "r") if name in {"Finished", "AbortApplied"}].count("Finished") == 1
    assert kinds(driver, "r").count("AbortApplied") <= 1
    assert driver.sequence("other").finish_reason == "length"
    assert engine.snapshot(driver.now).settled


def test_an_empty_id_is_refused_because_it_would_match_everything() -> None:
    driver = start("sglang", spec())
    with pytest.raises(RequestRejected):
        driver.engine.abort("", 0.0)


def test_ids_match_by_prefix_only_where_the_engine_does_that() -> None:
    for policy, victim in (("sglang", "abort"), ("vllm", "length")):
        driver = start(policy, spec("job1"), spec("job10"))
        until_tokens(driver, "job10", 3)
        driver.engine.abort("job1", driver.now)
        driver.run()
        assert driver.sequence("job1").finish_reason == "abort"
        assert driver.sequence("job10").finish_reason == victim


def test_sglang_s_route_does_not_find_renamed_children_but_the_socket_does() -> None:
    driver = start("sglang", spec(n=2, max_tokens=600))
    until_tokens(driver, "r", 3)
    driver.engine.abort("r", driver.now)
    until_tokens(driver, "r", 10)
    driver.engine.client_gone("r", driver.now)
    driver.run()
    assert [driver.sequence("r", index).finish_reason for index in (0, 1)] == ["abort", "abort"]


def test_llamacpp_s_route_leaves_the_queued_and_the_not_streaming_alone() -> None:
    driver = start("llamacpp", spec("a", stream=False), spec("queued"), max_running=1)
    driver.run_until(0.05)
    for name in ("a", "queued"):
        assert driver.engine.abort(name, driver.now).status == 204
    driver.run()
    assert driver.sequence("a").finish_reason == driver.sequence("queued").finish_reason == "length"


def test_deepinfer_refuses_while_a_prefill_is_in_flight_and_takes_the_second_try() -> None:
    driver = start("deepinfer", spec(prompt=600), prefill_chunk_tokens=64)
    driver.step()
    first = driver.engine.abort("r", driver.now)
    assert first.kind == "try_again"
    assert first.retry_after_seconds > 0.0
    answers = [first]
    while answers[-1].kind == "try_again":
        driver.now += answers[-1].retry_after_seconds
        driver.engine.step(driver.now)
        answers.append(driver.engine.abort("r", driver.now))
    answer = answers[-1]
    assert (answer.kind, answer.count) == ("aborted", 1)
    driver.run()
    assert driver.engine.snapshot(driver.now).settled


def test_abort_all_reaches_everybody() -> None:
    driver = start("vllm", spec("a"), spec("b", n=2))
    until_tokens(driver, "a", 2)
    assert driver.engine.abort_all(driver.now).count == 2
    driver.run()
    assert {sequence.finish_reason for sequence in driver.sequences.values()} == {"abort"}


# Rule 1 and rule 4 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_that_leaves_after_the_end_is_no_stop(policy: str) -> None:
    driver = start(policy, spec(max_tokens=3))
    driver.run()
    driver.engine.client_gone("r", driver.now)
    assert driver.engine.next_event_at(driver.now) is None
    assert driver.engine.gauges().aborts_total == 0


@pytest.mark.parametrize("policy", HOLDING)
def test_a_stop_reaches_a_request_that_is_held(policy: str) -> None:
    driver = start(policy, spec())
    until_tokens(driver, "r", 5)
    driver.engine.preempt("r", driver.now)
    driver.run()
    assert driver.engine.gauges().paused == 1
    driver.engine.client_gone("r", driver.now)
    driver.run()
    assert driver.sequence("r").finish_reason == "abort"
    assert driver.engine.snapshot(driver.now).settled


def test_a_detached_request_survives_its_client() -> None:
    driver = start("llamacpp", spec(detached=True))
    until_tokens(driver, "r", 2)
    driver.engine.client_gone("r", driver.now)
    driver.run()
    assert driver.sequence("r").finish_reason == "length"


# Preempt and resume ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", HOLDING)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host_blocks", [0, 32])
@pytest.mark.parametrize("cut", range(1, 20, 3))
def test_a_resumed_output_is_the_undisturbed_one(policy: str, depth: int, host_blocks: int, cut: int) -> None:
    one = spec(max_tokens=24, prompt=37)
    driver = start(policy, one, spec("neighbour", max_tokens=80), pipeline_depth=depth, host_blocks=host_blocks)
    until_tokens(driver, "r", cut)
    driver.engine.preempt("r", driver.now)
    driver.run_until(driver.now + 0.2)
    view = next(view for view in driver.engine.snapshot(driver.now).requests if view.request_id == "r")
    assert (view.place, view.blocks_held, view.blocks_fenced) == ("paused", 0, 0)
    driver.engine.resume("r", driver.now)
    driver.run()
    assert driver.sequence("r").tokens == undisturbed(one, block_tokens=16)
    assert driver.sequence("r").finish_reason == "length"
    assert {"Preempted", "Resumed"} <= set(kinds(driver, "r"))
    assert driver.engine.snapshot(driver.now).settled


def test_a_host_backup_spares_the_recomputing() -> None:
    driver = start("sglang", spec(prompt=60), host_blocks=32)
    until_tokens(driver, "r", 5)
    driver.engine.preempt("r", driver.now)
    driver.run()
    assert driver.engine.gauges().host_blocks_held > 0
    assert [event.recompute_tokens for event in driver.events("r") if isinstance(event, wire.Preempted)] == [0]
    driver.engine.resume("r", driver.now)
    driver.run()
    assert driver.engine.gauges().host_blocks_held == 0


def test_engines_that_cannot_hold_say_so() -> None:
    driver = start("trtllm", spec())
    with pytest.raises(NotSupported, match="resume from token ids"):
        driver.engine.preempt("r", 0.0)


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.preempts])
def test_a_full_pool_preempts_and_loses_nothing(policy: str) -> None:
    specs = [spec(f"r{number}", prompt=30, max_tokens=60) for number in range(4)]
    driver = start(policy, *specs, blocks=14)
    driver.run()
    assert driver.engine.gauges().preemptions_total > 0
    for one in specs:
        assert driver.sequence(one.request_id).tokens == undisturbed(one, block_tokens=16)


# Transfers and pauses -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm", "sglang", "trtllm", "deepinfer"])
def test_transferred_kv_gives_the_same_output(policy: str) -> None:
    one = spec(prompt=50, transfer_steps=3)
    driver = start(policy, one)
    driver.run()
    assert driver.sequence("r").tokens == undisturbed(one, block_tokens=16)
    places = [event.place for event in driver.events("r") if isinstance(event, wire.Moved)]
    assert places == ["waiting", "transferring", "running", "gone"]


def test_an_abort_during_a_transfer_keeps_the_blocks_behind_a_fence() -> None:
    driver = start("vllm", spec(prompt=50, transfer_steps=4))
    driver.step()
    driver.engine.abort("r", driver.now)
    driver.advance()
    [fenced] = [event for event in driver.events("r") if isinstance(event, wire.BlocksFenced)]
    assert fenced.blocks == 4
    assert driver.engine.gauges().blocks_fenced == 4
    driver.run()
    assert driver.engine.stale_writes == 0
    assert driver.engine.snapshot(driver.now).settled


def test_trtllm_refuses_during_a_transfer_and_tries_again_itself() -> None:
    driver = start("trtllm", spec(prompt=50, transfer_steps=4))
    driver.step()
    driver.engine.abort("r", driver.now, "inside")
    driver.run()
    names = kinds(driver, "r")
    assert names.count("AbortRefused") >= 2
    assert driver.sequence("r").finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("policy", "mode"), [(name, mode) for name, policy in POLICIES.items() for mode in policy.pause_modes]
)
def test_a_pause_stops_the_scheduler_until_it_is_lifted(policy: str, mode: str) -> None:
    one = spec(max_tokens=40)
    driver = start(policy, one, max_running=1)
    until_tokens(driver, "r", 5)
    driver.engine.pause(mode, driver.now)  # type: ignore[arg-type]
    driver.run_until(driver.now + 5.0)
    delivered = len(driver.sequence("r").tokens)
    driver.engine.submit(spec("late"), driver.now)
    driver.run_until(driver.now + 5.0)
    assert not driver.sequence("late").tokens
    if mode == "wait":
        assert driver.sequence("r").finish_reason == "length"
    elif mode == "abort":
        assert driver.sequence("r").finish_reason == "abort"
    else:
        assert len(driver.sequence("r").tokens) == delivered < 40
        assert (driver.engine.gauges().blocks_held == 0) == (mode == "retract")
    driver.engine.resume_all(driver.now)
    driver.run()
    assert driver.sequence("late").finish_reason == "length"
    if mode in {"hold", "retract"}:
        assert driver.sequence("r").tokens == undisturbed(one, block_tokens=16)


def test_sglang_holds_the_kv_of_a_request_that_is_cancelled_during_a_pause_in_place() -> None:
    driver = start("sglang", spec())
    until_tokens(driver, "r", 5)
    driver.engine.pause("hold", driver.now)
    driver.run_until(driver.now + 1.0)
    driver.engine.abort("r", driver.now)
    driver.run_until(driver.now + 5.0)
    assert driver.engine.gauges().blocks_held > 0
    driver.engine.resume_all(driver.now)
    driver.run()
    assert driver.sequence("r").finish_reason == "abort"
    assert driver.engine.snapshot(driver.now).settled


def test_unknown_pause_modes_name_the_known_ones() -> None:
    driver = start("vllm")
    with pytest.raises(NotSupported, match="abort, wait, hold"):
        driver.engine.pause("retract", 0.0)


# Detection ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "stream", "left", "noticed"),
    [
        ("vllm", True, 0.5, 0.5),
        ("vllm", False, 0.5, 0.5),
        ("sglang", True, 0.5, 2.5),
        ("sglang", False, 0.5, 4.0),
        ("sglang", False, 4.5, 8.0),
        ("llamacpp", True, 0.5, 0.5),
        ("llamacpp", False, 0.5, 1.0),
        ("trtllm", True, 0.5, 1.0),
        ("trtllm", False, 1.5, 2.0),
        ("deepinfer", True, 0.5, 0.5),
    ],
)
def test_a_closed_connection_is_noticed_when_that_engine_notices(
    policy: str, stream: bool, left: float, noticed: float
) -> None:
    driver = start(policy, spec(max_tokens=3000, stream=stream), max_model_tokens=4000)
    driver.run_until(left)
    driver.engine.client_gone("r", left)
    driver.run()
    ended = driver.sequence("r").ended_at
    assert ended is not None
    assert noticed <= ended < noticed + 0.06
    assert driver.sequence("r").finish_reason in {"abort", "cancelled"}


def test_somebody_who_watches_the_status_page_starves_llamacpp_s_wait() -> None:
    driver = start("llamacpp", spec(max_tokens=1000, stream=False))
    driver.run_until(0.5)
    driver.engine.client_gone("r", 0.5)
    for tick in range(1, 9):
        driver.run_until(0.3 + tick * 0.5)
        driver.engine.observe(driver.now)
    assert driver.sequence("r").finish_reason is None
    driver.run_until(driver.now + 1.2)
    assert driver.sequence("r").finish_reason == "abort"


def test_a_stream_s_detection_can_be_set() -> None:
    driver = start("sglang", spec(max_tokens=1000), stream_detection_seconds=0.02)
    driver.run_until(0.5)
    driver.engine.client_gone("r", 0.5)
    driver.run()
    ended = driver.sequence("r").ended_at
    assert ended is not None
    assert ended < 0.56


def test_a_dead_engine_says_so() -> None:
    driver = start("vllm", spec())
    engine = ReferenceEngine(EngineConfig(), "vllm", ["unknown-abort-crashes"])
    engine.abort("nobody", 0.0)
    engine.step(0.0)
    assert engine.crashed
    assert engine.health().status == 503
    assert engine.next_event_at(0.0) is None
    with pytest.raises(EngineCrashed):
        engine.submit(spec(), 0.0)
    assert driver.engine.health().alive
