"""The guard: preempting must not become the work.

Every preemption costs tokens that have to be computed again. The guard adds up what was computed and what will
have to be recomputed over a sliding window (an exponential one: what happened `window_seconds` ago counts 37 %).
When the recomputed share passes its ceiling the guard *closes*: nothing is preempted any more, urgent requests
wait in line like under plain priorities. It opens again at half the ceiling, not at the ceiling itself, so that it
does not flutter. A request's own bounds (how often, how soon again) are kept in `victims.eligible`.

The window is taken to hold at least `window_tokens`, so that the first preemptions after a quiet hour are allowed;
what can be lost before anything is computed is bounded by that times the share, plus one victim.
"""

from __future__ import annotations

import math

from stopguard.preemption.settings import PreemptionSettings

__all__ = ["Guard"]

_OPEN_AGAIN = 0.5


class Guard:
    """Watches the recomputed share. `closed` says whether it has stopped preempting."""

    __slots__ = ("_at", "_computed", "_floor", "_recomputed", "_share", "_window", "closed", "closings")

    def __init__(self, settings: PreemptionSettings) -> None:
        self._share = settings.recomputed_share
        self._window = settings.window_seconds
        self._floor = float(settings.window_tokens)
        self._at = -math.inf
        self._computed = 0.0
        self._recomputed = 0.0
        self.closed = False
        self.closings = 0

    def computed(self, tokens: int, at: float) -> None:
        """The engines have computed `tokens`, prompts included."""
        assert tokens >= 0
        self._fade(at)
        self._computed += tokens
        self._look()

    def recomputing(self, tokens: int, at: float) -> None:
        """A preemption was ordered that makes `tokens` have to be computed again."""
        assert tokens >= 0
        self._fade(at)
        self._recomputed += tokens
        self._look()

    def allows(self, at: float) -> bool:
        """Whether a preemption may be ordered now."""
        self._fade(at)
        self._look()
        return not self.closed

    @property
    def recomputed_share(self) -> float:
        """Recomputed tokens for each computed one, in the window; 0 to more than 1."""
        return self._recomputed / max(self._floor, self._computed)

    def _fade(self, at: float) -> None:
        if at > self._at:
            if self._at > -math.inf:
                kept = math.exp((self._at - at) / self._window)
                self._computed *= kept
                self._recomputed *= kept
            self._at = at

    def _look(self) -> None:
        share = self.recomputed_share
        if not self.closed and share > self._share:
            self.closed = True
            self.closings += 1
        elif self.closed and share <= self._share * _OPEN_AGAIN:
            self.closed = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Guard {state} recomputed {self.recomputed_share:.1%} of {self._share:.1%} closings {self.closings}>"
