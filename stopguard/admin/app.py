"""The admin app: routes, paging, and the words for what cannot be answered. What it knows, it knows from a `View`.

Every list is a page of at most `PAGE_MAX` rows, and at most `SCAN_MAX` requests are looked at for one page, so that
no call takes long whatever is asked of it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from fastapi import FastAPI, HTTPException, Query, Response
from fastapi.responses import JSONResponse
from starlette.requests import Request

from stopguard import __version__
from stopguard.admin import answers
from stopguard.admin.guard import Application, Guard
from stopguard.admin.models import (
    BooksPage,
    ClassOrder,
    ClassReport,
    EnginePage,
    Health,
    LeakPage,
    Problem,
    Readiness,
    RequestDetail,
    RequestLine,
    RequestPage,
    Semantics,
    StopOrder,
    StopPage,
    StopReport,
    StopResult,
)
from stopguard.admin.page import add_page
from stopguard.admin.view import StopTaken, StopWanted, View
from stopguard.errors import StopGuardError
from stopguard.ledger import RequestLedgers
from stopguard.ledger.journal_errors import AmbiguousId, NotInJournal
from stopguard.stops import Tracked

__all__ = ["PAGE_MAX", "SCAN_MAX", "create_app"]

PAGE_MAX = 500
SCAN_MAX = 20_000
_REPORTED_MAX = 1000
_RELAY_SECONDS = 1.0
_POLL_SECONDS = 0.01

Limit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="Rows at most.")]
Name = Annotated[str | None, Query(max_length=256)]
StateFilter = Literal[
    "open",
    "closed",
    "queued",
    "running",
    "preempted",
    "draining",
    "stopping",
    "overdue",
    "settling",
    "settled",
    "written_off",
]
_CLOSED: frozenset[str] = frozenset({"closed", "settled", "written_off"})
_PROBLEMS: dict[int | str, dict[str, object]] = {
    401: {"model": Problem, "description": "The token is missing or wrong."},
    403: {"model": Problem, "description": "Not from this machine, and there is no token."},
}
_NOT_FOUND: dict[int | str, dict[str, object]] = {
    **_PROBLEMS,
    404: {"model": Problem, "description": "Nobody knows this id."},
    409: {"model": Problem, "description": "Several ids begin like this."},
}


def create_app(
    view: View, *, token: str | None = None, metrics: Callable[[str | None], tuple[bytes, str]] | None = None
) -> Application:
    """The admin app over `view`. Without `token` only programs of this machine are answered (see `guard`).

    `metrics` gives the body and the content type of `/metrics` for an Accept header.
    """
    app = FastAPI(
        title="StopGuard admin API",
        version=__version__,
        description="Every request with its five ledgers, every stop with its evidence, and stops for all of them.",
        # The interactive pages load scripts from elsewhere; the document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
        # A view is read in one step; a pool of threads would only compete for the interpreter.
        redirect_slashes=False,
    )
    _add_health(app, view)
    _add_requests(app, view)
    _add_stops(app, view)
    _add_books(app, view)
    if metrics is not None:
        _add_metrics(app, metrics)
    add_page(app, view)

    @app.exception_handler(StopGuardError)
    async def failed(_request: Request, error: StopGuardError) -> JSONResponse:
        status = 409 if isinstance(error, AmbiguousId) else error.status_hint
        return JSONResponse({"detail": str(error)}, status_code=status)

    return Guard(app, token)


def _add_metrics(app: FastAPI, metrics: Callable[[str | None], tuple[bytes, str]]) -> None:
    @app.get("/metrics", tags=["metrics"], response_class=Response, summary="For Prometheus.")
    async def _metrics(request: Request) -> Response:
        # In a thread of its own: a scrape reads the books in small pieces and rests between them.
        body, content_type = await asyncio.to_thread(metrics, request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})


# ---- is it well? -----------------------------------------------------------------------------------------------


def _add_health(app: FastAPI, view: View) -> None:
    @app.get("/healthz", tags=["health"], responses={503: {"model": Health}})
    async def healthz(response: Response) -> Health:
        """Whether the relay's own loop turns. 503 when it does not answer within a second."""
        if await view.relay_answers(_RELAY_SECONDS):
            return Health(status="ok")
        response.status_code = 503
        return Health(status="stuck")

    @app.get("/readyz", tags=["health"], responses={503: {"model": Readiness}})
    async def readyz(response: Response) -> Readiness:
        """Whether new requests can be served: not shutting down, and some engine answers. 503 if not."""
        signs = view.signs()
        if signs.reasons:
            response.status_code = 503
        return Readiness(ready=not signs.reasons, draining=signs.draining, reasons=list(signs.reasons))


# ---- requests --------------------------------------------------------------------------------------------------


