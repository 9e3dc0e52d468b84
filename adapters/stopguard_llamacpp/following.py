"""A server's log followed while it is written: the witness of stops that disturbs nothing, unlike the pages."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from stopguard.audit.target import Happening
from stopguard.probe import wire
from stopguard_llamacpp.log import ServerLog

__all__ = ["FollowedLog"]


class FollowedLog:
    """The log of one server (verbosity 5): which tasks are in it, and when each left.

    Times are of reading, in monotonic seconds. `OSError` when the file cannot be opened or read.
    """

    def __init__(self, path: Path) -> None:
        self.log = ServerLog()
        self.gone_at: dict[str, float] = {}
        self._file = path.open("rb")

    def close(self) -> None:
        self._file.close()

    def look(self) -> list[Happening]:
        """What has been written since the last look."""
        happenings = self.log.feed(self._file.read().decode("utf-8", "replace"), monotonic())
        for event in happenings:
            if isinstance(event, wire.Moved) and event.place == "gone":
                self.gone_at[event.request_id] = event.at
        return happenings

    @property
    def inside(self) -> set[str]:
        """The tasks that are in the server now."""
        self.look()
        return self.log.running | self.log.waiting
