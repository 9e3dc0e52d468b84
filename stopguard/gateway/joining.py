"""Joining: a second request with the same idempotency key gets the response of the first, from its beginning.

What has passed so far is kept, up to a limit; beyond it nobody can join any more. While somebody has
joined, each piece goes to all of them, and the slowest sets the pace. If the first client leaves, the next
takes its place and the engine works on: that is no stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stopguard.gateway.downstream import Downstream
    from stopguard.gateway.exchange import Exchange

__all__ = ["Joiner", "Recording"]


class Joiner:
    """A client that gets another request's response."""

    __slots__ = ("_recording", "client", "paused")

    def __init__(self, recording: Recording, client: Downstream) -> None:
        self._recording = recording
        self.client = client
        self.paused = client.paused

    def client_left(self, method: str, late_seconds: float | None = None) -> None:
        """One listener less; the others go on."""
        self._recording.leave(self)

    def pause(self) -> None:
        self.paused = True
        self._recording.exchange.pause()

    def resume(self) -> None:
        self.paused = False
        self._recording.resume()


class Recording:
    """What has passed of one response, and who else gets it."""

    __slots__ = ("_joiners", "_limit", "_pieces", "_size", "exchange")

    def __init__(self, exchange: Exchange, limit: int) -> None:
        self.exchange = exchange
        self._limit = limit
        self._pieces: list[bytes] | None = []
        self._size = 0
        self._joiners: list[Joiner] = []

    def join(self, client: Downstream) -> bool:
        """Let `client` have this response; False if too much of it has passed already."""
        if self._pieces is None:
            return False
        joiner = Joiner(self, client)
        self._joiners.append(joiner)
        client.serving = joiner
        if self._pieces:
            client.write(b"".join(self._pieces))
        return True

    def add(self, piece: bytes) -> None:
        """A piece of the response passes."""
        self._size += len(piece)
        if self._pieces is not None:
            self._pieces.append(piece)
            if self._size > self._limit:
                self._pieces = None
        for joiner in self._joiners:
            joiner.client.write(piece)

    def leave(self, joiner: Joiner) -> None:
        """A joined client is gone."""
        if joiner in self._joiners:
            self._joiners.remove(joiner)
            self.resume()

    def resume(self) -> None:
        """Go on unless somebody else is full."""
        client = self.exchange.client
        if not any(joiner.paused for joiner in self._joiners) and not (client is not None and client.paused):
            self.exchange.resume()

    def take_over(self) -> bool:
        """The first client left: whether another has taken its place."""
        if not self._joiners:
            return False
        self.exchange.adopt(self._joiners.pop(0).client)
        self.resume()
        return True

    def finish(self, *, keep_alive: bool) -> None:
        """The response is complete for everybody."""
        for joiner in self._release():
            joiner.client.response_done(keep_alive=keep_alive)

    def tell(self, said: bytes, *, keep_alive: bool, whole: bool) -> None:
        """The request was stopped: everybody gets the terminal event `said`, or is cut."""
        for joiner in self._release():
            if whole:
                joiner.client.write(said)
                joiner.client.response_done(keep_alive=keep_alive)
            else:
                joiner.client.abort()

    def _release(self) -> list[Joiner]:
        joiners, self._joiners = self._joiners, []
        self._pieces = None
        return joiners
