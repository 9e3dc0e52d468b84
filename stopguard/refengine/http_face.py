"""The face's state: one engine, its driver, the style it wears, and what tests may ask for afterwards."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from stopguard.probe import wire
from stopguard.refengine.engine import ReferenceEngine
from stopguard.refengine.http_driver import Clock, Driver, Inbox, RealClock
from stopguard.refengine.http_openai import CallDefaults
from stopguard.refengine.http_styles import style_named
from stopguard.refengine.interface import Health, StepResult

__all__ = ["Face", "FaceOptions", "LogEntry"]


class FaceOptions(msgspec.Struct, frozen=True):
    """Limits and switches of the HTTP side."""

    defaults: CallDefaults = CallDefaults()
    body_bytes_max: int = 16 * 1024 * 1024
    #: Generations that may be open at once; one more gets the style's overload status.
    exchanges_max: int = 2048
    #: vLLM's `VLLM_SERVER_DEV_MODE=1`: `/abort_requests`, `/pause`, `/resume`, … exist.
    dev_mode: bool = False
    #: SGLang's `/health` issues a generation of one token, whose id begins with `HEALTH_CHECK_`.
    health_generates: bool = True
    #: The routes under `/ref/`.
    truth: bool = True
    log_entries_max: int = 8192


class LogEntry(msgspec.Struct, frozen=True):
    """Something that happened, with its engine time. `number` rises by one each time, dropped entries included."""

    number: int
    at: float
    kind: str
    request_id: str
    detail: dict[str, Any]


class Face:
    """Everything that outlives a single HTTP request."""

    def __init__(
        self,
        engine: ReferenceEngine,
        clock: Clock | None = None,
        options: FaceOptions | None = None,
        on_frame: Callable[[wire.Frame], None] | None = None,
        seed: int = 0,
    ) -> None:
        self.engine = engine
        self.options = options or FaceOptions()
        self.style = style_named(engine.policy.name)
        self.clock = clock or RealClock()
        self.driver = Driver(engine, self.clock, [self._note_step])
        #: Called with each step's frame, in the loop's thread: it must not wait.
        self.on_frame = on_frame
        #: Called when the face begins to serve, in its loop: a probe starts there.
        self.on_start: list[Callable[[], None]] = []
        #: Where ids come from, so that a run can be repeated.
        self.numbers = random.Random(f"http:{seed}")
        #: Open generations. An exchange is in here from its submission until its response has ended.
        self.exchanges: set[Inbox] = set()
        self.closing = False
        #: Frames that `on_frame` raised at: an observer never harms the engine.
        self.observer_errors = 0
        self._entries: deque[tuple[int, str, str, float, Any]] = deque(maxlen=self.options.log_entries_max)
        self._entries_total = 0

    def health(self) -> Health:
        """The engine's answer; an engine that died of a broken rule is dead as well."""
        if self.driver.failure:
            return Health(503, alive=False, reason=self.driver.failure)
        return self.engine.health()

    def note(self, kind: str, request_id: str, **detail: Any) -> None:
        """Put something that the face itself saw into the log."""
        self._append(kind, request_id, self.clock.now(), detail)

    def _note_step(self, result: StepResult) -> None:
        frame = result.frame
        for event in frame.events:
            self._append("", event.request_id, event.at, event)
        if self.on_frame is not None:
            try:
                self.on_frame(frame)
            except Exception:
                self.observer_errors += 1

    def _append(self, kind: str, request_id: str, at: float, detail: Any) -> None:
        self._entries_total += 1
        self._entries.append((self._entries_total, kind, request_id, at, detail))

    def log(self, limit: int, after: int = 0, request_id: str = "") -> list[LogEntry]:
        """The last `limit` entries with a number above `after`, oldest first; of one request if an id is given."""
        chosen = [entry for entry in self._entries if entry[0] > after and (not request_id or entry[2] == request_id)][
            -limit:
        ]
        return [_readable(*entry) for entry in chosen]

    def close(self) -> None:
        """Let every open exchange end with an error; new ones are refused."""
        self.closing = True
        for inbox in self.exchanges:
            inbox.fail("the server is shutting down")


def _readable(number: int, kind: str, request_id: str, at: float, detail: Any) -> LogEntry:
    """Wire events are kept as they are and become readable only when somebody asks."""
    if isinstance(detail, msgspec.Struct):
        fields = msgspec.structs.asdict(detail)
        del fields["request_id"], fields["at"]
        return LogEntry(number, at, type(detail).__name__, request_id, fields)
    return LogEntry(number, at, kind, request_id, detail)
