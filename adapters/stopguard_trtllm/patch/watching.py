"""Wait for whichever comes first: the client leaves, or the promise is finished.

* **The client.** ASGI says ``http.disconnect`` to whoever waits in `receive()`. A request with several prompts has as
  many watchers, and a server may have only one such message to give: they share one task that waits, a `Departure`.
* **The promise.** `GenerationResult._handle_response` is where `finished` turns true. While it is watched, a promise
  has a wrapper of its own around that method (an attribute of the instance, taken away again when the watching ends),
  so that the end is an event as well. A promise of another kind is asked each second, and one of this kind now and
  then, should its end come by another way; the client's leaving is an event all the same.

**Finished beats gone**: uvicorn says ``http.disconnect`` after a normal end too, and a promise that is finished then is
not aborted. Nothing outlives the promise, the client, or the request, whichever ends first: with the poll it replaces,
a watcher behind a keep-alive proxy was reported to live as long as the connection (NVIDIA/TensorRT-LLM#13777).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Departure", "replacement"]

_KEY: Final = "stopguard.departure"
#: How often a promise whose end is no event is asked.
_ASK_SECONDS: Final = 1.0
#: And one whose end is: it may come by a way that is not known here, and a watcher that misses it would live for ever.
_BACKSTOP_SECONDS: Final = 10.0

News = asyncio.Future[None]


class Departure:
    """The leaving of one request's client. Its task waits in `receive()` as long as somebody watches."""

    __slots__ = ("_receive", "_scope", "_task", "gone", "watchers")

    def __init__(self, scope: Any, receive: Any) -> None:
        self._scope = scope
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        self.gone = False
        self.watchers: set[News] = set()

    @classmethod
    def of(cls, raw_request: Any) -> Departure:
        """The one of this request, which lives in its scope."""
        scope = raw_request.scope
        found = scope.get(_KEY)
        if not isinstance(found, cls):
            found = scope[_KEY] = cls(scope, raw_request.receive)
        return found

    def join(self, news: News) -> None:
        """From now on `news` becomes done when the client has left."""
        self.watchers.add(news)
        if self.gone:
            _tell(news)
        elif self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._wait(), name="stopguard departure")

    def leave(self, news: News) -> None:
        self.watchers.discard(news)
        if not self.watchers:
            if self._task is not None:
                self._task.cancel()
                self._task = None
            self._scope.pop(_KEY, None)

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":  # noqa: ASYNC110 (the message is the event; this only yields)
            # The request's body was read before there was a promise: what still comes is its end, told again.
            await asyncio.sleep(0)
        self.gone = True
        for news in self.watchers:
            _tell(news)


def replacement(stock: Callable[..., Any], log: Any) -> Callable[..., Any]:
    """The method that goes in the place of `stock`, `OpenAIServer.await_disconnected`."""
    complained = False

    @functools.wraps(stock)
    async def await_disconnected(self: Any, raw_request: Any, promise: Any) -> None:
        nonlocal complained
        if raw_request is None or promise.finished:
            return
        try:
            departure = Departure.of(raw_request)
        except (AttributeError, TypeError):
            await stock(self, raw_request, promise)
            return
        news: News = asyncio.get_running_loop().create_future()
        taken_away = _announce_end(promise, news)
        if taken_away is None and not complained:
            complained = True
            line = f"StopGuard: the end of a {type(promise).__name__} is no event, it is asked for each second"
            log.warning(line)
        departure.join(news)
        try:
            while not news.done() and not promise.finished:
                await asyncio.wait([news], timeout=_BACKSTOP_SECONDS if taken_away else _ASK_SECONDS)
            if promise.finished:
                return
        finally:
            departure.leave(news)
            if taken_away is not None:
                taken_away()
        promise.abort()
        line = f"{raw_request.client} is disconnected, abort {promise.request_id}"
        log.info(line)

    return await_disconnected


def _announce_end(promise: Any, news: News) -> Callable[[], None] | None:
    """Have `news` become done when `promise` finishes; returns how to undo that, or `None` when it cannot be done."""
    handle = getattr(promise, "_handle_response", None)
    if not callable(handle):
        return None
    loop = news.get_loop()
    own = "_handle_response" in getattr(promise, "__dict__", ())

    def handle_response(*arguments: Any, **options: Any) -> Any:
        try:
            return handle(*arguments, **options)
        finally:
            if promise.finished:
                # Results may also be taken by a thread (`GenerationResult.result()`).
                if _is_running(loop):
                    _tell(news)
                else:
                    loop.call_soon_threadsafe(_tell, news)

    try:
        promise._handle_response = handle_response
    except AttributeError:
        return None

    def take_away() -> None:
        if promise.__dict__.get("_handle_response") is handle_response:
            if own:
                promise._handle_response = handle
            else:
                del promise._handle_response

    return take_away


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _tell(news: News) -> None:
    if not news.done():
        news.set_result(None)
