"""What a scenario may do to the world: open a call, wait, leave in a precise way. No socket here.

`World` and `Exchange` are protocols with two makers: `client` (real sockets and the machine's clock) and
the tests' virtual one (the reference engine in the same process, in virtual time). Scenarios are written as
one straight line of awaits over these, so that the same scenario runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import msgspec

__all__ = ["Answer", "Call", "Exchange", "Leaving", "Reply", "World"]

#: How a client goes: `fin` closes the connection, `reset` sends RST, `half-close` only ends its own sending.
Leaving = Literal["fin", "reset", "half-close"]

#: Text that is kept of one reply. More is counted and not kept.
BODY_BYTES_MAX = 4 * 1024 * 1024


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request for generation. `keep_alive` asks the server to keep the connection for the next one."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = {}
    keep_alive: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a control route answered; `status` is 0 when nobody did, and then `failure` says why."""

    status: int
    body: bytes = b""
    failure: str = ""
    headers: dict[str, str] = {}

    def json(self) -> Any:
        """The body as JSON; None when it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class Reply:
    """What has come back so far for one call, read as OpenAI's formats (streamed or whole).

    Times are seconds on the world's clock; `None` until it has happened. `ended_at` is set once: when the
    response was complete, or broke off (`failure` says how).
    """

    def __init__(self, *, stream: bool) -> None:
        self.stream = stream
        self.status: int | None = None
        self.head_at: float | None = None
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.ended_at: float | None = None
        self.complete = False
        self.failure = ""
        self.response_id = ""
        self.bytes = 0
        #: Events that carried text, by choice.
        self.chunks: dict[int, int] = {}
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.errors: list[str] = []
        self.completion_tokens: int | None = None
        self._rest = b""

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    @property
    def text(self) -> str:
        """What the first choice says."""
        return self.texts.get(0, "")

    @property
    def events(self) -> int:
        """Events with text, of all choices."""
        return sum(self.chunks.values())

    def head(self, status: int, at: float) -> None:
        self.status, self.head_at = status, at

    def data(self, body: bytes, at: float) -> None:
        """More of the body."""
        if not body:
            return
        self.bytes += len(body)
        self.last_at = at
        if self.bytes > BODY_BYTES_MAX:
            return
        self._rest += body
        if self.stream and self.status == 200:
            *whole, self._rest = self._rest.split(b"\n")
            for line in whole:
                self._line(line.strip(), at)
        elif self.first_at is None:
            self.first_at = at

    def end(self, at: float) -> None:
        """The response is complete."""
        if self.ended:
            return
        self.ended_at, self.complete = at, True
        if self.stream and self.status == 200:
            self._line(self._rest.strip(), at)
        else:
            self._take(_decoded(self._rest))
        self._rest = b""

    def fail(self, failure: str, at: float) -> None:
        """Nothing more will come, and the response is not complete."""
        if not self.ended:
            self.ended_at, self.failure = at, failure

    def _line(self, line: bytes, at: float) -> None:
        if line.startswith(b"data:"):
            value = _decoded(line[5:].strip())
            before = self.events
            self._take(value)
            if self.first_at is None and self.events > before:
                self.first_at = at

    def _take(self, value: Any) -> None:
        if not isinstance(value, dict):
            return
        if value.get("error") or value.get("object") == "error":
            self.errors.append(_error_text(value))
        if isinstance(value.get("id"), str):
            self.response_id = value["id"]
        usage = value.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.completion_tokens = usage["completion_tokens"]
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._choice(choice)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index", 0)
        part = choice.get("delta") or choice.get("message") or choice
        text = part.get("content") or part.get("text") or "" if isinstance(part, dict) else ""
        if isinstance(index, int) and isinstance(text, str):
            if text:
                self.chunks[index] = self.chunks.get(index, 0) + 1
                self.texts[index] = self.texts.get(index, "") + text
            if choice.get("finish_reason"):
                self.reasons[index] = str(choice["finish_reason"])


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _error_text(value: Mapping[str, Any]) -> str:
    error = value.get("error")
    message = error.get("message") if isinstance(error, dict) else error if isinstance(error, str) else None
    return str(message or value.get("message") or "an error without a message")


class Exchange(Protocol):
    """One call on its connection."""

    reply: Reply

    @property
    def open(self) -> bool:
        """Whether its connection is still there, in one direction at least."""
        ...

    async def leave(self, how: Leaving = "fin") -> None:
        """Go, now. Afterwards nothing of the reply is read any more; after a half-close its events still count."""
        ...

    def stall(self) -> None:
        """Stop reading; the connection stays."""
        ...


class World(Protocol):
    """A clock and a way to a target."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Let time pass until `condition` holds, which only a reply or time can bring about; False when it
        does not within `seconds`.
        """
        ...

    async def open(self, call: Call, after: Exchange | None = None) -> Exchange:
        """Send a call; on the connection of `after` when that is complete and still open. A refused connection
        is a failed reply, not an error.
        """
        ...

    async def control(self, method: str, path: str, body: Any = None) -> Answer:
        """Call a route of the engine itself (never through a gateway)."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...
