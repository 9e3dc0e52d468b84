"""The live page's data: one moment of the books, bounded; the stream of such moments; and what the page may do."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from stopguard.admin import LifeSigns, create_app
from stopguard.admin.page import content_security_policy, page_text
from stopguard.admin.page_feed import WATCHERS_MAX, EventStream, Feed
from stopguard.admin.page_overview import LEAKS_MAX, STOPS_MAX, overview, stage_of
from stopguard.errors import BookkeepingError
from stopguard.ledger import Account, Evidence
from stopguard.stops import CLOSE_CONNECTION, AbortAnswer, EngineProfile
from tests.unit.admin.fake_view import FakeView, facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopguard.admin.page_models import Overview
    from stopguard.stops import Tracked

pytestmark = pytest.mark.anyio

PROVES = EngineProfile(name="gpu0", doors=(CLOSE_CONNECTION,), best_evidence=Evidence.PROBE)


@pytest.fixture
def view() -> FakeView:
    made = FakeView()
    made.facts = [facts("gpu0"), facts("gpu1", healthy=False)]
    return made


@pytest.fixture
def get(view: FakeView) -> Callable[..., Any]:
    async def call(path: str, *, token: str | None = None, method: str = "GET", **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(view, token=token))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9090") as client:
            return await client.request(method, path, **options)

    return call


def stopped(view: FakeView, number: int, *, knocked: bool = True) -> Tracked:
    """A request whose client left; with `knocked` the abort is out."""
    tracked = view.run(number, profile=PROVES)
    view.controller.client_left(tracked, view.at, "eof")
    if knocked:
        view.controller.abort_answered(tracked, view.at, "close", AbortAnswer.SENT)
    return tracked


def settled(view: FakeView, number: int, seconds: float) -> None:
    """A stop that settles after so many seconds."""
    tracked = stopped(view, number)
    view.at += seconds
    view.controller.acknowledged(tracked, view.at, Evidence.PROBE)
    assert view.find_open(tracked.request_id) is None


# ---- one moment --------------------------------------------------------------------------------------------


def test_an_idle_gateway_has_nothing_to_show_and_invents_nothing(view: FakeView) -> None:
    now = overview(view)
    assert (now.open_requests, now.stops_total, now.states, now.requests, now.ended, now.leaks) == (
        0,
        0,
        {},
        [],
        [],
        [],
    )
    assert [(one.name, one.healthy) for one in now.engines] == [("gpu0", True), ("gpu1", False)]
    assert (now.engines[0].kv_used, now.engines[0].settle_p50_seconds) == (None, None)
    assert all((step.stops, step.p50_seconds) == (0, None) for step in now.steps)


def test_requests_are_counted_by_state_and_by_engine(view: FakeView) -> None:
    view.admit(1)
    view.run(2)
    view.run(3)
    stopped(view, 4)
    now = overview(view)
    assert now.states == {"queued": 1, "running": 2, "stopping": 1}
    engine = now.engines[0]
    assert (engine.queued + engine.running, engine.stopping) == (3, 1)
    assert (now.engines[1].running, now.engines[1].stopping) == (0, 0)
    assert [row.id[-1] for row in now.requests] == ["1", "2", "3", "4"]


def test_stops_in_progress_come_oldest_stop_first_whenever_they_were_opened(view: FakeView) -> None:
    first, second = view.run(1, profile=PROVES), view.run(2, profile=PROVES)
    view.at = 1.0
    view.controller.client_left(second, view.at, "eof")
    view.at = 2.0
    view.controller.client_left(first, view.at, "eof")
    view.at = 3.0
    now = overview(view)
    assert [one.request.id for one in now.stops] == [second.request_id, first.request_id]
    assert now.stops[0].request.stop is not None
    assert now.stops[0].request.stop.age_seconds == 2.0


def test_the_stage_is_the_first_step_that_is_missing(view: FakeView) -> None:
    tracked = stopped(view, 1)
    assert stage_of(tracked.ledgers) == "ack"
    unheard = view.run(2)
    assert stage_of(unheard.ledgers) == "notify"
    balances = tracked.ledgers.balances
    balances[Account.LINK_AWAITING] = 0
    balances[Account.OUTPUT_IN_FLIGHT] = 1
    assert stage_of(tracked.ledgers) == "in-flight output"
    balances[Account.OUTPUT_IN_FLIGHT] = 0
    assert stage_of(tracked.ledgers) == "release"
    for account in Account:
        balances[account] = 0
    assert stage_of(tracked.ledgers) == "settle"


def test_times_and_points_are_those_of_the_books(view: FakeView) -> None:
    for number, seconds in enumerate((0.01, 0.02, 0.03), start=1):
        settled(view, number, seconds)
    view.finish(view.run(9))  # the model's own end is no stop
    view.at += 10.0
    now = overview(view)
    settle = {step.name: step for step in now.steps}["settle"]
    assert (settle.stops, settle.p50_seconds, settle.p99_seconds) == (3, 0.02, 0.03)
    assert [point.settle for point in now.points] == [0.03, 0.02, 0.01]
    assert [point.semantics for point in now.points] == ["cancel"] * 3
    assert [point.ago_seconds for point in now.points] == [10.0, 10.03, 10.05]
    assert (now.engines[0].settle_p50_seconds, now.engines[1].settle_p50_seconds) == (0.02, None)
    view.at += 120.0
    assert overview(view).points == []


def test_a_stop_that_never_settled_has_no_time_at_all(view: FakeView) -> None:
    tracked = stopped(view, 1)
    view.at = 30.0
    view.controller.advance(view.at)
    view.book.write_off(tracked.ledgers, view.at, "given up")
    now = overview(view)
    assert {step.name: step.stops for step in now.steps}["settle"] == 0
    assert [point.settle for point in now.points] == [None]
    assert now.written_off == 1


def test_the_rate_is_of_the_last_minute_and_no_guess_from_the_first_seconds(view: FakeView) -> None:
    view.at = 1.0
    settled(view, 1, 0.5)
    assert overview(view).stops_per_minute == 6.0  # as if over ten seconds, not 40 a minute
    view.at = 300.0
    assert overview(view).stops_per_minute == 0.0
    for number in range(2, 32):
        settled(view, number, 0.01)
    assert overview(view).stops_per_minute == 30.0
    assert overview(view).engines[0].stops_per_minute == 30.0


def test_leaks_that_are_open_come_first_and_one_that_closed_late_stays(view: FakeView) -> None:
    healed, leaking = stopped(view, 1), stopped(view, 2)
    view.at = 30.0
    view.controller.advance(view.at)
    view.controller.acknowledged(healed, view.at, Evidence.PROBE)
    now = overview(view)
    assert now.leaks
    assert [leak.open for leak in now.leaks] == sorted((leak.open for leak in now.leaks), reverse=True)
    assert {leak.id for leak in now.leaks if leak.open} == {leaking.request_id}
    assert healed.request_id in {leak.id for leak in now.leaks if not leak.open}
    assert (now.overdue_requests, now.engines[0].leaks_open) == (1, 1)
    assert now.engines[0].leaks_found == now.leaks_found


def test_kv_use_is_the_engines_own_word(view: FakeView) -> None:
    view.facts = [facts("gpu0", blocks_used=30, blocks_total=400), facts("gpu1", blocks_used=3, blocks_total=0)]
    assert [one.kv_used for one in overview(view).engines] == [0.075, None]


def test_every_list_is_cut(view: FakeView) -> None:
    for number in range(300):
        stopped(view, number)
    view.at = 30.0
    view.controller.advance(view.at)
    for number in range(300, 600):
        settled(view, number, 0.001)
    now = overview(view)
    assert (len(now.requests), len(now.ended), len(now.points)) == (100, 20, 200)
    assert (len(now.stops), now.stops_total) == (STOPS_MAX, 300)
    assert len(now.leaks) == LEAKS_MAX
    assert now.states == {"overdue": 300}
    assert now.ended[0].id == f"sg-{599:032x}"
    less = overview(view, requests_max=3, ended_max=0, points_max=1)
    assert (len(less.requests), len(less.ended), len(less.points)) == (3, 0, 1)


async def test_the_overview_is_a_route_with_limits(view: FakeView, get: Callable[..., Any]) -> None:
    view.run(1)
    assert (await get("/overview")).json()["requests"] == []
    assert len((await get("/overview?requests=1")).json()["requests"]) == 1
    assert (await get("/overview?requests=101")).status_code == 422


# ---- the stream --------------------------------------------------------------------------------------------


async def test_events_follow_the_books_and_end_with_the_shutdown(view: FakeView) -> None:
    feed = Feed(view, turn_seconds=0.0)
    seen = []
    async for event in feed.events():
        assert event.startswith(b"event: overview\ndata: {")
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 3
        seen.append(json.loads(event.split(b"data: ", 1)[1])["open_requests"])
        if len(seen) == 1:
            view.run(1)
        elif len(seen) == 2:
            view.life = LifeSigns(version="0", started_at=0.0, draining=True, reasons=("it is shutting down",))
        elif len(seen) == 3:
            view.finish(view.open_requests()[0])
        assert len(seen) < 10
    assert seen == [0, 1, 1, 0]


async def test_many_readers_cost_one_making_a_turn(view: FakeView, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(seen: FakeView) -> Overview:
        made.append(1)
        return overview(seen)

    monkeypatch.setattr("stopguard.admin.page_feed.overview", counted)
    feed = Feed(view, turn_seconds=3600.0)
    assert len({feed.current() for _ in range(100)}) == 1
    assert len(made) == 1
    feed.forget()  # the last one has left: the next must not see an old moment
    feed.current()
    assert len(made) == 2


async def test_a_stream_takes_a_place_and_gives_it_back_however_it_ends(view: FakeView) -> None:
    feed = Feed(view)
    gone = asyncio.Event()
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            assert feed.watchers == 1
            gone.set()

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "path": "/events", "headers": []}
    await EventStream(feed)(scope, receive, send)
    assert sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in sent[0]["headers"]
    assert feed.watchers == 0


async def test_one_stream_too_many_is_refused_with_a_word(view: FakeView) -> None:
    feed = Feed(view)
    feed.watchers = WATCHERS_MAX
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await EventStream(feed)({"type": "http", "method": "GET", "headers": []}, receive, send)
    assert sent[0]["status"] == 503
    assert b"live pages are open already" in sent[1]["body"]
    assert feed.watchers == WATCHERS_MAX


# ---- the page ----------------------------------------------------------------------------------------------


async def test_the_page_may_run_its_own_script_and_nothing_else(get: Callable[..., Any]) -> None:
    response = await get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = response.headers["content-security-policy"]
    assert policy == content_security_policy(response.text)
    assert "'unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert response.headers["x-frame-options"] == "DENY"
    assert (await get("/", method="HEAD")).status_code == 200


def test_the_page_makes_no_markup_and_loads_nothing() -> None:
    text = page_text()
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "cookie"):
        assert banned not in text
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", text) == []
    assert re.findall(r"\son\w+=", text) == []
    assert re.findall(r"""https?://(?!www\.w3\.org/)""", text) == []


def test_a_page_whose_script_cannot_be_hashed_is_an_error() -> None:
    with pytest.raises(BookkeepingError, match="one <script>"):
        content_security_policy("<style></style><script></script><script></script>")


async def test_with_a_token_the_page_is_open_and_its_data_is_not(get: Callable[..., Any]) -> None:
    assert (await get("/", token="secret-token")).status_code == 200
    for path in ("/overview", "/events"):
        assert (await get(path, token="secret-token")).status_code == 401
    headers = {"authorization": "Bearer secret-token"}
    assert (await get("/overview", token="secret-token", headers=headers)).status_code == 200
    assert (await get("/", token="secret-token", method="POST")).status_code == 401


async def test_without_a_token_the_page_is_for_this_machine(get: Callable[..., Any]) -> None:
    assert (await get("/", headers={"host": "rebound.example"})).status_code == 403
