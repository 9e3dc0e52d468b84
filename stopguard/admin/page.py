"""The live page at `/`, its stream of events, and the overview that both the page and `stopguard top` read.

The page is one file without outside parts. What it shows comes from clients (ids, models, groups), so the browser is
told to run nothing but the page's own script, known by its hash, and to load nothing from anywhere
(Content-Security-Policy); the script itself makes text, never markup. The page is static: whoever may read it learns
nothing. It asks for the token where there is one and keeps it for its tab.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Annotated

from fastapi import FastAPI, Query, Response

from stopguard.admin.models import Problem
from stopguard.admin.page_feed import EventStream, Feed
from stopguard.admin.page_models import Overview
from stopguard.admin.page_overview import ENDED_MAX, POINTS_MAX, REQUESTS_MAX, overview
from stopguard.admin.view import View
from stopguard.errors import BookkeepingError

__all__ = ["add_page", "content_security_policy", "page_text"]


def page_text() -> str:
    """The page as it is sent."""
    return resources.files("stopguard.admin").joinpath("page.html").read_text(encoding="utf-8")


def content_security_policy(text: str) -> str:
    """The policy that lets the page's own style and script run, and nothing else."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash_of(text, 'script')}'",
            f"style-src '{_hash_of(text, 'style')}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def add_page(app: FastAPI, view: View) -> None:
    """Add `/`, `/events` and `/overview`."""
    text = page_text()
    page = text.encode()
    headers = {
        "content-security-policy": content_security_policy(text),
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "x-frame-options": "DENY",
    }
    feed = Feed(view)
    problems: dict[int | str, dict[str, object]] = {
        401: {"model": Problem, "description": "The token is missing or wrong."},
        403: {"model": Problem, "description": "Not from this machine, and there is no token."},
    }

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def live_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @app.get(
        "/events",
        tags=["live"],
        response_class=Response,
        responses={
            **problems,
            200: {
                "content": {"text/event-stream": {}},
                "description": "Events called `overview`, each with an Overview as JSON.",
            },
            503: {"model": Problem, "description": "Too many streams are open."},
        },
    )
    async def events() -> Response:
        """The overview about twice a second, as server-sent events, until the caller leaves."""
        return EventStream(feed)

    @app.get("/overview", tags=["live"], responses=problems)
    async def overview_now(
        requests: Annotated[int, Query(ge=0, le=REQUESTS_MAX, description="Open requests at most.")] = 0,
        ended: Annotated[int, Query(ge=0, le=ENDED_MAX, description="Closed requests at most.")] = 0,
        points: Annotated[int, Query(ge=0, le=POINTS_MAX, description="Ended stops at most.")] = 0,
    ) -> Overview:
        """Everything at one moment: engines, stops in progress, times of the steps, leaks."""
        return overview(view, requests_max=requests, ended_max=ended, points_max=points)


def _hash_of(text: str, element: str) -> str:
    """The hash of the page's only element of this name, as a policy names it."""
    found = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    if len(found) != 1:
        raise BookkeepingError(f"the live page must have one <{element}> without attributes, not {len(found)}")
    return "sha256-" + base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
