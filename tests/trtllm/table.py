"""From a client's close to the moment the engine has let go, in each state, with and without StopGuard and the patch.

    python -m tests.trtllm.table [REPEATS]

prints the table of docs/engines/trtllm.md. It is measured against the stand-in: what it shows is the server's watching
and the way of the abort, not the speed of any GPU.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trtllm.rig import Front, StandIn, Visitor, gateway, standin

__all__ = ["COLUMNS", "STATES", "measure", "print_table"]

#: name -> (with the patch, through the gateway)
COLUMNS = {
    "stock": (False, False),
    "stock, StopGuard": (False, True),
    "patched": (True, False),
    "patched, StopGuard": (True, True),
}
_LONG = "word " * 20_000
STATES: dict[str, dict[str, Any]] = {
    "queued, streaming": {"stream": True, "queued": True},
    "queued, not streaming": {"queued": True},
    "prefill": {"stream": True, "messages": [{"role": "user", "content": _LONG}]},
    "decode, streaming": {"stream": True, "until": b"data: "},
    "not streaming": {},
    "list of four prompts": {"path": "/v1/completions", "prompt": ["one", "two", "three", "four"]},
}


async def measure(engine: StandIn, port: int, state: dict[str, Any]) -> float:
    """Stage one request in `state`, leave, and return the seconds until the engine has let go of all of it."""
    fields = dict(state)
    queued, until = fields.pop("queued", False), fields.pop("until", b"")
    blocker = None
    if queued:
        blocker = await Visitor.connect(engine.port)
        await blocker.ask(
            "/v1/completions", prompt=["a", "b", "c", "d"], max_tokens=1_000_000, stream=True
        )  # as many as run at a time
        await engine.until(lambda truth: truth["active"] == 4)
    known = len((await engine.truth())["left"])
    visitor = await Visitor.connect(port)
    await visitor.ask(**fields)
    wanted = 4 if "prompt" in fields else 1
    here: Callable[[dict[str, Any]], bool] = lambda truth: truth["waiting" if queued else "active"] == wanted  # noqa: E731
    await engine.until(here)
    if until:
        await visitor.until(until)
    left_at = await visitor.leave()
    truth = await engine.until(lambda truth: len(truth["left"]) >= known + wanted)
    seconds = max(at for _, _, at in truth["left"][known:]) - left_at
    if blocker is not None:
        await blocker.leave()
        await engine.until(lambda truth: truth["active"] == 0)
    return float(seconds)


async def column(log: Path, *, patch: bool, through: bool, repeats: int) -> tuple[dict[str, list[float]], list[Any]]:
    """Every state `repeats` times; the books that were settled, where there is a gateway."""
    times: dict[str, list[float]] = {}
    books: list[Any] = []
    async with standin(log, patch=patch, return_perf_metrics=True) as engine:
        if not through:
            for name, state in STATES.items():
                times[name] = [await measure(engine, engine.port, state) for _ in range(repeats)]
            return times, books
        await warmed(engine)
        async with gateway(engine) as front:
            await front.learn()
            for name, state in STATES.items():
                times[name] = [await measure(engine, front.port, state) for _ in range(repeats)]
            books = [await front.next_settled() for _ in range(len(STATES) * repeats)]
            assert not front.leaks
            check_connections(front, patch=patch)
    return times, books


async def warmed(engine: StandIn) -> None:
    """An engine that has never run has recorded nothing, and shows no gauges."""
    visitor = await Visitor.connect(engine.port)
    await visitor.ask(max_tokens=2)
    await visitor.answer()
    await visitor.leave()


def check_connections(front: Front, *, patch: bool) -> None:
    assert front.adapter.patched == patch
    assert front.pool.reuse == patch


def print_table(figures: dict[str, dict[str, list[float]]]) -> None:
    """Medians and the longest, in milliseconds."""
    print("| left while | " + " | ".join(figures) + " |")
    print("|---|" + "---|" * len(figures))
    for name in STATES:
        cells = []
        for times in figures.values():
            p50, longest = statistics.median(times[name]), max(times[name])
            cells.append(f"{p50 * 1000:.0f} ms (≤ {longest * 1000:.0f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


async def main(repeats: int) -> None:
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (patch, through)) in enumerate(COLUMNS.items()):
            log = Path(folder, f"{number}.log")
            figures[name], books = await column(log, patch=patch, through=through, repeats=repeats)
            if books:
                stops = [tracked.ledgers.stop for tracked in books]
                outcomes = {(stop.outcome, stop.evidence.name) for stop in stops}
                print(f"{name}: {len(stops)} stops settled: {outcomes}", file=sys.stderr)
    print_table(figures)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
