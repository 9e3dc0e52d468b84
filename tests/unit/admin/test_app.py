"""The admin API over real books in virtual time: what it shows is what the ledgers say, a page at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from stopguard.admin import LifeSigns, View, create_app
from stopguard.errors import StorageError
from stopguard.ledger import Account, Difference, EngineGauges, Evidence, Ledger, reconcile
from stopguard.ledger.journal import JournalStatistics
from stopguard.ledger.journal_errors import AmbiguousId, NotInJournal
from stopguard.ledger.journal_reader import StoredRequest
from stopguard.ledger.journal_recovery import RecoveredBook, RunInfo
from stopguard.stops import CLOSE_CONNECTION, AbortAnswer, EngineProfile, Semantics, Source, StopCause
from tests.unit.admin.fake_view import WALL_ZERO, FakeView, facts

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).resolve().parents[3] / "docs" / "admin.md"
PROVES = EngineProfile(name="gpu0", doors=(CLOSE_CONNECTION,), best_evidence=Evidence.GAUGE)


@pytest.fixture
def view() -> FakeView:
    return FakeView()


@pytest.fixture
def get(view: FakeView) -> Callable[..., Any]:
    """Call the app of `view` as a program on this machine does."""

    async def call(path: str, *, method: str = "GET", status: int = 200, **options: Any) -> Any:
        transport = httpx.ASGITransport(app=create_app(view))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9090") as client:
            response = await client.request(method, path, **options)
        assert response.status_code == status, response.text
        return response.json()

    return call


def test_the_fake_is_a_view(view: FakeView) -> None:
    as_view: View = view
    assert as_view.now() == 0.0


# ---- health ------------------------------------------------------------------------------------------------


async def test_health_is_the_relays_own_answer(view: FakeView, get: Callable[..., Any]) -> None:
    assert await get("/healthz") == {"status": "ok"}
    view.relay = False
    assert await get("/healthz", status=503) == {"status": "stuck"}


async def test_ready_says_why_not(view: FakeView, get: Callable[..., Any]) -> None:
    assert (await get("/readyz"))["ready"] is True
    view.life = LifeSigns(version="0", started_at=0.0, draining=True, reasons=("it is shutting down",))
    assert await get("/readyz", status=503) == {
        "ready": False,
        "draining": True,
        "reasons": ["it is shutting down"],
    }


# ---- requests ------------------------------------------------------------------------------------------------


async def test_a_running_request_is_shown_with_its_open_ledgers(view: FakeView, get: Callable[..., Any]) -> None:
    tracked = view.run(1, group="batch-7")
    view.at = 2.0
    view.controller.output_started(tracked, view.at)
    tracked.events += 3
    (row,) = (await get("/requests"))["requests"]
    assert row["id"] == tracked.request_id
    assert (row["state"], row["place"], row["engine"], row["group"]) == ("running", "running", "gpu0", "batch-7")
    assert row["open"] == ["queue", "kv", "stream"]
    assert (row["age_seconds"], row["tokens_delivered"], row["stop"]) == (2.0, 3, None)
    assert row["opened"] == "2023-11-14T22:13:20Z"


async def test_each_state_is_derived_from_the_books(view: FakeView, get: Callable[..., Any]) -> None:
    view.admit(1)
    view.run(2)
    drained = view.run(3)
    from stopguard.stops import ClientPolicy

    view.controller.client_left(drained, view.at, "eof", ClientPolicy(None))
    stopped = view.run(4, profile=PROVES)
    view.controller.client_left(stopped, view.at, "eof")
    finished = view.run(5)
    view.finish(finished)
    assert {row["id"][-1]: row["state"] for row in (await get("/requests"))["requests"]} == {
        "1": "queued",
        "2": "running",
        "3": "draining",
        "4": "stopping",
    }
    assert [row["state"] for row in (await get("/requests?state=closed"))["requests"]] == ["settled"]
    for state, last in (("queued", "1"), ("draining", "3"), ("stopping", "4"), ("settled", "5")):
        rows = (await get(f"/requests?state={state}"))["requests"]
        assert [row["id"][-1] for row in rows] == [last]


async def test_an_overdue_request_names_its_overdue_ledgers_and_is_a_leak(
    view: FakeView, get: Callable[..., Any]
) -> None:
    tracked = view.run(1, profile=PROVES)
    view.controller.client_left(tracked, view.at, "eof")
    view.at = 30.0
    view.controller.advance(view.at)
    (row,) = (await get("/requests?state=overdue"))["requests"]
    assert set(row["overdue"]) == {"queue", "kv", "link"}
    assert row["stop"]["outcome"] == "unconfirmed"
    page = await get("/leaks")
    assert page["open_total"] == 1
    assert page["found_total"] == len(page["leaks"]) == 3
    leak = next(one for one in page["leaks"] if one["ledger"] == "kv")
    assert (leak["account"], leak["amount"], leak["unit"], leak["open"]) == ("claimed", 1, "claims", True)
    assert leak["overdue_seconds"] == pytest.approx(20.0)


async def test_filters_narrow_the_page(view: FakeView, get: Callable[..., Any]) -> None:
    view.run(1)
    other = view.run(2, profile=EngineProfile(name="gpu1", best_evidence=Evidence.GAUGE), model="small")
    view.controller.client_left(other, view.at, "eof")
    for query in ("engine=gpu1", "model=small", "semantics=cancel", "engine=gpu1&semantics=cancel"):
        assert [row["id"][-1] for row in (await get(f"/requests?{query}"))["requests"]] == ["2"]
    assert (await get("/requests?semantics=fail"))["requests"] == []


async def test_pages_follow_each_other_also_while_requests_end(view: FakeView, get: Callable[..., Any]) -> None:
    requests = []
    for number in range(7):
        view.at = number * 0.5
        requests.append(view.run(number))
    seen: list[str] = []
    page = await get("/requests?limit=3")
    seen += [row["id"] for row in page["requests"]]
    view.finish(requests[2])  # the one that the cursor stands at
    page = await get("/requests", params={"limit": 3, "after": page["next"]})
    seen += [row["id"] for row in page["requests"]]
    page = await get("/requests", params={"limit": 3, "after": page["next"]})
    seen += [row["id"] for row in page["requests"]]
    assert seen == [tracked.request_id for tracked in requests]
    assert page["next"] is None


async def test_requests_of_the_same_moment_are_not_skipped(view: FakeView, get: Callable[..., Any]) -> None:
    requests = [view.run(number) for number in range(5)]
    first = await get("/requests?limit=2")
    second = await get("/requests", params={"limit": 5, "after": first["next"]})
    assert [row["id"] for row in second["requests"]] == [tracked.request_id for tracked in requests[2:]]


async def test_closed_ones_come_newest_first(view: FakeView, get: Callable[..., Any]) -> None:
    for number in range(4):
        view.at = float(number)
        view.finish(view.run(number))
    first = await get("/requests?state=closed&limit=3")
    second = await get("/requests", params={"state": "closed", "after": first["next"]})
    assert [row["id"][-1] for row in first["requests"] + second["requests"]] == ["3", "2", "1", "0"]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=501", "state=odd", "semantics=odd", "after=x", "after=--:x", "engine=" + "x" * 257]
)
async def test_what_makes_no_sense_is_refused(get: Callable[..., Any], query: str) -> None:
    await get(f"/requests?{query}", status=422)


# ---- one request -----------------------------------------------------------------------------------------------


async def test_one_request_has_five_ledgers_a_timeline_and_steps(view: FakeView, get: Callable[..., Any]) -> None:
    tracked = view.run(1, profile=PROVES)
    view.at = 1.0
    view.controller.client_left(tracked, view.at, "reset", occurred_at=0.75)
    view.controller.abort_answered(tracked, view.at, "close", AbortAnswer.SENT)
    page = await get(f"/requests/{tracked.request_id}")
    assert page["source"] == "open"
    assert [ledger["name"] for ledger in page["ledgers"]] == ["queue", "kv", "output", "link", "stream"]
    by_name = {ledger["name"]: ledger for ledger in page["ledgers"]}
    assert (by_name["stream"]["closed"], by_name["kv"]["closed"]) == (True, False)
    (due,) = by_name["link"]["due"]
    assert (due["account"], due["amount"], due["overdue"]) == ("awaiting", 1, False)
    assert due["due_in_seconds"] == pytest.approx(10.0)
    assert page["request"]["stop"]["detection_seconds"] == pytest.approx(0.25)
    assert [step["name"] for step in page["steps"]] == ["notify", "in-flight output", "release", "settle"]
    assert page["verdict"]["word"] == "OPEN"
    assert page["timeline_total"] == len(page["timeline"])
    assert any(row["what"].startswith("knock 1 at door close") for row in page["timeline"])


async def test_a_settled_request_has_nothing_due(view: FakeView, get: Callable[..., Any]) -> None:
    tracked = view.run(1, profile=PROVES)
    view.controller.client_left(tracked, view.at, "eof")
    view.at = 0.5
    view.controller.acknowledged(tracked, view.at, Evidence.GAUGE)
    page = await get(f"/requests/{tracked.request_id}")
    assert (page["source"], page["request"]["state"]) == ("recent", "settled")
    assert all(ledger["closed"] and not ledger["due"] for ledger in page["ledgers"])
    assert page["verdict"] == {"word": "SETTLED", "text": page["verdict"]["text"], "good": True}


async def test_the_timeline_is_cut_to_its_newest_rows(view: FakeView, get: Callable[..., Any]) -> None:
    tracked = view.run(1)
    for number in range(50):
        tracked.ledgers.mark(1.0 + number, f"mark {number}")
    page = await get(f"/requests/{tracked.request_id}?rows=3")
    assert [row["what"] for row in page["timeline"]] == ["mark 47", "mark 48", "mark 49"]
    assert page["timeline_total"] > 50


async def test_a_request_that_only_the_journal_has(view: FakeView, get: Callable[..., Any]) -> None:
    ended = FakeView()
    tracked = ended.run(9, profile=PROVES)
    ended.controller.client_left(tracked, 0.0, "eof")
    run = RunInfo(
        run=1,
        run_id="r",
        pid=1,
        version="0",
        policy="stops",
        flush_seconds=0.25,
        wall_anchor=WALL_ZERO - 3600.0,
        monotonic_anchor=0.0,
        started_at=WALL_ZERO - 3600.0,
        last_flush_at=WALL_ZERO - 3500.0,
        closed_at=None,
        failing_since=None,
        written=1,
        dropped=0,
    )
    view.stored["sg-0"] = StoredRequest(
        record=tracked.ledgers.record(), run=run, state="abandoned", kind="cancel", written_at=WALL_ZERO - 3500.0
    )
    page = await get("/requests/sg-0")
    assert page["source"] == "journal"
    assert page["request"]["opened"] == "2023-11-14T21:13:20Z"
    assert page["verdict"]["good"] is False
    by_name = {ledger["name"]: ledger for ledger in page["ledgers"]}
    assert by_name["link"]["due"][0]["due_in_seconds"] == pytest.approx(10.0 - 3600.0)


async def test_what_nobody_knows_is_404_and_what_is_ambiguous_409(view: FakeView, get: Callable[..., Any]) -> None:
    assert "is not here" in (await get("/requests/sg-unknown", status=404))["detail"]
    view.stored_error = NotInJournal("no request in x begins with sg-unknown")
    await get("/requests/sg-unknown", status=404)
    view.stored_error = AmbiguousId("several requests begin with sg-: a, b")
    await get("/requests/sg-", status=409)
    view.stored_error = StorageError("x: the disk is full")
    assert (await get("/requests/sg-", status=500))["detail"] == "x: the disk is full"


# ---- stops -----------------------------------------------------------------------------------------------------


async def test_stops_in_progress_come_oldest_first_and_ended_ones_newest_first(
    view: FakeView, get: Callable[..., Any]
) -> None:
    for number, at in ((1, 3.0), (2, 1.0)):
        view.at = 0.0
        tracked = view.run(number, profile=PROVES)
        view.at = at
        view.controller.client_left(tracked, at, "eof")
    for number in (3, 4):
        view.at += 1.0
        tracked = view.run(number, profile=PROVES)
        view.controller.client_left(tracked, view.at, "eof")
        view.controller.acknowledged(tracked, view.at, Evidence.GAUGE)
    view.finish(view.run(5))
    page = await get("/stops")
    assert [row["id"][-1] for row in page["in_progress"]] == ["2", "1"]
    assert [row["id"][-1] for row in page["ended"]] == ["4", "3"]
    assert page["in_progress_total"] == 2
    assert (await get("/stops?semantics=fail"))["in_progress"] == []


async def test_an_order_is_carried_out_and_reported(view: FakeView, get: Callable[..., Any]) -> None:
    running = view.run(1, profile=PROVES)
    done = view.run(2)
    view.finish(done)
    order = {"ids": [running.request_id, done.request_id, "sg-unknown"], "reason": "runaway"}
    report = await get("/stops", method="POST", json=order, status=202)
    assert (report["stopping"], report["already"], report["unknown"], report["settled"]) == (1, 1, 1, False)
    assert [(one["result"], one["state"], one["outcome"]) for one in report["stops"]] == [
        ("stopping", "stopping", "pending"),
        ("already", "settled", None),
        ("unknown", None, None),
    ]
    assert running.cause == StopCause(
        semantics=Semantics.CANCEL, source=Source.API, reason="runaway", observed_at=0.0, actor="the admin API"
    )


async def test_an_order_that_is_settled_at_once_says_so(view: FakeView, get: Callable[..., Any]) -> None:
    waiting = view.admit(1)
    report = await get("/stops", method="POST", json={"ids": [waiting.request_id]}, status=202)
    assert report["settled"] is False  # its client has not been told yet
    view.controller.client_told(waiting, view.at)
    report = await get("/stops", method="POST", json={"ids": [waiting.request_id]})
    assert (report["already"], report["settled"]) == (1, True)


@pytest.mark.parametrize("selector", [{"group": "g"}, {"model": "m"}, {"engine": "e"}, {"all": True}])
async def test_every_selector_reaches_the_view(
    view: FakeView, get: Callable[..., Any], selector: dict[str, Any]
) -> None:
    await get("/stops", method="POST", json=selector)
    (wanted,) = view.orders
    assert (wanted.group, wanted.model, wanted.engine, wanted.everything) == (
        selector.get("group", ""),
        selector.get("model", ""),
        selector.get("engine", ""),
        selector.get("all", False),
    )


@pytest.mark.parametrize(
    "order",
    [
        {},
        {"ids": []},
        {"ids": ["a"], "all": True},
        {"all": False},
        {"ids": ["x"] * 1001},
        {"ids": ["x" * 129]},
        {"all": True, "reason": "line\nbreak"},
        {"all": True, "wait_seconds": 61},
        {"all": True, "everything": 1},
        {"all": "yes"},
    ],
)
async def test_an_order_that_is_not_clear_stops_nothing(
    view: FakeView, get: Callable[..., Any], order: dict[str, Any]
) -> None:
    view.run(1)
    await get("/stops", method="POST", json=order, status=422)
    assert view.orders == []


async def test_another_class_for_whoever_made_it(view: FakeView, get: Callable[..., Any]) -> None:
    running = view.run(1)
    path = f"/requests/{running.request_id}/class"
    report = await get(path, method="POST", json={"class": "urgent"})
    assert report == {"id": running.request_id, "class": "urgent", "changed": True}
    problem = await get(path, method="POST", json={"class": "princely"}, status=400)
    assert "there are: standard, urgent" in problem["detail"]
    await get("/requests/nobody/class", method="POST", json={"class": "urgent"}, status=404)
    await get(path, method="POST", json={"priority_class": "urgent"}, status=422)


# ---- engines and books -------------------------------------------------------------------------------------------


async def test_engines_show_where_the_books_and_the_gauges_differ(view: FakeView, get: Callable[..., Any]) -> None:
    view.run(1)
    view.facts = [facts(in_engine=1), facts("gpu1", healthy=False)]
    view.at = 5.0
    view.compared["gpu0"] = reconcile(
        [tracked.ledgers for tracked in view.open_requests()], EngineGauges(at=4.0, running=3, waiting=0)
    )
    view.lasting = [Difference(ledger=Ledger.QUEUE, unit="places", expected=1, reported=3, orphans=2)]
    first, second = (await get("/engines"))["engines"]
    assert (first["name"], first["compared_seconds_ago"]) == ("gpu0", 1.0)
    queue = next(one for one in first["differences"] if one["unit"] == "places")
    assert queue == {
        "ledger": "queue",
        "unit": "places",
        "expected": 1,
        "reported": 3,
        "orphans": 2,
        "phantoms": 0,
        "persistent": True,
    }
    assert (second["healthy"], second["differences"]) == (False, [])


async def test_the_books_page_is_the_book(view: FakeView, get: Callable[..., Any]) -> None:
    view.run(1)
    view.finish(view.run(2))
    view.controller.anomalies.record(1.5, "sg-x", "a second release")
    view.controller.anomalies.late_events["token"] += 2
    view.journal_now = JournalStatistics(
        queued=1,
        backlog=0,
        written=3,
        leaks_written=0,
        open_books=1,
        flushes=4,
        dropped={},
        last_flush_at=None,
        failing="x: the disk is full",
        failing_since=1.0,
        file_bytes=4096,
    )
    view.left_open = [RecoveredBook(request_id="sg-old", run=1, kind="cancel", written_at=WALL_ZERO)]
    page = await get("/books")
    counts = view.book.statistics()
    assert (page["open_requests"], page["opened"], page["settled"]) == (
        counts.open_requests,
        counts.opened,
        counts.settled,
    )
    assert page["open_ledgers"] == {ledger.label: count for ledger, count in counts.open_ledgers.items()}
    (total,) = [line for line in page["totals"] if line["engine"] == "gpu0"]
    assert total["balances"]["queue.gone"] == view.book.total(Account.QUEUE_GONE) == 1
    assert (page["book_errors"], page["late_events"]) == (1, {"token": 2})
    assert page["anomalies"] == [{"time": "2023-11-14T22:13:21.500000Z", "id": "sg-x", "text": "a second release"}]
    assert page["journal"]["failing"] == "x: the disk is full"
    assert (page["recovered_total"], page["recovered"][0]["id"]) == (1, "sg-old")


async def test_the_openapi_document_has_every_route_and_no_page_from_elsewhere(get: Callable[..., Any]) -> None:
    document = await get("/openapi.json")
    assert set(document["paths"]) == {
        *(
            "/healthz",
            "/readyz",
            "/requests",
            "/requests/{request_id}",
            "/requests/{request_id}/class",
            "/stops",
            "/leaks",
            "/engines",
            "/books",
        ),
        *("/events", "/overview"),
    }
    assert {"ids", "group", "model", "engine", "all"} <= set(
        document["components"]["schemas"]["StopOrder"]["properties"]
    )
    assert len(document["components"]["schemas"]["StopOrder"]["examples"]) == 5
    await get("/docs", status=404)


async def test_the_page_of_the_docs_has_every_route(get: Callable[..., Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    written = set(re.findall(r"^\| `(GET|POST) (/[^`]*)`", page, re.MULTILINE))
    document = await get("/openapi.json")
    there = {
        (method.upper(), path.replace("{request_id}", "{id}"))
        for path, item in document["paths"].items()
        for method in item
    }
    assert written == there | {("GET", "/openapi.json")}
