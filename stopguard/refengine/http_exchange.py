"""One generation over HTTP: submit, watch the connection, write what comes, leave nothing behind.

The exchange owns `receive()` from the end of the body on. One small task waits for `http.disconnect` and
tells the engine at once that the connection has closed; *when* the engine acts on it is its policy's
business. Two rules, both learnt from real servers: `http.disconnect` also comes after a normal end, so
"finished" is looked at first; and whatever happens, the watcher ends with its exchange.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec

from stopguard.errors import LimitReached
from stopguard.refengine.http_driver import Inbox, Ticket
from stopguard.refengine.http_face import Face
from stopguard.refengine.http_message import Receive, Send, json_response
from stopguard.refengine.http_openai import Call, Choice, Json, Shape
from stopguard.refengine.http_styles import HttpProblem, error_body
from stopguard.refengine.interface import DuplicateRequest, EngineCrashed, Output, RequestRejected, RequestSpec

__all__ = ["Exchange"]

#: Reasons that no client of the imitated servers ever sees as a finish reason: they become an error.
_ERROR_REASONS: Final = frozenset({"error"})
_encode = msgspec.json.Encoder().encode


class Exchange:
    """One call, from its submission to the end of its response."""

    def __init__(self, face: Face, call: Call, shape: Shape, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.face = face
        self.call = call
        self.shape = shape
        self.headers = headers
        self.inbox = Inbox()
        self.tickets: list[Ticket] = []
        self.finished = False
        self._started = False
        self._first_choice: dict[str, int] = {}

    async def run(self, receive: Receive, send: Send) -> None:
        """Serve the call. `HttpProblem` only while nothing has been sent and nothing is held."""
        face = self.face
        if face.closing:
            raise HttpProblem(503, "the server is shutting down")
        if len(face.exchanges) >= face.options.exchanges_max:
            raise HttpProblem(
                face.style.overload_status, f"{face.options.exchanges_max} requests are open: try again later"
            )
        face.exchanges.add(self.inbox)
        watcher: asyncio.Task[None] | None = None
        try:
            self._submit()
            watcher = asyncio.create_task(self._watch(receive))
            await (self._stream(send) if self.call.stream else self._answer(send))
            self.finished = not self.inbox.client_gone
        finally:
            if not self.finished:
                self._client_gone("unfinished")  # the server cancels the task, or the write failed
            face.exchanges.discard(self.inbox)
            face.driver.forget(self.tickets)
            if watcher is not None:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)

    # Submission -----------------------------------------------------------------------------------

    def _submit(self) -> None:
        face = self.face
        for number, (spec, handle) in enumerate(zip(self.call.specs, self.call.handles, strict=True)):
            try:
                ticket = self._submit_one(spec, handle)
            except (RequestRejected, DuplicateRequest, LimitReached, EngineCrashed) as error:
                for earlier in self.tickets:
                    with suppress(EngineCrashed):
                        face.driver.abort(earlier.request_id, "socket")
                self.finished = True
                raise _as_problem(error, face.style.overload_status) from error
            self.tickets.append(ticket)
            self._first_choice[ticket.request_id] = number * self.call.sequences
            face.note("submitted", ticket.request_id, stream=spec.stream, sequences=self.call.sequences)

    def _submit_one(self, spec: RequestSpec, handle: str) -> Ticket:
        driver = self.face.driver
        try:
            return driver.submit(spec, handle, self.inbox, self.call.owner)
        except DuplicateRequest:
            if not self.face.style.twins:
                raise
            # Two live requests may bear the same external id; an abort by it reaches both.
            twin = f"{spec.request_id}-{self.face.numbers.getrandbits(32):08x}"
            return driver.submit(msgspec.structs.replace(spec, request_id=twin), handle, self.inbox, self.call.owner)

    # The connection -------------------------------------------------------------------------------

    async def _watch(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                if not self.finished:
                    self._client_gone("closed")
                return

    def _client_gone(self, how: str) -> None:
        if self.inbox.client_gone:
            return
        self.inbox.leave()
        for ticket in self.tickets:
            if ticket.open:
                self.face.note("client_gone", ticket.request_id, how=how)
                self.face.driver.client_gone(ticket.request_id)

    # Writing --------------------------------------------------------------------------------------

    def _add(self, output: Output) -> tuple[int, Choice]:
        index = self._first_choice[output.request_id] + output.index
        choice = self.call.choices[index]
        if output.text:
            choice.text.append(output.text)
        choice.token_ids.extend(output.token_ids)
        if output.finish_reason is not None and choice.finish_reason is None:
            choice.finish_reason = output.finish_reason
            choice.usage = output.usage
        return index, choice

    @property
    def _complete(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.call.choices)

    def _error(self, status: int, message: str) -> Json:
        return error_body(self.face.style, status, message)

    async def _answer(self, send: Send) -> None:
        while not self._complete:
            outputs = await self.inbox.take()
            if self.inbox.client_gone:
                return
            for output in outputs:
                self._add(output)
            if not outputs and self.inbox.failure:
                break
        if not self._complete:
            response = json_response(self._error(500, self.inbox.failure), 500)
        elif any(choice.finish_reason in _ERROR_REASONS for choice in self.call.choices):
            response = json_response(self._error(500, "Internal server error"), 500)
        else:
            response = json_response(self.shape.whole(self.call))
        self.finished = True
        await send(response.start(self.headers))
        await send({"type": "http.response.body", "body": response.body})

    async def _stream(self, send: Send) -> None:
        if self.face.style.headers_first:
            await self._start(send)
        while not self._complete:
            outputs = await self.inbox.take()
            if self.inbox.client_gone:
                return
            if not outputs:
                await self._fail(send, self.inbox.failure)
                return
            parts: list[bytes] = []
            failed = cut = False
            for output in outputs:
                index, choice = self._add(output)
                failed = failed or output.finish_reason in _ERROR_REASONS
                cut = cut or (self.face.style.cuts_aborted_streams and output.finish_reason == "abort")
                if failed or cut:
                    continue
                if not choice.started:
                    choice.started = True
                    parts += map(_event, self.shape.opening(self.call, index))
                parts += map(_event, self.shape.chunk(self.call, index, output))
            if not self._started and not failed:
                await self._start(send)
            if parts:
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
            if failed:
                await self._fail(send, "Internal server error")
                return
            if cut:
                await self._end(send, b"")
                return
        tail = [_event(event) for event in self.shape.closing(self.call)]
        await self._end(send, b"".join([*tail, self.shape.done]))

    async def _start(self, send: Send) -> None:
        self._started = True
        headers = [*self.headers, (b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _end(self, send: Send, tail: bytes) -> None:
        self.finished = not self.inbox.client_gone
        await send({"type": "http.response.body", "body": tail})

    async def _fail(self, send: Send, reason: str) -> None:
        """An error after the head is an event of the stream; before it, a plain error."""
        body = self._error(500, reason)
        if self._started:
            await self._end(send, _event(body if "error" in body else {"error": body}) + self.shape.done)
            return
        self._started = self.finished = True
        response = json_response(body, 500)
        await send(response.start(self.headers))
        await send({"type": "http.response.body", "body": response.body})


def _event(value: Json) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _as_problem(error: Exception, overload_status: int) -> HttpProblem:
    match error:
        case LimitReached():
            return HttpProblem(overload_status, str(error))
        case EngineCrashed():
            return HttpProblem(500, str(error))
        case _:
            return HttpProblem(400, str(error))
