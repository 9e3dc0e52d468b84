"""A real llama.cpp server's own log as the truth about its stops."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

from stopguard.audit.client import SocketWorld
from stopguard.testing.staging import Shape, stage
from stopguard_llamacpp.following import FollowedLog

SLOTS = 4
SHAPE = Shape(
    model="tiny",
    fields={"ignore_eos": True, "cache_prompt": False},
    slots=SLOTS,
    long_tokens=1200,
    short_tokens=24,
    long_words=700,
)


class Truth(FollowedLog):
    """Follows the log of the server under test."""

    async def until(self, condition: Any, seconds: float) -> bool:
        due_at = monotonic() + seconds
        while not condition():
            if monotonic() > due_at:
                return False
            await asyncio.sleep(0.005)
        return True

    async def idle(self, seconds: float = 60.0) -> None:
        assert await self.until(lambda: not self.inside, seconds), f"still in the server: {self.inside}"


async def stop_seconds(truth: Truth, world: SocketWorld, state: str, number: int, patience_seconds: float) -> float:
    """From the client's close to the moment when the server has let go; infinite when that takes too long."""
    await truth.idle()
    staged = await stage(world, SHAPE, state, number)
    truth.look()
    if state == "queued":
        assert await truth.until(lambda: bool(truth.look() or truth.log.waiting), 5.0)
        victims = set(truth.log.waiting)
    else:
        victims = set(truth.inside)
    assert victims, f"{state}: the server has nothing"
    left_at = monotonic()
    await staged.victim.leave()
    stopped = await truth.until(lambda: not victims & truth.inside, patience_seconds)
    await staged.release()
    await truth.idle()
    return max(truth.gone_at[task] for task in victims) - left_at if stopped else float("inf")
