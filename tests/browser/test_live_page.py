"""The live page in a real browser, over a real gateway and a reference engine."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.rig import Client, Rig, rig

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Open = Callable[..., "Page"]
TOKEN = "correct-horse-battery"
EVIL = "<img src=x onerror=pwned=1>"
EVIL_GROUP = "<svg/onload=pwned=1><script>pwned=1</script>"
LONG = 3000
"""Tokens of a stream that certainly still runs when it is looked at."""


@pytest.fixture(scope="module")
def healthy() -> Iterator[Rig]:
    with rig(step_seconds=0.02) as running:
        yield running


@pytest.fixture
def client(healthy: Rig) -> Iterator[Client]:
    with Client(healthy.url, tokens=LONG, group="batch-7") as made:
        yield made


def row(page: Page, request_id: str, section: str = "requests") -> Any:
    """The row of a request in a section's table."""
    return page.locator(f"#{section} tbody tr").filter(has=page.locator(f'[title="{request_id}"]'))


def cancel(page: Page, request_id: str) -> None:
    """Press its button, and press again to make sure."""
    button = row(page, request_id).locator(".cancel")
    button.click()
    assert button.text_content() == "Sure?"
    assert button.get_attribute("aria-label") == f"Sure? Press again to cancel {request_id}"
    button.click()


def token_field(page: Page) -> Any:
    return page.get_by_role("textbox", name="Admin token")


def expect_text(locator: Any, pattern: str, seconds: float = 15.0) -> str:
    """Wait until the text of `locator` has `pattern` in it."""
    due_at = time.monotonic() + seconds
    text = ""
    while time.monotonic() < due_at:
        if locator.count():
            text = locator.first.inner_text()
            if re.search(pattern, text):
                return str(text)
        locator.page.wait_for_timeout(50)
    raise AssertionError(f"{pattern!r} did not appear in {text!r}")


# ---- what it shows -----------------------------------------------------------------------------------------


def test_a_request_appears_with_its_ledgers_and_goes_on(open_page: Open, healthy: Rig, client: Client) -> None:
    page = open_page(healthy.admin)
    expect_text(page.locator("#link"), "^live$")
    mine = row(page, client.id)
    text = expect_text(mine, "running")
    assert "gpu0" in text
    assert "batch-7" in text
    assert mine.locator(".marks").get_attribute("aria-label") == (
        "queue open, kv open, output closed, link closed, stream open"
    )
    tokens = int(mine.locator("td").nth(5).inner_text().split()[0])
    page.wait_for_timeout(1500)
    assert int(mine.locator("td").nth(5).inner_text().split()[0]) > tokens
    assert page.locator("#engines tbody tr").count() == 1
    assert page.locator("#leaks").is_hidden()


def test_the_cancel_button_shows_the_ack_arriving(open_page: Open, healthy: Rig, client: Client) -> None:
    page = open_page(healthy.admin)
    cancel(page, client.id)
    order = page.locator(f'.order[data-id="{client.id}"]')
    said = expect_text(order, "settled")
    assert re.search(r"abort sent .* → ack by probe .* → released .* → settled .* · confirmed", said)
    assert "good" in (order.get_attribute("class") or "")
    assert order.locator(".marks").get_attribute("aria-label") == (
        "queue closed, kv closed, output closed, link closed, stream closed"
    )
    # The client was told, and its stream is over: the button did something.
    rest = client.response.read().decode()
    assert '"finish_reason":"abort"' in rest
    expect_text(row(page, client.id), "settled")
    assert row(page, client.id).locator(".cancel").is_hidden()
    order.get_by_role("button", name="Dismiss").click()
    assert page.locator(".order").count() == 0


def test_one_press_cancels_nothing(open_page: Open, healthy: Rig, client: Client) -> None:
    page = open_page(healthy.admin)
    button = row(page, client.id).locator(".cancel")
    button.click()
    expect_text(button, "^Cancel$", 8.0)  # it asks for four seconds
    assert page.locator(".order").count() == 0
    assert healthy.gateway is not None
    assert client.id in healthy.gateway.controller.tracked


def test_a_click_opens_the_timeline_and_escape_closes_it(open_page: Open, healthy: Rig, client: Client) -> None:
    page = open_page(healthy.admin)
    row(page, client.id).get_by_role("button", name=f"Open {client.id}").click()
    detail = page.locator("#detail")
    text = expect_text(detail, "arrivals → admission")
    assert "OPEN" in text
    assert "batch-7" in text
    assert page.url.endswith(f"#{client.id}")
    # Cancelled from here, its steps fill in while one looks on.
    button = detail.locator("#detail-cancel")
    button.click()
    button.click()
    expect_text(detail.locator(".verdict"), "SETTLED.*cancel confirmed")
    assert [name.inner_text() for name in detail.locator(".steps tbody th").all()] == [
        *("notify", "ack", "in-flight output", "release", "settle")
    ]
    page.keyboard.press("Escape")
    assert detail.is_hidden()
    page.wait_for_function("() => !location.href.includes('#')")


