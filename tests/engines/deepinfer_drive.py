"""Drives DeepInfer's real C++ scheduler step by step and prints, as JSON, what became of each abort.

Run by the interpreter of the engine's own environment: ``PYTHON deepinfer_drive.py EXTENSION ADAPTERS_FOLDER``.
Each case is one engine; an abort falls exactly where the case says, since nothing here runs beside the steps.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

extension, adapters = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(adapters / "stopguard_deepinfer" / "cpu"), str(adapters)]
driving: Any = importlib.import_module("engine")
inprocess: Any = importlib.import_module("stopguard_deepinfer.inprocess")

SIZES = driving.Sizes(blocks=64, block_tokens=16, chunk_tokens=64, step_seconds=0.0)


def engine(**sizes: Any) -> Any:
    given = {**SIZES.__dict__, **sizes}
    return driving.SchedulerEngine(extension, driving.Sizes(**given))


def add(subject: Any, name: str, prompt_tokens: int, max_tokens: int = 200) -> Any:
    prompt = [3 + (len(name) * 7 + place) % 900 for place in range(prompt_tokens)]
    return subject.add_request("test", name, {"max_tokens": max_tokens}, prompt)


def steps(subject: Any, count: int) -> list[int]:
    """Blocks used after each of `count` steps."""
    used = []
    for _ in range(count):
        subject.step()
        used.append(subject.gauges()["blocks_used"])
    return used


def decoding() -> dict[str, Any]:
    subject = engine()
    add(subject, "a", 40)
    steps(subject, 2)
    return {"answer": subject.abort_request(["a"])[0], "blocks_used": steps(subject, 3)}


def waiting() -> dict[str, Any]:
    subject = engine()
    add(subject, "a", 40).schedulable = False
    return {"answer": subject.abort_request(["a"])[0], "blocks_used": steps(subject, 2)}


def between_chunks() -> dict[str, Any]:
    subject = engine()
    add(subject, "a", 200)
    steps(subject, 1)
    answer = subject.abort_request(["a"])[0]
    used = steps(subject, 6)
    return {"answer": answer, "blocks_used": used, "unfinished": subject.has_unfinished_requests()}


def in_flight() -> dict[str, Any]:
    subject = engine()
    add(subject, "a", 40, max_tokens=20)
    answers = []
    subject.forward = lambda: answers.append(subject.abort_request(["a"])[0])
    subject.step()
    subject.forward = lambda: None
    tokens = 0
    while subject.has_unfinished_requests():
        tokens += sum(output.token_id >= 0 for output in subject.step())
    return {"answer": answers[0], "tokens_after": tokens}


def preempted() -> dict[str, Any]:
    subject = engine(blocks=16)
    for name in ("a", "b", "c"):
        add(subject, name, 60)
    count = 0
    while not subject.gauges()["preemptions_total"] and count < 200:
        subject.step()
        count += 1
    return {"answer": subject.abort_request(["a", "b", "c"])[0], "blocks_used": steps(subject, 4)}


def choices() -> dict[str, Any]:
    subject = engine()
    for _ in range(3):
        add(subject, "a", 40)
    add(subject, "b", 40)
    steps(subject, 6)
    answer = subject.abort_request(["a"])[0]
    steps(subject, 3)
    return {"answer": answer, "running": subject.gauges()["running"]}


def guarded(prompt_tokens: int, *, in_flight: bool) -> dict[str, Any]:
    """The same two faults with `InProcessStops` between."""
    subject = engine()
    stops = inprocess.InProcessStops(subject)
    stops.add("a", add(subject, "a", prompt_tokens))
    said: list[str] = []
    if in_flight:
        subject.forward = lambda: said.append(stops.abort("a").value) if not said else None
    subject.step()
    stops.after_step()
    if not in_flight:
        said.append(stops.abort("a").value)
    count, tokens = 0, 0
    proofs: list[Any] = []
    while not proofs and count < 20:
        tokens += sum(output.token_id >= 0 for output in subject.step())
        proofs = stops.after_step()
        count += 1
    (proof,) = proofs
    return {
        "said": said[0],
        "steps": count,
        "attempts": proof.attempts,
        "repaired": proof.blocks_repaired,
        "blocks_used": subject.gauges()["blocks_used"],
        "tokens_after": tokens,
        "pending": stops.pending,
    }


def overtaken() -> dict[str, Any]:
    """The abort comes before its request."""
    subject = engine()
    stops = inprocess.InProcessStops(subject)
    said = stops.abort("a").value
    stops.add("a", add(subject, "a", 40))
    stops.add("b", add(subject, "b", 40, max_tokens=4))
    tokens = {"a": 0, "b": 0}
    while subject.has_unfinished_requests():
        for output in subject.step():
            tokens[output.request_id] += output.token_id >= 0
        stops.after_step()
    stops.after_step()
    return {"said": said, "tokens": tokens, "pending": stops.pending, "blocks_used": subject.gauges()["blocks_used"]}


def after_end() -> dict[str, Any]:
    subject = engine()
    stops = inprocess.InProcessStops(subject)
    stops.add("a", add(subject, "a", 20, max_tokens=3))
    while subject.has_unfinished_requests():
        subject.step()
        stops.after_step()
    return {"said": stops.abort("a").value, "pending": stops.pending, "blocks_used": subject.gauges()["blocks_used"]}


print(
    json.dumps(
        {
            "decoding": decoding(),
            "waiting": waiting(),
            "between_chunks": between_chunks(),
            "in_flight": in_flight(),
            "preempted": preempted(),
            "choices": choices(),
            "guarded_between_chunks": guarded(200, in_flight=False),
            "guarded_in_flight": guarded(40, in_flight=True),
            "overtaken": overtaken(),
            "after_end": after_end(),
        }
    )
)
