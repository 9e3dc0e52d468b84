"""Every fault does its damage, and the healthy twin of the same run shows none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from stopguard.errors import ConfigurationError
from stopguard.probe import wire
from stopguard.refengine import FAULTS, EngineConfig, PoolCorrupted, ReferenceEngine, RequestSpec, SamplingParameters
from stopguard.refengine.driver import VirtualDriver
from stopguard.refengine.faults import fault_named
from tests.unit.refengine.storms import undisturbed

Run = Callable[..., VirtualDriver]
#: Stages a run on an engine that `start` makes and returns what is wrong, "" if nothing.
Damage = Callable[[Run], str]


def spec(name: str, prompt: int = 20, max_tokens: int = 30, n: int = 1, **more: object) -> RequestSpec:
    tokens = tuple(300 + (position * 7 + sum(map(ord, name))) % 90 for position in range(prompt))
    sampling = SamplingParameters(max_tokens=max_tokens, n=n, ignore_eos=True)
    return msgspec.structs.replace(RequestSpec(name, tokens, sampling), **more)


def starter(fault: str | None) -> Run:
    def start(*specs: RequestSpec, policy: str = "vllm", **config: object) -> VirtualDriver:
        engine = ReferenceEngine(
            msgspec.structs.replace(EngineConfig(), **config), policy, [fault] if fault else (), seed=1
        )
        driver = VirtualDriver(engine, steps_max=50_000)
        for one in specs:
            engine.submit(one, 0.0)
        return driver

    return start


def until_tokens(driver: VirtualDriver, name: str, count: int = 4) -> None:
    assert driver.run_while(lambda: len(driver.sequence(name).tokens) < count)


def into_a_step(driver: VirtualDriver) -> None:
    ends_at = driver.engine.next_event_at(driver.now)
    assert ends_at is not None
    driver.now += (ends_at - driver.now) / 2


def abort_in_decode(start: Run, **more: object) -> VirtualDriver:
    driver = start(msgspec.structs.replace(spec("victim"), **more), spec("other"))
    until_tokens(driver, "victim")
    driver.engine.abort("victim", driver.now)
    driver.run_until(driver.now + 2.0)
    return driver


def abort_in_prefill(start: Run, policy: str = "vllm") -> VirtualDriver:
    driver = start(spec("victim", prompt=900), spec("other"), policy=policy, prefill_chunk_tokens=64)
    driver.step()
    driver.advance()
    driver.engine.abort("victim", driver.now)
    driver.run_until(driver.now + 2.0)
    return driver


def held_blocks(driver: VirtualDriver) -> str:
    held = driver.engine.gauges().blocks_held
    return f"{held} blocks held at idle" if held else ""


def wrong_output(driver: VirtualDriver, *names: str) -> str:
    for name in names:
        sequence = driver.sequence(name)
        expected = undisturbed(SPECS[name], block_tokens=16)
        if sequence.tokens != expected[: len(sequence.tokens)]:
            return f"{name} reads foreign KV"
    return ""


def blocks_leaked_on_abort(start: Run) -> str:
    return held_blocks(abort_in_decode(start))


def blocks_leaked_between_chunks(start: Run) -> str:
    assert held_blocks(abort_in_decode(start)) == ""  # only between chunks
    return held_blocks(abort_in_prefill(start))


SPECS = {name: spec(name, prompt=40, max_tokens=40) for name in ("victim", "next-1", "next-2", "next-3")}


def block_freed_twice(start: Run) -> str:
    driver = start(SPECS["victim"])
    until_tokens(driver, "victim")
    driver.engine.abort("victim", driver.now)
    driver.run()
    for name in ("next-1", "next-2", "next-3"):
        driver.engine.submit(SPECS[name], driver.now)
    driver.run()
    returned = sum(event.blocks for event in driver.events("victim") if isinstance(event, wire.BlocksReturned))
    held = sum(event.blocks for event in driver.events("victim") if isinstance(event, wire.BlocksHeld))
    damage = wrong_output(driver, "next-1", "next-2", "next-3")
    assert bool(damage) == (returned > held)
    try:
        driver.engine.verify()
    except PoolCorrupted as error:
        return f"{error}, {damage}" if damage else ""
    return damage


def fence_skipped(start: Run) -> str:
    driver = start(SPECS["victim"])
    until_tokens(driver, "victim")
    into_a_step(driver)
    driver.engine.abort("victim", driver.now)
    driver.engine.submit(SPECS["next-1"], driver.now)
    driver.run()
    damage = wrong_output(driver, "next-1")
    assert bool(damage) == (driver.engine.stale_writes > 0)
    return damage


def release_only_at_timeout(start: Run) -> str:
    driver = abort_in_decode(start)
    damage = held_blocks(driver)
    driver.run_until(driver.now + 481.0)
    assert held_blocks(driver) == ""
    return damage


def cleanup_needs_admission(start: Run) -> str:
    driver = start(spec("victim", prompt=100, max_tokens=50), blocks=12)
    until_tokens(driver, "victim")
    driver.engine.abort("victim", driver.now)
    driver.engine.submit(spec("next", prompt=120), driver.now)
    driver.run()
    return "" if driver.sequence("next").tokens else "the next request waits for the blocks of the dead one for ever"


def host_backup_leaked(start: Run) -> str:
    driver = start(spec("victim"), policy="sglang", host_blocks=32)
    until_tokens(driver, "victim")
    driver.engine.preempt("victim", driver.now)
    driver.run()
    assert driver.engine.gauges().host_blocks_held
    driver.engine.abort("victim", driver.now)
    driver.run()
    held = driver.engine.gauges().host_blocks_held
    return f"{held} host blocks held" if held else ""


def slot_leaked(kind: wire.SlotKind, **more: object) -> Damage:
    def stage(start: Run) -> str:
        driver = abort_in_decode(start, **more)
        held = driver.engine.gauges().slots_held
        assert not any(count for other, count in held.items() if other != kind)
        return f"{held[kind]} {kind} slots held" if held[kind] else ""

    return stage


def generated_on(driver: VirtualDriver, name: str = "victim") -> str:
    reason = driver.sequence(name).finish_reason
    assert reason in {"abort", "length"}
    return f"{name} ran to its end" if reason == "length" else ""


def abort_lost(start: Run) -> str:
    driver = abort_in_decode(start)
    names = [type(event).__name__ for event in driver.events("victim")]
    assert "AbortArrived" in names
    assert ("AbortApplied" in names) == (driver.sequence("victim").finish_reason == "abort")
    return generated_on(driver)


def abort_lost_in_dispatch(start: Run) -> str:
    driver = start(spec("other"), policy="sglang")
    driver.step()
    driver.engine.submit(spec("victim"), driver.now)  # the core is busy: not dispatched yet
    driver.engine.abort("victim", driver.now)
    until_tokens(driver, "other")
    again = driver.engine.abort("victim", driver.now)
    driver.run()
    damage = generated_on(driver)
    assert (again.kind == "suppressed") == bool(damage)
    return damage


def abort_lost_in_prefill(start: Run) -> str:
    driver = start(spec("victim", prompt=900), policy="deepinfer", prefill_chunk_tokens=64)
    driver.step()
    answer = driver.engine.abort("victim", driver.now)
    assert answer.kind in {"try_again", "unknown"}
    if answer.kind == "unknown":
        driver.run()
        return generated_on(driver)
    return generated_on(abort_in_prefill(start))


def unknown_abort_crashes(start: Run) -> str:
    driver = start(spec("victim"))
    until_tokens(driver, "victim")
    driver.engine.abort("nobody", driver.now)
    driver.run()
    return driver.engine.crashed


def ended_abort_crashes(start: Run) -> str:
    driver = start(spec("victim", max_tokens=3), spec("other"))
    driver.engine.abort("nobody", 0.0)
    assert driver.run_while(lambda: driver.sequence("victim").finish_reason is None)
    assert not driver.engine.crashed
    driver.engine.abort("victim", driver.now)
    driver.run()
    return driver.engine.crashed


def child_survives(start: Run) -> str:
    driver = start(spec("victim", n=3))
    until_tokens(driver, "victim")
    driver.engine.abort("victim", driver.now)
    driver.run()
    reasons = [driver.sequence("victim", index).finish_reason for index in range(3)]
    assert reasons[:2] == ["abort", "abort"]
    return "the last child ran to its end" if reasons[2] == "length" else ""


def prefix_victim(start: Run) -> str:
    driver = start(spec("job1"), spec("job10"))
    until_tokens(driver, "job10")
    driver.engine.abort("job1", driver.now)
    driver.run()
    return "job10 was aborted" if driver.sequence("job10").finish_reason == "abort" else ""


def global_stop_flag(start: Run) -> str:
    driver = start(spec("running"), spec("victim"), max_running=1)
    until_tokens(driver, "running")
    driver.engine.abort("victim", driver.now)
    driver.run()
    assert driver.sequence("victim").finish_reason == "abort"
    return "the running request was aborted" if driver.sequence("running").finish_reason == "abort" else ""


def abort_treated_as_finish(start: Run) -> str:
    driver = abort_in_decode(start)
    damage = held_blocks(driver)
    assert driver.sequence("victim").finish_reason == ("stop" if damage else "abort")
    driver.run_until(driver.now + 481.0)
    assert held_blocks(driver) == ""
    return damage


def finish_treated_as_abort(start: Run) -> str:
    driver = start(spec("victim"))
    driver.run()
    return "a normal end is called abort" if driver.sequence("victim").finish_reason == "abort" else ""


def abort_undone_by_preemption(start: Run) -> str:
    driver = start(spec("victim"))
    until_tokens(driver, "victim")
    driver.engine.preempt("victim", driver.now)
    driver.run()
    driver.engine.abort("victim", driver.now)
    driver.run()
    assert any(isinstance(event, wire.AbortApplied) for event in driver.events("victim"))
    return generated_on(driver)


def stale_output_delivered(start: Run) -> str:
    driver = start(spec("victim"))
    until_tokens(driver, "victim")
    into_a_step(driver)
    driver.engine.abort("victim", driver.now)
    driver.run()
    sequence = driver.sequence("victim")
    assert sequence.ended_at is not None
    late = sum(at > sequence.ended_at for at in sequence.delivered_at)
    return f"{late} tokens delivered after the end" if late else ""


def tokens_delivered_twice(start: Run) -> str:
    driver = start(spec("victim"))
    until_tokens(driver, "victim")
    driver.engine.preempt("victim", driver.now)
    driver.run()
    driver.engine.resume("victim", driver.now)
    driver.run()
    said, expected = driver.sequence("victim").tokens, undisturbed(spec("victim"), block_tokens=16)
    return "" if said == expected else f"{len(said) - len(expected)} tokens too many"


def running_gauge_drifts(start: Run) -> str:
    running = abort_in_decode(start).engine.gauges().running
    return f"{running} running at idle" if running else ""


def abort_counter_blind(start: Run) -> str:
    driver = abort_in_decode(start)
    assert driver.sequence("victim").finish_reason == "abort"
    return "" if driver.engine.gauges().aborts_total == 1 else "the abort was not counted"


def watcher_leaks(start: Run) -> str:
    watchers = len(abort_in_decode(start).engine.watchers)
    return f"{watchers} watchers at idle" if watchers else ""


def healthy_while_wedged(start: Run) -> str:
    driver = abort_in_decode(start)
    health = driver.engine.health()
    assert health.status == 200
    driver.engine.submit(spec("fresh"), driver.now)
    driver.run()
    answered = driver.sequence("fresh").finish_reason == "length"
    assert answered == health.alive
    return "" if answered else "a fresh request gets no answer"


def leave(start: Run, *, early: bool, stream: bool) -> VirtualDriver:
    driver = start(spec("victim", stream=stream, prompt=300), max_batch_tokens=128, prefill_chunk_tokens=64)
    if early:
        driver.step()
    else:
        until_tokens(driver, "victim")
    driver.engine.client_gone("victim", driver.now)
    driver.run()
    return driver


def disconnect_masked(start: Run) -> str:
    return generated_on(leave(start, early=False, stream=True))


def disconnect_ignored_before_first_token(start: Run) -> str:
    assert generated_on(leave(start, early=False, stream=True)) == ""  # only before the first token
    return generated_on(leave(start, early=True, stream=True))


def disconnect_ignored_without_stream(start: Run) -> str:
    assert generated_on(leave(start, early=False, stream=True)) == ""  # only without a stream
    return generated_on(leave(start, early=False, stream=False))


STAGES: dict[str, Damage] = {
    "blocks-leaked-on-abort": blocks_leaked_on_abort,
    "blocks-leaked-between-chunks": blocks_leaked_between_chunks,
    "block-freed-twice": block_freed_twice,
    "fence-skipped": fence_skipped,
    "release-only-at-timeout": release_only_at_timeout,
    "cleanup-needs-admission": cleanup_needs_admission,
    "host-backup-leaked": host_backup_leaked,
    "lora-slot-leaked": slot_leaked("lora", lora="french"),
    "encoder-slot-leaked": slot_leaked("encoder", images=2),
    "grammar-slot-leaked": slot_leaked("grammar", grammar="json"),
    "speculative-slot-leaked": slot_leaked("speculative", speculative=True),
    "abort-lost": abort_lost,
    "abort-lost-in-dispatch": abort_lost_in_dispatch,
    "abort-lost-in-prefill": abort_lost_in_prefill,
    "unknown-abort-crashes": unknown_abort_crashes,
    "ended-abort-crashes": ended_abort_crashes,
    "child-survives": child_survives,
    "prefix-victim": prefix_victim,
    "global-stop-flag": global_stop_flag,
    "abort-treated-as-finish": abort_treated_as_finish,
    "finish-treated-as-abort": finish_treated_as_abort,
    "abort-undone-by-preemption": abort_undone_by_preemption,
    "stale-output-delivered": stale_output_delivered,
    "tokens-delivered-twice": tokens_delivered_twice,
    "running-gauge-drifts": running_gauge_drifts,
    "abort-counter-blind": abort_counter_blind,
    "watcher-leaks": watcher_leaks,
    "healthy-while-wedged": healthy_while_wedged,
    "disconnect-masked": disconnect_masked,
    "disconnect-ignored-before-first-token": disconnect_ignored_before_first_token,
    "disconnect-ignored-without-stream": disconnect_ignored_without_stream,
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_does_damage_and_its_healthy_twin_does_none(name: str) -> None:
    assert STAGES[name](starter(name)) != ""
    assert STAGES[name](starter(None)) == ""


def test_every_fault_is_staged() -> None:
    assert set(STAGES) == set(FAULTS)
    assert len(FAULTS) >= 22


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_says_what_it_is(name: str) -> None:
    fault = FAULTS[name]
    assert fault.__doc__ is not None
    assert fault.__doc__.startswith(f"Class {fault.failure_class}: ")
    assert 1 <= fault.failure_class <= 18
    assert fault.issues
    assert all(issue in " ".join(fault.__doc__.split()) or issue != fault.issues[0] for issue in fault.issues)
    assert all("/" in issue and issue.rpartition("#")[2].isdigit() for issue in fault.issues)


def test_faults_strike_by_probability_and_limit_and_repeatably() -> None:
    def strikes(seed: int) -> list[bool]:
        fault = fault_named("abort-lost:0.5")
        fault.seed(seed)
        return [fault.fires() for _ in range(100)]

    assert strikes(1) == strikes(1) != strikes(2)
    assert 30 < sum(strikes(1)) < 70
    limited = FAULTS["abort-lost"](limit=2)
    assert [limited.fires() for _ in range(4)] == [True, True, False, False]
    with pytest.raises(ConfigurationError):
        FAULTS["abort-lost"](probability=0.0)
