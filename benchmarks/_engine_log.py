"""llama.cpp's log as the witness of its stops: reading its pages would put off what is to be measured."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic

from stopguard.probe import wire
from stopguard_llamacpp.log import ServerLog

__all__ = ["LogOfServer"]

_LOOK_SECONDS = 0.002


class LogOfServer:
    """Follows the log of one server (verbosity 5): which tasks are in it, and when each left."""

    def __init__(self, path: Path) -> None:
        self._log = ServerLog()
        self._gone_at: dict[str, float] = {}
        self._file = path.open("rb")

    def close(self) -> None:
        self._file.close()

    def _inside(self) -> set[str]:
        for event in self._log.feed(self._file.read().decode("utf-8", "replace"), monotonic()):
            if isinstance(event, wire.Moved) and event.place == "gone":
                self._gone_at[event.request_id] = event.at
        return self._log.running | self._log.waiting

    async def idle(self, seconds: float) -> None:
        """Wait until nothing is in the server."""
        due_at = monotonic() + seconds
        while self._inside():
            if monotonic() > due_at:
                raise SystemExit(f"still in the server after {seconds:.0f} s: {self._inside()}")
            await asyncio.sleep(_LOOK_SECONDS)

    async def victims(self, others: int) -> set[str]:
        """The tasks of the staged request: those that wait where `others` hold the places, else all that are there."""
        due_at = monotonic() + 5.0
        while True:
            inside = self._inside()
            found = set(self._log.waiting) if others else inside
            if found:
                return found
            if monotonic() > due_at:
                raise SystemExit("the staged request did not reach the server")
            await asyncio.sleep(_LOOK_SECONDS)

    async def until_gone(self, victims: set[str], left_at: float, patience_seconds: float) -> float | None:
        """Seconds from `left_at` until all `victims` are gone; `None` when that takes longer than the patience."""
        while victims & self._inside():
            if monotonic() > left_at + patience_seconds:
                return None
            await asyncio.sleep(_LOOK_SECONDS)
        return max(self._gone_at.get(task, left_at) for task in victims) - left_at