def test_it_works_by_keyboard_alone(open_page: Open, healthy: Rig, client: Client) -> None:
    page = open_page(healthy.admin)
    button = row(page, client.id).locator(".cancel")
    button.wait_for()
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == f"Cancel {client.id}":
            break
    else:
        raise AssertionError("the button cannot be reached with Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect_text(page.locator(".order"), "settled .* confirmed")
    # The focus is not lost with the button: it is on the request's id.
    page.wait_for_function("id => document.activeElement.title === id", arg=client.id)


def test_a_request_is_found_by_its_id(open_page: Open, healthy: Rig, client: Client) -> None:
    page = open_page(healthy.admin)
    page.get_by_label("Find a request by its id").fill("sg-nobody")
    page.keyboard.press("Enter")
    expect_text(page.locator("#detail-body"), "sg-nobody is not here")
    page.locator("#detail-close").click()
    page.get_by_label("Find a request by its id").fill(client.id)
    page.keyboard.press("Enter")
    expect_text(page.locator("#detail-body"), "OPEN")


def test_the_next_request_opens_while_the_last_one_closes(open_page: Open, healthy: Rig, client: Client) -> None:
    page = open_page(healthy.admin)
    row(page, client.id).get_by_role("button", name=f"Open {client.id}").click()
    expect_text(page.locator("#detail-body"), "OPEN")
    # The dialog says `close` a task later: it must not take back the address that was asked for since.
    page.evaluate("() => { document.getElementById('detail').close(); location.hash = 'sg-another'; }")
    expect_text(page.locator("#detail-body"), "sg-another is not here")
    page.evaluate("() => { location.hash = ''; }")
    page.wait_for_function("() => !document.getElementById('detail').open")


def test_leaks_stand_in_front(open_page: Open) -> None:
    with (
        rig(faults=("blocks-leaked-on-abort",), settle_seconds=0.3) as running,
        Client(running.url, tokens=LONG) as client,
    ):
        page = open_page(running.admin)
        row(page, client.id).wait_for()
        assert page.locator("#leaks").is_hidden()
        client.leave()
        expect_text(page.locator("#leaks"), r"\d leaks? found, 1 request leaking now")
        text = expect_text(row(page, client.id, "leaks"), r"kv\.held \d+ blocks?")
        assert "open" in text
        assert page.title() == "(1 leaking) StopGuard"
        stop = expect_text(row(page, client.id, "stopping"), "overdue")
        assert re.search(r"cancel · client (eof|reset)", stop)
        row(page, client.id, "leaks").get_by_role("button").click()
        expect_text(page.locator("#detail .verdict"), "LEAK")
        box, requests = page.locator("#leaks").bounding_box(), page.locator("#requests").bounding_box()
        assert box is not None
        assert requests is not None
        assert box["y"] < requests["y"]


def test_the_plots_show_stops_and_rows_are_bounded(open_page: Open) -> None:
    with rig(blocks=2000) as running:
        page = open_page(running.admin)
        running.storm(7, 150, 3.0)
        expect_text(page.locator("#latency .plot h3").nth(3), r"\d ms · ")
        assert page.locator("#latency path.cancel-dots").count() == 4
        assert page.locator("#latency path.ack-dots").count() == 1
        with contextlib.ExitStack() as clients:
            for _ in range(110):
                clients.enter_context(Client(running.url, tokens=LONG))
            expect_text(page.locator("#requests-title"), r"\(\d+ more\)")
            assert page.locator("#requests tbody tr").count() <= 120


# ---- who writes on it ----------------------------------------------------------------------------------------


def test_what_clients_write_is_text(open_page: Open) -> None:
    with (
        rig(model=EVIL, step_seconds=0.02) as running,
        Client(running.url, tokens=LONG, model=EVIL, group=EVIL_GROUP) as client,
    ):
        page = open_page(running.admin)
        text = expect_text(row(page, client.id), "running")
        assert EVIL in text
        assert EVIL_GROUP in text
        row(page, client.id).get_by_role("button", name=f"Open {client.id}").click()
        expect_text(page.locator("#detail-body"), re.escape(EVIL))
        page.locator("#detail-close").click()
        for id_ in (EVIL, "%E0%A4%A", f"../books?{EVIL}"):
            page.evaluate("hash => { location.hash = hash }", id_)
            if id_ != "%E0%A4%A":
                expect_text(page.locator("#detail-body"), "is not here|Not Found|at least|at most")
            page.evaluate("location.hash = ''")
        assert page.locator("img").count() == 0
        assert page.evaluate("typeof pwned") == "undefined"


def test_the_browser_itself_refuses_markup_and_foreign_script(open_page: Open, healthy: Rig) -> None:
    page = open_page(healthy.admin)
    tried = "(code) => { try { code(); return 'done' } catch (error) { return error.name } }"
    for code in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "document.createElement('script').text = 'pwned = 1'",
        "document.createElement('script').src = 'http://127.0.0.1:9/x.js'",
    ):
        assert page.evaluate(f"() => ({tried})(() => {{ {code} }})") == "TypeError", code
    page.evaluate(
        """() => new Promise((done) => {
            addEventListener('securitypolicyviolation', () => done());
            const image = new Image();
            image.src = 'http://127.0.0.1:9/x.png';
            document.body.append(image);
        })"""
    )


