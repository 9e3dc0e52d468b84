"""Who is answered: with the token, anybody who has it; without one, programs of this machine and no web page."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from stopguard.admin import create_app
from tests.unit.admin.fake_view import FakeView

pytestmark = pytest.mark.anyio

TOKEN = "correct-horse-battery"


async def call(token: str | None, path: str = "/books", method: str = "GET", **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(FakeView(), token=token))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9090") as client:
        return await client.request(method, path, **options)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
        (f"Bearer  {TOKEN} ", 200),
        (None, 401),
        ("", 401),
        (TOKEN, 401),
        (f"Basic {TOKEN}", 401),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        ("Bearer", 401),
        ("Bearer \xff", 401),
    ],
)
async def test_only_the_token_opens(authorization: str | None, status: int) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    response = await call(TOKEN, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in response.text


@pytest.mark.parametrize(
    "path", ["/requests", "/requests/x", "/stops", "/leaks", "/engines", "/books", "/openapi.json"]
)
async def test_every_route_but_the_probes_needs_it(path: str) -> None:
    assert (await call(TOKEN, path)).status_code == 401
    assert (await call(TOKEN, "/stops", "POST", json={"all": True})).status_code == 401


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_need_no_token_from_anywhere(path: str) -> None:
    assert (await call(TOKEN, path)).status_code == 200
    assert (await call(None, path, headers={"host": "10.0.0.7:9090"})).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9090", 200),
        ("localhost:9090", 200),
        ("localhost", 200),
        ("[::1]:9090", 200),
        ("127.0.0.1", 200),
        ("evil.example", 403),
        ("evil.example:9090", 403),
        ("127.0.0.1.evil.example:9090", 403),
        ("10.0.0.7:9090", 403),
        ("", 403),
    ],
)
async def test_without_a_token_only_this_machine_by_its_own_name(host: str, status: int) -> None:
    assert (await call(None, headers={"host": host})).status_code == status


@pytest.mark.parametrize(
    ("site", "status"), [("none", 200), ("same-origin", 200), ("cross-site", 403), ("same-site", 403)]
)
async def test_a_page_of_another_site_is_refused(site: str, status: int) -> None:
    assert (await call(None, headers={"sec-fetch-site": site})).status_code == status


async def test_an_order_must_say_that_it_is_json() -> None:
    body = b'{"all": true}'
    for kind, status in (("application/json", 200), ("text/plain", 422), ("application/x-www-form-urlencoded", 422)):
        response = await call(None, "/stops", "POST", content=body, headers={"content-type": kind})
        assert response.status_code == status, kind


@pytest.mark.parametrize(
    "headers",
    [{"content-length": str(1024 * 1024)}, {"content-length": "x"}, {"transfer-encoding": "chunked"}],
)
async def test_a_body_has_a_length_and_a_limit(headers: dict[str, str]) -> None:
    response = await call(None, "/stops", "POST", content=b"{}", headers=headers)
    assert response.status_code == 413


async def test_nothing_is_cached_or_guessed() -> None:
    for response in (await call(None), await call(TOKEN)):
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-content-type-options"] == "nosniff"
