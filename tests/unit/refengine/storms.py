"""Random storms for the engine's tests: operations, and the checks that hold after every step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import strategies as st

from stopguard.errors import ClientError
from stopguard.probe import wire
from stopguard.refengine import EngineConfig, ReferenceEngine, RequestSpec, SamplingParameters, StepResult
from stopguard.refengine.driver import VirtualDriver
from stopguard.refengine.model import EOS, TextAssembler, next_token
from stopguard.refengine.pool import BlockPool

#: A small engine: a full pool, preemption and waiting for slots happen all the time.
SMALL = EngineConfig(
    blocks=24,
    block_tokens=4,
    max_running=6,
    max_waiting=64,
    max_model_tokens=80,
    max_batch_tokens=32,
    prefill_chunk_tokens=8,
    lora_slots=2,
    encoder_slots=3,
    grammar_slots=2,
    speculative_slots=2,
)

Operation = dict[str, Any]

requests: st.SearchStrategy[Operation] = st.builds(
    dict,
    kind=st.just("submit"),
    prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 24),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    eos=st.sampled_from([0.0, 0.0, 0.1]),
    priority=st.sampled_from([0, 0, 1, 20]),
    stream=st.booleans(),
    lora=st.sampled_from(["", "", "a", "b", "c"]),
    images=st.sampled_from([0, 0, 1, 2]),
    grammar=st.sampled_from(["", "", "json"]),
    speculative=st.booleans(),
    transfer=st.sampled_from([0, 0, 0, 3]),
    stop=st.sampled_from([(), (), (" the",)]),
    topic=st.integers(0, 2),
)
stops: st.SearchStrategy[Operation] = st.builds(
    dict,
    kind=st.sampled_from(["api", "inside", "socket", "gone", "gone", "preempt", "resume", "unknown"]),
    which=st.integers(0, 7),
)
pauses: st.SearchStrategy[Operation] = st.builds(
    dict, kind=st.sampled_from(["hold", "retract", "wait", "abort", "resume_all"])
)
waits: st.SearchStrategy[Operation] = st.builds(
    dict, kind=st.just("wait_for"), seconds=st.sampled_from([0.0, 0.003, 0.01, 0.05, 1.1])
)
storms = st.lists(st.one_of(requests, requests, stops, stops, waits, waits, pauses), max_size=40)


class Books:
    """Per request: what is held, fenced and in flight according to the events. Nothing may go below zero."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.fenced: Counter[str] = Counter()
        self.in_flight: Counter[str] = Counter()
        self.slots: Counter[tuple[str, str]] = Counter()
        self.place: dict[str, str] = {}
        self.computed: Counter[str] = Counter()
        self.emitted: Counter[str] = Counter()
        self.last_sequence = 0

    def read(self, frame: wire.Frame) -> None:
        assert frame.sequence == self.last_sequence + 1
        self.last_sequence = frame.sequence
        for event in frame.events:
            name = event.request_id
            match event:
                case wire.Added():
                    assert name not in self.place
                case wire.Moved():
                    assert self.place.get(name) != "gone", f"{name} moved after it had gone"
                    self.place[name] = event.place
                case wire.BlocksHeld():
                    self.held[name] += event.blocks
                case wire.BlocksFenced():
                    self.held[name] -= event.blocks
                    self.fenced[name] += event.blocks
                    assert event.fence > frame.step - 1
                case wire.BlocksReturned():
                    (self.fenced if event.fenced else self.held)[name] -= event.blocks
                case wire.SlotTaken():
                    self.slots[name, event.kind] += event.slots
                case wire.SlotReturned():
                    self.slots[name, event.kind] -= event.slots
                case wire.TokensComputed():
                    self.in_flight[name] += event.tokens
                    self.computed[name] += event.tokens
                case wire.TokensEmitted():
                    self.in_flight[name] -= event.tokens
                    self.emitted[name] += event.tokens
                case wire.TokensDropped():
                    self.in_flight[name] -= event.tokens
            assert self.held[name] >= 0
            assert self.fenced[name] >= 0
            assert self.in_flight[name] >= 0

    def blocks(self) -> int:
        """References that requests hold or that wait behind a fence."""
        return self.held.total() + self.fenced.total()

    def open(self) -> list[str]:
        """Every account that is not closed."""
        counters = {"held": self.held, "fenced": self.fenced, "in flight": self.in_flight}
        found = [
            f"{label} {name}: {left}" for label, counter in counters.items() for name, left in counter.items() if left
        ]
        found += [f"{kind} {name}: {left}" for (name, kind), left in self.slots.items() if left]
        found += [f"{name} is {place}" for name, place in self.place.items() if place != "gone"]
        return found


def spec_of(operation: Operation, number: int, *, transfers: bool) -> RequestSpec:
    prompt = tuple(300 + (operation["topic"] * 50 + position) % 100 for position in range(operation["prompt"]))
    sampling = SamplingParameters(
        max_tokens=operation["max_tokens"],
        n=operation["n"],
        eos_probability=operation["eos"],
        stop=operation["stop"],
    )
    return RequestSpec(
        f"r{number:03d}",
        prompt,
        sampling,
        priority=operation["priority"],
        stream=operation["stream"],
        lora=operation["lora"],
        images=operation["images"],
        grammar=operation["grammar"],
        speculative=operation["speculative"],
        transfer_steps=operation["transfer"] if transfers else 0,
    )


