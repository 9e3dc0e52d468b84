"""llama.cpp's log as the witness of its stops: reading its pages would put off what is to be measured."""

from __future__ import annotations

import asyncio
from time import monotonic

from stopguard_llamacpp.following import FollowedLog

__all__ = ["LogOfServer"]

_LOOK_SECONDS = 0.002


class LogOfServer(FollowedLog):
    """Follows the log of one server: which tasks are in it, and when each left."""

    async def idle(self, seconds: float) -> None:
        """Wait until nothing is in the server."""
        due_at = monotonic() + seconds
        while self.inside:
            if monotonic() > due_at:
                raise SystemExit(f"still in the server after {seconds:.0f} s: {self.inside}")
            await asyncio.sleep(_LOOK_SECONDS)

    async def victims(self, others: int) -> set[str]:
        """The tasks of the staged request: those that wait where `others` hold the places, else all that are there."""
        due_at = monotonic() + 5.0
        while True:
            inside = self.inside
            found = set(self.log.waiting) if others else inside
            if found:
                return found
            if monotonic() > due_at:
                raise SystemExit("the staged request did not reach the server")
            await asyncio.sleep(_LOOK_SECONDS)

    async def until_gone(self, victims: set[str], left_at: float, patience_seconds: float) -> float | None:
        """Seconds from `left_at` until all `victims` are gone; `None` when that takes longer than the patience."""
        while victims & self.inside:
            if monotonic() > left_at + patience_seconds:
                return None
            await asyncio.sleep(_LOOK_SECONDS)
        return max(self.gone_at.get(task, left_at) for task in victims) - left_at