def _add_requests(app: FastAPI, view: View) -> None:
    @app.get("/requests", tags=["requests"], responses=_PROBLEMS)
    async def requests(
        state: StateFilter = "open",
        engine: Name = None,
        model: Name = None,
        semantics: Annotated[Semantics | None, Query(description="Only requests with a stop of this kind.")] = None,
        limit: Limit = 50,
        after: Annotated[
            str | None,
            Query(max_length=200, description="`next` of the page before.", pattern=r"^[0-9.e+-]+:.{1,128}$"),
        ] = None,
    ) -> RequestPage:
        """Requests whose books are open, oldest first, or those that closed lately, newest first."""

        def wanted(request: Tracked | RequestLedgers) -> bool:
            ledgers = _ledgers(request)
            return (
                (engine is None or ledgers.engine == engine)
                and (model is None or ledgers.model == model)
                and (semantics is None or (ledgers.stop is not None and ledgers.stop.semantics == semantics))
                and (state in ("open", "closed") or answers.state_of(ledgers) == state)
            )

        found: list[Tracked | RequestLedgers] = []
        candidates, backwards = _candidates(view, state)
        looked_at = None
        start = _position(candidates, after, backwards=backwards)
        for request in candidates[start : start + SCAN_MAX]:
            if len(found) == limit:
                break
            looked_at = request
            if wanted(request):
                found.append(request)
        more = looked_at is not None and looked_at is not candidates[-1]
        return RequestPage(
            requests=[answers.line(view, request) for request in found],
            next=_cursor(looked_at, backwards=backwards) if more and looked_at is not None else None,
            open_requests=len(view.open_requests()),
        )

    @app.get("/requests/{request_id}", tags=["requests"], responses=_NOT_FOUND)
    async def request(
        request_id: str, rows: Annotated[int, Query(ge=1, le=answers.TIMELINE_MAX)] = answers.TIMELINE_MAX
    ) -> RequestDetail:
        """One request: its five ledgers, its timeline, its stop. From memory, or else from the journal, where the
        beginning of an id is enough.
        """
        return await _find(view, request_id, rows)

    @app.post("/requests/{request_id}/class", tags=["requests"], responses=_NOT_FOUND)
    async def reclass(request_id: str, order: ClassOrder) -> ClassReport:
        """Give a live request another class, whoever made it and whatever that tenant's ceiling is."""
        taken = await view.reclass(request_id, order.priority_class)
        if taken is None:
            raise HTTPException(404, f"no live request is called {request_id[:128]}")
        return ClassReport(id=taken.request_id, priority_class=taken.priority_class, changed=taken.changed)


async def _find(view: View, request_id: str, rows: int) -> RequestDetail:
    now, wall_zero = view.now(), view.wall(0.0)
    tracked = view.find_open(request_id)
    ledgers = tracked.ledgers if tracked is not None else view.find_closed(request_id)
    if ledgers is not None:
        return answers.detail(
            answers.line(view, tracked if tracked is not None else ledgers),
            ledgers.record(),
            "open" if tracked is not None else "recent",
            wall_zero=wall_zero,
            now=now,
            rows_max=rows,
        )
    try:
        stored = await view.find_stored(request_id)
    except NotInJournal as error:
        raise HTTPException(404, str(error)) from None
    if stored is None:
        raise HTTPException(404, f"{request_id[:80]} is not here: it never was, or it ended too long ago")
    run = stored.run
    its_zero = run.wall(0.0)
    its_now = view.wall(now) - its_zero
    abandoned = stored.state == "abandoned"
    line = answers.line_of_record(stored.record, its_zero, now=its_now, abandoned=abandoned)
    return answers.detail(
        line, stored.record, "journal", wall_zero=its_zero, now=its_now, abandoned=abandoned, rows_max=rows
    )


def _candidates(view: View, state: str) -> tuple[Sequence[Tracked | RequestLedgers], bool]:
    """The requests that may be meant, in the order of the page, and whether that is from the newest back."""
    if state in _CLOSED:
        return list(reversed(view.closed_requests())), True
    return view.open_requests(), False


def _ledgers(request: Tracked | RequestLedgers) -> RequestLedgers:
    return request.ledgers if isinstance(request, Tracked) else request


def _key(request: Tracked | RequestLedgers, *, backwards: bool) -> float:
    """What the page is ordered by: the moment of closing, backwards, or the moment of opening."""
    ledgers = _ledgers(request)
    return -(ledgers.closed_at or 0.0) if backwards else ledgers.opened_at


def _cursor(request: Tracked | RequestLedgers, *, backwards: bool) -> str:
    return f"{_key(request, backwards=backwards)!r}:{_ledgers(request).request_id}"


def _position(candidates: Sequence[Tracked | RequestLedgers], after: str | None, *, backwards: bool) -> int:
    """Where the page begins: behind the request of the cursor, also when that one has gone meanwhile."""
    if after is None:
        return 0
    moment, _, request_id = after.partition(":")
    try:
        key = float(moment)
    except ValueError:
        raise HTTPException(422, "after must be what `next` said") from None
    first = bisect_left(candidates, key, key=lambda one: _key(one, backwards=backwards))
    last = bisect_right(candidates, key, key=lambda one: _key(one, backwards=backwards))
    for index in range(first, last):
        if _ledgers(candidates[index]).request_id == request_id:
            return index + 1
    return first


