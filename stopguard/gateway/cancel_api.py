"""The cancel API on the data port: stop a request by name, and learn whether it has really stopped.

=================================================  =========================================================
`DELETE /v1/requests/{id}`                         stop one request; `{id}` is ours, or the client's own
`POST /v1/requests/{id}/cancel`                    the same
`POST /v1/requests/cancel`                         stop several: `{"ids": […]}`, `{"group": …}` (the label in
                                                   `X-StopGuard-Group`), `{"model": …}`
`GET /v1/requests/{id}`                            the state of one request
`POST /v1/requests/{id}/class`                     another class for it (see `class_api`)
`?wait=settled&timeout=5`                          on the first three: answer when all are settled, or after
                                                   so many seconds
=================================================  =========================================================

Only the credentials that made a request may stop it; for anybody else it does not exist (404). 200 means
that nothing is left to do (`already` if that was so before), 202 that the stop is under way.
"""

from __future__ import annotations

import re
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote

import msgspec

from stopguard.errors import ClientError
from stopguard.gateway import terminal
from stopguard.gateway.class_api import change_class
from stopguard.gateway.routes import RouteKind
from stopguard.ledger import Ledger, RequestLedgers
from stopguard.stops import Semantics, Source, StopCause, Tracked, retry_advice

if TYPE_CHECKING:
    from stopguard.gateway.downstream import Downstream
    from stopguard.gateway.exchange import Exchange
    from stopguard.gateway.head import RequestHead
    from stopguard.gateway.server import Gateway

__all__ = ["CancelApi"]

_PREFIX = "/v1/requests/"
_encode = msgspec.json.Encoder().encode
_SECONDS = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")