# ---- the token -------------------------------------------------------------------------------------------------


def test_the_page_asks_for_the_token_and_keeps_it_for_its_tab(open_page: Open) -> None:
    with rig(token=TOKEN, step_seconds=0.02) as running, Client(running.url, tokens=LONG) as client:
        page = open_page(running.admin)
        field = token_field(page)
        field.wait_for()
        page.keyboard.press("Escape")  # there is nothing behind it to see
        assert field.is_visible()
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect_text(page.locator("#ask-problem"), "not the token")
        assert page.evaluate("sessionStorage.length") == 0
        field.fill(TOKEN)
        page.keyboard.press("Enter")
        expect_text(page.locator("#link"), "^live$")
        cancel(page, client.id)
        expect_text(page.locator(".order"), "settled .* confirmed")
        page.reload()
        expect_text(page.locator("#link"), "^live$")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert TOKEN not in page.url
        assert json.loads(page.evaluate("JSON.stringify(Object.values(sessionStorage))")) == [TOKEN]
        other = open_page(running.admin)
        token_field(other).wait_for()
        page.get_by_role("button", name="Forget token").click()
        token_field(page).wait_for()
        assert page.evaluate("sessionStorage.length") == 0


# ---- when it breaks, and how it looks ----------------------------------------------------------------------------


def test_it_says_that_it_is_disconnected_and_comes_back(open_page: Open) -> None:
    with rig() as running:
        page = open_page(running.admin)
        expect_text(page.locator("#link"), "^live$")
        port = int(running.admin.rpartition(":")[2])
        began = time.monotonic()
        running.stop()
        stopped_seconds = time.monotonic() - began
        expect_text(page.locator("#link"), "disconnected, again in")
    assert stopped_seconds < 5.0  # an open page does not hold up the end
    with rig(admin_port=port):
        expect_text(page.locator("#link"), "^live$", 30.0)


def test_pause_holds_the_page_still(open_page: Open, healthy: Rig, client: Client) -> None:
    page = open_page(healthy.admin)
    row(page, client.id).wait_for()
    page.get_by_role("button", name="Pause").click()
    before = row(page, client.id).inner_text()
    page.wait_for_timeout(1500)
    assert row(page, client.id).inner_text() == before
    page.get_by_role("button", name="Go on").click()
    page.wait_for_timeout(1000)
    assert row(page, client.id).inner_text() != before


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_both_schemes_and_on_a_phone(
    open_page: Open, healthy: Rig, client: Client, scheme: str
) -> None:
    page = open_page(healthy.admin, color_scheme=scheme, viewport={"width": 360, "height": 740})
    row(page, client.id).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    button = row(page, client.id).locator(".cancel")
    box = button.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    assert _contrast(page, "--ink", "--panel") >= 12.0
    for name in ("--dim", "--red", "--amber", "--green", "--blue", "--violet"):
        assert _contrast(page, name, "--panel") >= 4.5, name
    row(page, client.id).get_by_role("button", name=f"Open {client.id}").click()
    expect_text(page.locator("#detail-body"), "OPEN")
    assert page.evaluate("document.querySelector('#detail-body').scrollWidth") <= 360


def _contrast(page: Page, ink: str, ground: str) -> float:
    """WCAG's contrast of two of the page's colours."""
    code = """([ink, ground]) => {
        const style = getComputedStyle(document.documentElement);
        const light = (name) => {
            const probe = document.createElement('i');
            probe.style.color = style.getPropertyValue(name);
            document.body.append(probe);
            const [r, g, b] = getComputedStyle(probe).color.match(/[0-9.]+/g).map(Number).map((v) => v / 255)
                .map((v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
            probe.remove();
            return .2126 * r + .7152 * g + .0722 * b;
        };
        const [a, b] = [light(ink), light(ground)];
        return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    }"""
    return float(page.evaluate(code, [ink, ground]))