def undisturbed(spec: RequestSpec, index: int = 0, block_tokens: int = 4) -> list[int]:
    """What the sequence must say, computed alone and without the engine: the oracle against cross-talk."""
    sampling = spec.sampling
    tokens = list(spec.prompt)
    length = len(tokens) + sampling.max_tokens
    pool = BlockPool(length // block_tokens + 1, block_tokens)
    table = pool.take(pool.total)
    pool.write_run(table, 0, tokens)
    assembler = TextAssembler(sampling.stop)
    threshold = 0 if sampling.ignore_eos else int(sampling.eos_probability * 65536)
    salt = sampling.seed * 1_000_003 + index
    for _ in range(sampling.max_tokens):
        value = pool.value(table, len(tokens))
        token = next_token(value, len(tokens), tokens[-1], salt, threshold, structured=bool(spec.grammar))
        pool.write_run(table, len(tokens), [token])
        tokens.append(token)
        assembler.add(token)
        if token == EOS or assembler.stopped:
            break
    return tokens[len(spec.prompt) :]


def random_operations(numbers: random.Random, count: int) -> list[Operation]:
    """A long storm: longer than what shrinks well, so that the queue and the pool stay full."""
    operations: list[Operation] = []
    for _ in range(count):
        kind = numbers.random()
        if kind < 0.3:
            operations.append(
                {
                    "kind": "submit",
                    "prompt": numbers.randint(1, 40),
                    "max_tokens": numbers.randint(1, 24),
                    "n": numbers.choice([1, 1, 1, 2, 3]),
                    "eos": numbers.choice([0.0, 0.0, 0.1]),
                    "priority": numbers.choice([0, 0, 1, 20]),
                    "stream": numbers.random() < 0.5,
                    "lora": numbers.choice(["", "", "a", "b", "c"]),
                    "images": numbers.choice([0, 0, 1, 2]),
                    "grammar": numbers.choice(["", "", "json"]),
                    "speculative": numbers.random() < 0.3,
                    "transfer": numbers.choice([0, 0, 0, 3]),
                    "stop": numbers.choice([(), (), (" the",)]),
                    "topic": numbers.randint(0, 2),
                }
            )
        elif kind < 0.6:
            stop = numbers.choice(["api", "inside", "socket", "gone", "gone", "preempt", "resume", "unknown"])
            operations.append({"kind": stop, "which": numbers.randint(0, 12)})
        elif kind < 0.98:
            operations.append({"kind": "wait_for", "seconds": numbers.choice([0.0, 0.003, 0.01, 0.05, 0.05, 1.1])})
        else:
            operations.append({"kind": numbers.choice(["hold", "retract", "wait", "abort"])})
            operations += [{"kind": "wait_for", "seconds": 0.05}, {"kind": "resume_all"}]
    return operations


def run_storm(engine: ReferenceEngine, operations: list[Operation]) -> tuple[VirtualDriver, Books]:
    """All operations, then to the end (pauses lifted, held requests resumed), checked after every step."""
    books = Books()

    def check(result: StepResult) -> None:
        engine.verify()
        books.read(result.frame)
        assert engine.stale_writes == 0

    driver = VirtualDriver(engine, steps_max=20_000, after_step=check)
    submitted: list[str] = []
    specs: dict[str, RequestSpec] = {}
    transfers = engine.policy.in_transfer != "unsupported"
    for operation in operations:
        kind, now = operation["kind"], driver.now
        name = submitted[-1 - operation["which"] % len(submitted)] if submitted and "which" in operation else "nobody"
        try:
            if kind == "submit":
                spec = spec_of(operation, len(submitted), transfers=transfers)
                engine.submit(spec, now)
                submitted.append(spec.request_id)
                specs[spec.request_id] = spec
            elif kind == "wait_for":
                driver.run_until(now + operation["seconds"])
            elif kind in {"api", "inside", "socket"}:
                engine.abort(name, now, kind)
            elif kind == "unknown":
                engine.abort("nobody", now, "inside")
            elif kind == "gone":
                engine.client_gone(name, now)
            elif kind == "preempt":
                engine.preempt(name, now)
            elif kind == "resume":
                engine.resume(name, now)
            elif kind == "resume_all":
                engine.resume_all(now)
            else:
                engine.pause(kind, now)
        except ClientError:
            pass  # this policy has no such command, or no such size: refused, and nothing changed
    driver.run_until(driver.now + 0.2)
    engine.resume_all(driver.now)
    for name in submitted:
        if engine.policy.holds:
            engine.resume(name, driver.now)
    driver.run()
    for sequence in driver.sequences.values():
        spec = specs[sequence.request_id]
        expected = undisturbed(spec, sequence.index, engine.config.block_tokens)
        assert sequence.tokens == expected[: len(sequence.tokens)], f"{sequence.request_id} reads foreign KV"
        if sequence.finish_reason in {"stop", "length"}:
            assert len(sequence.tokens) == len(expected)
            assert sequence.usage is not None
            assert sequence.usage.completion_tokens == len(expected)
    return driver, books