class _Selection(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/requests/cancel`."""

    ids: list[str] = []
    group: str = ""
    model: str = ""


_selection_decoder = msgspec.json.Decoder(_Selection)


class _Waiter:
    """A client that waits until some requests are settled."""

    __slots__ = ("_api", "already", "client", "due_at", "head", "pending", "results", "single")

    def __init__(
        self,
        api: CancelApi,
        client: Downstream,
        head: RequestHead,
        due_at: float,
        results: dict[str, object],
        single: bool,
    ) -> None:
        self._api = api
        self.client = client
        self.head = head
        self.due_at = due_at
        self.results = results
        self.single = single
        self.pending: set[str] = set()
        self.already: set[str] = set()

    def client_left(self, method: str, late_seconds: float | None = None) -> None:
        """Who asked is gone: what it stopped stays stopped."""
        self._api.forget(self)

    def pause(self) -> None:
        """Nothing is written before the one answer."""

    def resume(self) -> None:
        """Nothing is written before the one answer."""


class CancelApi:
    """Answers the routes below `/v1/requests/`."""

    __slots__ = ("_by_request", "_gateway", "_waiters")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._waiters: dict[_Waiter, None] = {}
        self._by_request: dict[str, list[_Waiter]] = {}

    @property
    def waiting(self) -> int:
        """Clients that wait for a request to settle."""
        return len(self._waiters)

    # ---- routes --------------------------------------------------------------------------------

    def handle(self, client: Downstream, head: RequestHead, body: bytes) -> bool:
        """Answer the request if it is one of ours."""
        method, rest = head.method, head.path[len(_PREFIX) :]
        name, _, action = rest.partition("/")
        group = method == b"POST" and rest == "cancel"
        one = (method == b"DELETE" and not action) or (method == b"POST" and action == "cancel")
        reclass = method == b"POST" and action == "class"
        if not (group or one or reclass or (method == b"GET" and not action)) or not name:
            return False
        self._gateway.give_body_room(len(body))
        digest = head.standing.digest
        wait_seconds = self._wait_seconds(head)
        if wait_seconds is None:
            self._refuse(client, head, 400, "bad_request", "wait must be 'settled' and timeout a number of seconds")
        elif method == b"GET":
            self._show(client, head, digest, unquote(name))
        elif reclass:
            self._change_class(client, head, body, digest, unquote(name))
        elif group:
            self._cancel_several(client, head, body, digest, wait_seconds)
        else:
            self._cancel(client, head, digest, [unquote(name)], wait_seconds, single=True)
        return True

    def answer(self, client: Downstream, head: RequestHead, status: int, body: object) -> None:
        """Answer with JSON, at once."""
        keep_alive = head.keep_alive and (client.takes_more or bool(client.ready))
        client.write(terminal.json_response(status, _encode(body), keep_alive=keep_alive, http_1_1=head.http_1_1))
        client.response_done(keep_alive=keep_alive)

    # ---- waiters -------------------------------------------------------------------------------

    def settled(self, tracked: Tracked) -> None:
        """A request's books are closed: whoever waited for it may have its answer."""
        waiters = self._by_request.pop(tracked.request_id, None)
        for waiter in waiters or ():
            waiter.pending.discard(tracked.request_id)
            waiter.results[tracked.request_id] = describe(tracked, already=tracked.request_id in waiter.already)
            if not waiter.pending:
                self._finish(waiter)

    def advance(self, at: float) -> None:
        """Answer those whose patience is over with what is known."""
        next_due = float("inf")
        for waiter in list(self._waiters):
            if waiter.due_at <= at:
                for request_id in waiter.pending:
                    exchange = self._gateway.registry.alive.get(request_id)
                    if exchange is not None:
                        already = request_id in waiter.already
                        waiter.results[request_id] = describe(exchange.tracked, already=already)
                self._finish(waiter)
            else:
                next_due = min(next_due, waiter.due_at)
        self._gateway.wake_at(next_due)

    def forget(self, waiter: _Waiter) -> None:
        """Remove every trace of `waiter`."""
        self._waiters.pop(waiter, None)
        for request_id in waiter.pending:
            waiters = self._by_request.get(request_id)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._by_request[request_id]

    # ---- private -------------------------------------------------------------------------------

    def _wait_seconds(self, head: RequestHead) -> float | None:
        """How long the client will wait: 0 if not at all, `None` if it asked for something impossible."""
        _, _, query = head.target.partition(b"?")
        if not query:
            return 0.0
        values = parse_qs(query.decode("ascii"))
        wait = values.get("wait", [""])[-1]
        timeout = values.get("timeout", [""])[-1]
        longest = self._gateway.timeouts.cancel_wait_seconds
        if wait not in ("", "settled") or (timeout and _SECONDS.fullmatch(timeout) is None):
            return None
        if not wait:
            return 0.0
        return min(float(timeout), longest) if timeout else longest

    def _show(self, client: Downstream, head: RequestHead, digest: str, name: str) -> None:
        registry = self._gateway.registry
        found = registry.named(digest, name)
        if found:
            self.answer(client, head, 200, describe(found[-1].tracked, already=False))
        elif registry.has_finished(digest, name):
            self.answer(client, head, 200, self._describe_finished(name))
        else:
            self._not_found(client, head, name)

    def _change_class(self, client: Downstream, head: RequestHead, body: bytes, digest: str, name: str) -> None:
        registry = self._gateway.registry
        found = registry.named(digest, name)
        if not found and not registry.has_finished(digest, name):
            self._not_found(client, head, name)
            return
        try:
            answer = change_class(self._gateway, found, digest, body)
        except ClientError as error:
            self._refuse(client, head, error.status_hint, "class_not_changed", str(error))
            return
        state = describe(found[-1].tracked, already=False) if found else self._describe_finished(name)
        self.answer(client, head, 200, {**state, **answer})

    def _cancel_several(
        self, client: Downstream, head: RequestHead, body: bytes, digest: str, wait_seconds: float
    ) -> None:
        try:
            selection = _selection_decoder.decode(body)
        except msgspec.DecodeError as error:
            self._refuse(client, head, 400, "bad_request", f"the body must have ids, group or model: {error}")
            return
        limit = self._gateway.limits.group_ids
        chosen = bool(selection.ids) + bool(selection.group) + bool(selection.model)
        if chosen != 1 or len(selection.ids) > limit:
            message = f"give exactly one of ids (at most {limit}), group or model"
            self._refuse(client, head, 400, "bad_request", message)
            return
        registry = self._gateway.registry
        names = selection.ids
        if selection.group:
            names = [each.request_id for each in registry.grouped(digest, selection.group)]
        elif selection.model:
            names = [each.request_id for each in registry.of_model(digest, selection.model)]
        self._cancel(client, head, digest, names, wait_seconds, single=False)

    def _cancel(
        self, client: Downstream, head: RequestHead, digest: str, names: list[str], wait_seconds: float, *, single: bool
    ) -> None:
        gateway = self._gateway
        registry = gateway.registry
        results: dict[str, object] = {}
        stopping: list[Exchange] = []
        for name in names:
            found = registry.named(digest, name)
            stopping += found
            if not found and registry.has_finished(digest, name):
                results[name] = self._describe_finished(name)
            elif not found and single:
                self._not_found(client, head, name)
                return
            elif not found:
                results[name] = {"id": name, "object": "request", "status": "unknown"}
        at = monotonic()
        wait = wait_seconds > 0 and len(self._waiters) < gateway.limits.cancel_waiters
        waiter = _Waiter(self, client, head, at + wait_seconds, results, single)
        if wait:
            # Before the stops, since some of them settle at once.
            for exchange in stopping:
                waiter.pending.add(exchange.request_id)
                self._by_request.setdefault(exchange.request_id, []).append(waiter)
            self._waiters[waiter] = None
            client.serving = waiter
        tracked = [exchange.tracked for exchange in stopping]
        for each in tracked:
            already = each.muted
            if already:
                waiter.already.add(each.request_id)
            cause = StopCause(
                semantics=Semantics.CANCEL, source=Source.API, reason="api", observed_at=at, actor="the cancel API"
            )
            gateway.stop(each, cause)
            results.setdefault(each.request_id, describe(each, already=already))
        if not wait or (not waiter.pending and waiter in self._waiters):
            self._finish(waiter)
        elif waiter in self._waiters:
            gateway.wake_at(waiter.due_at)

    def _finish(self, waiter: _Waiter) -> None:
        self.forget(waiter)
        results = list(waiter.results.values())
        running = any(isinstance(each, dict) and each.get("status") == "stopping" for each in results)
        body: object = results[0] if waiter.single and len(results) == 1 else {"object": "list", "data": results}
        self.answer(waiter.client, waiter.head, 202 if running else 200, body)

    def _describe_finished(self, request_id: str) -> dict[str, object]:
        ledgers = self._gateway.book.find(request_id)
        if ledgers is None:
            return {"id": request_id, "object": "request", "status": "settled", "already": True}
        return {**_describe_ledgers(ledgers), "already": True}

    def _not_found(self, client: Downstream, head: RequestHead, name: str) -> None:
        message = f"no request {name[:80]!r} of these credentials is known here"
        self._refuse(client, head, 404, "unknown_request", message)

    def _refuse(self, client: Downstream, head: RequestHead, status: int, code: str, message: str) -> None:
        notice = terminal.Notice(status=status, code=code, message=message)
        keep_alive = head.keep_alive and (client.takes_more or bool(client.ready))
        client.write(terminal.error_response(RouteKind.OTHER, notice, keep_alive=keep_alive, http_1_1=head.http_1_1))
        client.response_done(keep_alive=keep_alive)


def describe(tracked: Tracked, *, already: bool) -> dict[str, object]:
    """The state of a request: status, evidence, and one line for each of its five ledgers."""
    description = {**_describe_ledgers(tracked.ledgers), "already": already}
    if tracked.ledgers.stop is not None:
        advice = retry_advice(tracked)
        description["retry"] = {"safe": advice.safe, "reason": advice.reason}
    return description


def _describe_ledgers(ledgers: RequestLedgers) -> dict[str, object]:
    stop = ledgers.stop
    if ledgers.closed_at is not None:
        status = "written_off" if ledgers.written_off else "settled"
    else:
        status = "stopping" if stop is not None else "active"
    description: dict[str, object] = {
        "id": ledgers.request_id,
        "object": "request",
        "status": status,
        "model": ledgers.model,
        "engine": ledgers.engine,
        "ledgers": {
            ledger.label: {
                "closed": ledgers.ledger_closed(ledger),
                "state": ledgers.describe(ledger).partition(": ")[2],
            }
            for ledger in Ledger
        },
    }
    if stop is not None:
        description["stop"] = {
            "semantics": stop.semantics,
            "source": stop.source,
            "reason": stop.reason,
            "outcome": stop.outcome,
            "evidence": stop.evidence.label,
            "attempts": stop.attempts,
        }
    return description
