"""A headless Chromium for the tests of this folder. Without one they fail in continuous integration, else are skipped.

The flags switch off everything with which a browser speaks to others by itself. The browser lives as long as a module:
its driver keeps an event loop in this thread, which other tests must not find there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.dashboards.tools import missing, needs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright is not installed: pip install playwright")
    program = needs("chromium", "chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS, headless=True)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address in a context of its own. The test fails when a page raised an error or asked elsewhere."""
    contexts, wrong, asked = [], [], []

    def open_address(address: str, **options: Any) -> Page:
        context = chromium.new_context(**{"viewport": {"width": 1360, "height": 980}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: wrong.append(f"page error: {error}"))
        page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))

        def requested(request: Any) -> None:
            if not request.url.startswith((address.rstrip("/") + "/", "data:")):
                asked.append(request)

        page.on("request", requested)
        page.goto(address + "/")
        return page

    yield open_address
    # What the page's own policy kept back was not asked.
    wrong += [f"asked elsewhere: {one.url} ({one.failure})" for one in asked if one.failure != "csp"]
    for context in contexts:
        context.close()
    assert wrong == []