# ---- stops -----------------------------------------------------------------------------------------------------


def _add_stops(app: FastAPI, view: View) -> None:
    @app.get("/stops", tags=["stops"], responses=_PROBLEMS)
    async def stops(semantics: Semantics | None = None, limit: Limit = 50) -> StopPage:
        """Stops in progress, oldest first, and those that ended lately, newest first."""

        def wanted(ledgers: RequestLedgers) -> bool:
            stop = ledgers.stop
            return stop is not None and answers.is_stop(stop) and semantics in (None, stop.semantics)

        running = [tracked for tracked in view.open_requests() if wanted(tracked.ledgers)]
        running.sort(key=lambda tracked: tracked.ledgers.stop.observed_at if tracked.ledgers.stop else 0.0)
        ended: list[RequestLine] = []
        for ledgers in reversed(view.closed_requests()):
            if len(ended) == limit:
                break
            if wanted(ledgers):
                ended.append(answers.line(view, ledgers))
        return StopPage(
            in_progress=[answers.line(view, tracked) for tracked in running[:limit]],
            ended=ended,
            in_progress_total=len(running),
        )

    @app.post("/stops", tags=["stops"], status_code=202, responses={**_PROBLEMS, 200: {"model": StopReport}})
    async def stop(order: StopOrder, response: Response) -> StopReport:
        """Stop requests, whoever made them. 202 while stops are under way, 200 when nothing is left to do.

        The clients that are still connected get a terminal event that says so.
        """
        taken = await view.stop(
            StopWanted(
                ids=tuple(order.ids or ()),
                group=order.group or "",
                model=order.model or "",
                engine=order.engine or "",
                everything=bool(order.all),
                reason=order.reason,
                actor="the admin API",
            )
        )
        settled = await _wait_settled(view, taken, order.wait_seconds)
        if settled:
            response.status_code = 200
        results = [one.result for one in taken]
        return StopReport(
            stopping=results.count("stopping"),
            already=results.count("already"),
            unknown=results.count("unknown"),
            settled=settled,
            stops=[_result(view, one) for one in taken[:_REPORTED_MAX]],
        )


async def _wait_settled(view: View, taken: Sequence[StopTaken], seconds: float) -> bool:
    """Wait until none of them is open any more; whether that is so. Looking costs a dictionary's lookup each."""
    pending = [one.request_id for one in taken if one.result != "unknown"]
    due_at = view.now() + seconds
    while True:
        pending = [request_id for request_id in pending if view.find_open(request_id) is not None]
        if not pending or view.now() >= due_at:
            return not pending
        await asyncio.sleep(_POLL_SECONDS)


def _result(view: View, one: StopTaken) -> StopResult:
    tracked = view.find_open(one.request_id)
    ledgers = tracked.ledgers if tracked is not None else view.find_closed(one.request_id)
    stop = ledgers.stop if ledgers is not None else None
    return StopResult(
        id=one.request_id,
        result=one.result,
        state=answers.state_of(ledgers) if ledgers is not None else None,
        outcome=stop.outcome if stop is not None else None,
        evidence=stop.evidence.label if stop is not None else None,
    )


# ---- leaks, engines, books -------------------------------------------------------------------------------------


def _add_books(app: FastAPI, view: View) -> None:
    @app.get("/leaks", tags=["books"], responses=_PROBLEMS)
    async def leaks(engine: Name = None, limit: Limit = 50) -> LeakPage:
        """What was due and did not come, newest first. A leak stays a fact when it closes late."""
        now, wall_zero, counts = view.now(), view.wall(0.0), view.statistics()
        found = [leak for leak in reversed(view.leaks()) if engine in (None, leak.engine)][:limit]
        lines = []
        for leak in found:
            tracked = view.find_open(leak.request_id)
            still_open = tracked is not None and bool(tracked.ledgers.balances[leak.account])
            lines.append(answers.leak_line(leak, wall_zero=wall_zero, now=now, still_open=still_open))
        return LeakPage(leaks=lines, found_total=counts.leaks_found, open_total=counts.overdue_requests)

    @app.get("/engines", tags=["books"], responses=_PROBLEMS)
    async def engines() -> EnginePage:
        """Each engine: its health, what is in it, what it can prove, and whether its gauges agree with the books."""
        now, compared = view.now(), view.reconciliations()
        return EnginePage(
            engines=[
                answers.engine_line(facts, compared.get(facts.name), view.persistent(facts.name), now)
                for facts in view.engines()
            ]
        )

    @app.get("/books", tags=["books"], responses=_PROBLEMS)
    async def books() -> BooksPage:
        """The book of all requests: counts, balances, anomalies, reconciliation, the journal."""
        return answers.books_page(view)
