"""A driver in virtual time: it calls `step` exactly when the engine asks for it, and remembers everything.

This is how tests, the comparison and offline storms run an engine: no sleeping, and two runs with the
same calls are equal. A real-time driver (the HTTP face) does the same with a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from stopguard.errors import LimitReached
from stopguard.probe import wire
from stopguard.refengine.engine import ReferenceEngine
from stopguard.refengine.interface import FinishReason, StepResult, Usage

__all__ = ["Sequence", "VirtualDriver"]


class Sequence(msgspec.Struct):
    """What one sequence (a request, or child `index` of it) has delivered so far."""

    request_id: str
    index: int
    tokens: list[int] = msgspec.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    #: When each token was delivered, in seconds.
    delivered_at: list[float] = msgspec.field(default_factory=list)
    ended_at: float | None = None


class VirtualDriver:
    """Runs `engine` from `now` on. `after_step` is called with each result (a test checks invariants there)."""

    def __init__(
        self,
        engine: ReferenceEngine,
        *,
        steps_max: int = 1_000_000,
        after_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        self.engine = engine
        self.now = engine.now
        self.frames: list[wire.Frame] = []
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self._steps_left = steps_max
        self._steps_max = steps_max
        self._after_step = after_step

    def step(self) -> StepResult:
        """One call of `step` at the present time."""
        if not self._steps_left:
            raise LimitReached("steps of a virtual run", self._steps_max, "the engine never comes to rest")
        self._steps_left -= 1
        result = self.engine.step(self.now)
        self.frames.append(result.frame)
        for output in result.outputs:
            key = (output.request_id, output.index)
            sequence = self.sequences.get(key)
            if sequence is None:
                sequence = self.sequences[key] = Sequence(output.request_id, output.index)
            sequence.tokens.extend(output.token_ids)
            sequence.text += output.text
            sequence.delivered_at.extend([self.now] * len(output.token_ids))
            if output.finish_reason is not None:
                sequence.finish_reason, sequence.usage = output.finish_reason, output.usage
                sequence.ended_at = self.now
        if self._after_step is not None:
            self._after_step(result)
        return result

    def advance(self, until: float | None = None) -> bool:
        """On to the next event, if there is one not after `until`; False otherwise."""
        at = self.engine.next_event_at(self.now)
        if at is None or (until is not None and at > until):
            return False
        self.now = at
        self.step()
        return True

    def run_until(self, at: float) -> None:
        """Everything that happens up to `at`, which is the time afterwards."""
        while self.advance(at):
            pass
        self.now = max(self.now, at)

    def run(self, until: float = 1e9) -> None:
        """Everything that happens until the engine waits for commands; the time is that of the last event."""
        while self.advance(until):
            pass

    def run_while(self, condition: Callable[[], bool], until: float = 1e9) -> bool:
        """Step while `condition` holds; True when it has ceased to."""
        while condition():
            if not self.advance(until):
                return not condition()
        return True

    def events(self, request_id: str | None = None) -> Iterator[wire.Event]:
        """All events so far, in order; of one request if an id is given."""
        for frame in self.frames:
            for event in frame.events:
                if request_id is None or event.request_id == request_id:
                    yield event

    def sequence(self, request_id: str, index: int = 0) -> Sequence:
        """What the sequence has delivered; empty when nothing yet."""
        return self.sequences.get((request_id, index)) or Sequence(request_id, index)
