"""`DisconnectGuard`: a handler of an ASGI server learns at once that its client has left.

For servers that want no proxy in front. It is pure ASGI, imports nothing but the standard library, and goes outermost:

    app = DisconnectGuard(app)
    vllm serve MODEL --middleware stopguard.middleware.DisconnectGuard

A server tells an application of a disconnect only when it is asked, through `receive()`. A handler that computes an
answer asks nobody; one that polls asks late; and a framework's middleware that wraps `receive()` may ask in its stead
and keep the answer. So the guard owns `receive()`: it alone asks the server, all the time, and hands on what comes.

* **Finished beats gone.** From its last message on a response is finished, and a disconnect after that stops nothing:
  servers send ``http.disconnect`` after a normal end too. Background work of a finished request is left alone.
* **Whoever listens goes first.** If somebody waits in `receive()` when the client leaves, he gets ``http.disconnect``
  and `listener_seconds` to end the request in his own way: vLLM's `with_cancellation` for one waits for its handler
  and for the disconnect side by side, and cancelling it from outside would leave that handler running. Whoever does not
  listen, or does not end, is cancelled: once, with `CancelledError` where it awaits, so that its clean-up may await.
* **An upload is read ahead**, at most `read_ahead_bytes` of it: behind that the server is no longer asked, and a
  disconnect is seen only when the handler has read on.
* **Nothing outlives the request**: one task watches for each open request and ends with its response.

Websockets and the lifespan pass through untouched, as do requests under `drain_paths`, which run to their end whether
their client waits or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["DisconnectGuard", "GuardStatistics"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

#: Messages of no consequence in a row (a body's end, told again) after which a server is not asked any further.
_IDLE_MESSAGES: Final = 64


@dataclass(frozen=True)
class GuardStatistics:
    """What the guard has now (`…_open`) and what became of requests so far (`…_total`).

    `finished_total` ended by themselves; of those whose client left, `listened_total` ended after they were told and
    `cancelled_total` had to be cancelled.
    """

    requests_open: int
    watchers_open: int
    finished_total: int
    listened_total: int
    cancelled_total: int


class DisconnectGuard:
    """Wraps the ASGI application `app`. See the module's text for what it does.

    `listener_seconds` is how long a handler that listens for the disconnect itself may take to end, `read_ahead_bytes`
    how much of a request's body may wait for its handler, `drain_paths` the paths where leaving is no stop.
    """

    def __init__(
        self,
        app: Application,
        *,
        listener_seconds: float = 0.5,
        read_ahead_bytes: int = 1024 * 1024,
        drain_paths: Iterable[str] = (),
    ) -> None:
        if listener_seconds < 0 or read_ahead_bytes < 1:
            raise ValueError("listener_seconds must be 0 or more, and read_ahead_bytes at least 1")
        self.app = app
        self.listener_seconds = listener_seconds
        self.read_ahead_bytes = read_ahead_bytes
        self._drain_paths = frozenset(drain_paths)
        self._open: set[_Exchange] = set()
        self._finished = 0
        self._listened = 0
        self._cancelled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._drain_paths:
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(self, receive, send)
        self._open.add(exchange)
        try:
            await exchange.run(scope)
        finally:
            self._open.discard(exchange)
            if exchange.cancelled:
                self._cancelled += 1
            elif exchange.left_unfinished:
                self._listened += 1
            else:
                self._finished += 1

    def statistics(self) -> GuardStatistics:
        """The guard now."""
        return GuardStatistics(
            requests_open=len(self._open),
            watchers_open=sum(exchange.watching for exchange in self._open),
            finished_total=self._finished,
            listened_total=self._listened,
            cancelled_total=self._cancelled,
        )


class _Exchange:
    """One HTTP request. Its handler runs in the server's task; `_watch` is the only one that asks the server."""

    __slots__ = (
        "_buffered_bytes",
        "_failure",
        "_guard",
        "_handler",
        "_messages",
        "_receive",
        "_room",
        "_send",
        "_timer",
        "_trailers",
        "_uncancelled",
        "_waiting",
        "_watcher",
        "cancelled",
        "complete",
        "finishing",
        "gone",
        "left_unfinished",
        "over",
        "started",
    )

    def __init__(self, guard: DisconnectGuard, receive: Receive, send: Send) -> None:
        self._guard = guard
        self._receive = receive
        self._send = send
        self._handler: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._messages: deque[Message] = deque()
        self._buffered_bytes = 0
        self._room: asyncio.Future[None] | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._failure: Exception | None = None
        self._trailers = False
        self._uncancelled = False
        self.started = False
        #: Its last message is being handed over, or has been: from now on a disconnect is no stop.
        self.finishing = False
        self.complete = False
        self.gone = False
        self.left_unfinished = False
        self.cancelled = False
        self.over = False

    @property
    def watching(self) -> bool:
        return self._watcher is not None and not self._watcher.done()

    async def run(self, scope: Scope) -> None:
        handler = self._handler = asyncio.current_task()
        assert handler is not None  # an ASGI server runs its application in a task
        cancels_before = handler.cancelling()
        # Whoever sent "Expect: 100-continue" is told to go on when the server is first asked. That is the handler's
        # decision, so nobody asks before the handler does.
        if not any(name.lower() == b"expect" for name, _ in scope.get("headers", ())):
            self._start()
        try:
            await self._guard.app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._end()
            if not self._was_ours(handler, cancels_before):
                raise
        finally:
            self._end()
            self._was_ours(handler, cancels_before)

    # ---- what the application calls ---------------------------------------------------------------

    async def receive(self) -> Message:
        """The next message of the request; after its end, or the client's, ``http.disconnect`` for ever."""
        self._start()
        while True:
            if self.gone or self.complete or self.over:
                return {"type": "http.disconnect"}
            if self._messages:
                message = self._messages.popleft()
                self._buffered_bytes -= len(message.get("body", b""))
                _wake(self._room)
                return message
            if self._failure is not None:
                raise self._failure
            news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(news)
            try:
                await news
            finally:
                self._waiting.remove(news)
                self._tell_next()  # there may be more than one message, and who was woken may have been cancelled

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self.started = True
            self._trailers = bool(message.get("trailers", False))
        last = _ends_response(kind, message, trailers=self._trailers)
        if last:
            self.finishing = True
        await self._send(message)
        if last:
            # Only now: a listener that is told earlier would cancel the very send that delivers the end.
            self.complete = True
            self._stop_watching()
            self._tell_waiting()

    # ---- watching ---------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._watcher is None and not self.over:
            self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="stopguard disconnect guard")

    async def _watch(self) -> None:
        body_ended, idle_messages = False, 0
        while idle_messages < _IDLE_MESSAGES:
            try:
                message = await self._receive()
            except Exception as error:
                self._failure = error
                self._tell_waiting()
                return
            if message["type"] == "http.disconnect":
                self._left()
                return
            if body_ended:
                # The end of the body, told again: nobody may be woken by it, and it may not keep the loop busy.
                idle_messages += 1
                await asyncio.sleep(0)
                continue
            body_ended = not message.get("more_body", False)
            self._messages.append(message)
            self._buffered_bytes += len(message.get("body", b""))
            self._tell_next()
            while self._buffered_bytes > self._guard.read_ahead_bytes:
                self._room = asyncio.get_running_loop().create_future()
                await self._room

    def _left(self) -> None:
        """The client is gone."""
        self.gone = True
        listened = any(not news.cancelled() for news in self._waiting)
        self._tell_waiting()
        if self.finishing:
            return
        self.left_unfinished = True
        if listened:
            self._timer = asyncio.get_running_loop().call_later(self._guard.listener_seconds, self._cancel_handler)
        else:
            self._cancel_handler()

    def _cancel_handler(self) -> None:
        if not self.over and not self.finishing and self._handler is not None:
            self.cancelled = True
            logger.debug("the client left %s: its handler is cancelled", "mid-response" if self.started else "early")
            self._handler.cancel("the client has left")

    # ---- the end ----------------------------------------------------------------------------------

    def _was_ours(self, handler: asyncio.Task[Any], cancels_before: int) -> bool:
        """Take our cancel back; whether it was the only one."""
        if not self.cancelled or self._uncancelled:
            return False
        self._uncancelled = True
        return handler.uncancel() <= cancels_before

    def _end(self) -> None:
        """Idempotent: nothing of this request stays in the loop, and whoever still asks is told that it is over."""
        self.over = True
        self._stop_watching()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._messages.clear()
        self._tell_waiting()
        self._handler = None

    def _stop_watching(self) -> None:
        if self._watcher is not None and not self._watcher.done():
            self._watcher.cancel()

    def _tell_next(self) -> None:
        """There are messages: one of those who wait for one may look, unless somebody is about to."""
        if self._messages and not any(news.done() for news in self._waiting):
            for news in self._waiting:
                _wake(news)
                return

    def _tell_waiting(self) -> None:
        for news in self._waiting:
            _wake(news)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


def _ends_response(kind: str, message: Message, *, trailers: bool) -> bool:
    """Whether this is the last message of a response, extensions of ASGI included."""
    if kind == "http.response.trailers":
        return not message.get("more_trailers", False)
    if kind == "http.response.pathsend":
        return not trailers
    if kind in {"http.response.body", "http.response.zerocopysend"}:
        return not trailers and not message.get("more_body", False)
    return False
