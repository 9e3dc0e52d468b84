"""Streams cut at random at the reference engine: identical to undisturbed ones, in ids, text and usage."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stopguard.engines.registry import create
from stopguard.gateway.server import loop_factory
from stopguard.refengine import EngineConfig, ReferenceEngine
from stopguard.refengine.http_driver import RealClock
from stopguard.refengine.http_face import Face, FaceOptions
from stopguard.refengine.http_server import serving
from tests.resume.cuts import Cutter, Trial, cutting, narrow_wire

POLICIES = ("vllm", "sglang", "llamacpp", "trtllm", "deepinfer")
SPEED = 20.0


@asynccontextmanager
async def reference(policy: str, *, port: int = 0, seed: int = 0, speed: float = SPEED) -> AsyncIterator[str]:
    config = EngineConfig(blocks=4096, max_running=16)
    face = Face(ReferenceEngine(config, policy, (), seed), RealClock(speed), FaceOptions(), seed=seed)
    async with serving(face, port=port) as url:
        yield url


def run(work: Any) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work)


def trial(number: int, seed: int, cuts: int) -> Trial:
    """A request to the reference engine: it may end by itself, and the client may ask for the ids."""
    made = Trial(number, seed, cuts=cuts)
    made.body |= {"model": "base", "refengine": {"eos_probability": made.rng.choice([0.0, 0.0, 0.01])}}
    if made.rng.random() < 0.6:
        made.body["return_token_ids"] = True
    if made.rng.random() < 0.2:
        made.body["max_completion_tokens"] = made.body.pop("max_tokens")
    if not made.chat and made.rng.random() < 0.3:
        made.body["prompt"] = [1, *(made.rng.randrange(2, 400) for _ in range(12))]
    return made


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", POLICIES)
def test_random_cuts_leave_no_trace(policy: str) -> None:
    trials = [trial(number, seed=7, cuts=random.Random(number).choice([1, 1, 2, 4])) for number in range(90)]
    really_cut = 0

    async def one(cutter: Cutter, each: Trial) -> int:
        quiet = await cutter.ask(each.path, each.body)
        cut = await cutter.ask(each.path, each.body, cut_after=each.cut_after)
        assert cut.summary() == quiet.summary(), each.number
        assert quiet.whole
        assert cut.whole
        assert cut.done
        assert len(cut.constants()) == 1
        assert cut.comments == len(cut.parked)
        if "return_token_ids" not in each.body:
            assert not any("token_ids" in choice or "prompt_token_ids" in choice for choice in cut.choices)
        return len(cut.parked)

    async def main() -> None:
        nonlocal really_cut
        async with (
            reference(policy) as url,
            narrow_wire(url) as wire,
            cutting([create("ref", "reference", wire)]) as cutter,
        ):
            for first in range(0, len(trials), 8):
                done = await asyncio.gather(*(one(cutter, each) for each in trials[first : first + 8]))
                really_cut += sum(done)
        assert cutter.way.mismatches == 0

    run(main())
    print(f"{policy}: {len(trials)} streams, {really_cut} cuts")
    assert really_cut >= 100
