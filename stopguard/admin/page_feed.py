"""`/events`: the overview again and again, as server-sent events.

However many pages are open, the overview is made once a turn and encoded once. A turn is half a second, or as long as
keeps the making under a twentieth of the admin thread's time. A reader that does not keep up gets fewer moments, never
a backlog: each is made when the last one is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse

from stopguard.admin.page_overview import overview
from stopguard.admin.view import View

__all__ = ["WATCHERS_MAX", "EventStream", "Feed"]

WATCHERS_MAX = 16
TURN_SECONDS = 0.5
_SHARE = 20
_HEADERS = {"x-accel-buffering": "no"}  # a proxy in front must not collect what is live


class Feed:
    """The events of one app. `watchers` is how many streams are open."""

    def __init__(self, view: View, *, turn_seconds: float = TURN_SECONDS) -> None:
        self._view = view
        self._least_seconds = turn_seconds
        self._turn_seconds = turn_seconds
        self._made_at: float | None = None
        self._event = b""
        self.watchers = 0

    def current(self) -> bytes:
        """The event of this turn; made by whoever asks first."""
        began = perf_counter()
        if self._made_at is None or began - self._made_at >= self._turn_seconds:
            self._event = b"event: overview\ndata: %b\n\n" % overview(self._view).model_dump_json().encode()
            self._made_at = perf_counter()
            self._turn_seconds = max(self._least_seconds, _SHARE * (self._made_at - began))
        return self._event

    def forget(self) -> None:
        """Nobody watches: the next to come gets a moment of its own, not an old one."""
        self._made_at, self._event = None, b""

    async def events(self) -> AsyncIterator[bytes]:
        """Until StopGuard has shut down: then the stream ends, so that it holds up nobody."""
        while True:
            over = self._view.signs().draining and not self._view.open_requests()
            if over:
                self.forget()  # the last moment is a true one
            yield self.current()
            if over:
                return
            await asyncio.sleep(self._turn_seconds)


class EventStream(StreamingResponse):
    """One page's stream. Its place is taken when it begins and given back however it ends."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed.events(), media_type="text/event-stream", headers=_HEADERS)
        self._feed = feed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._feed.watchers >= WATCHERS_MAX:
            why = f"{WATCHERS_MAX} live pages are open already: close one"
            await JSONResponse({"detail": why}, status_code=503)(scope, receive, send)
            return
        self._feed.watchers += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.watchers -= 1
            if not self._feed.watchers:
                self._feed.forget()
