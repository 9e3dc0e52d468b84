"""One line an event, for people or for programs."""

from __future__ import annotations

import io
import json
import logging
import re
from typing import TYPE_CHECKING

import pytest

from stopguard.cli.logs import configure, say

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Logging is the whole process's: leave it as it was."""
    root, ours = logging.getLogger(), logging.getLogger("stopguard")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level = before[0], before[1]
    root.setLevel(before[1])
    ours.setLevel(before[2])
    logging.captureWarnings(False)


def test_a_line_for_people() -> None:
    stream = io.StringIO()
    configure("text", "info", stream)
    say(logging.getLogger("stopguard.stops"), logging.WARNING, "leak", "kv.held\n13 blocks", ledger="kv")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} warn  stops: kv\.held 13 blocks\n", stream.getvalue())


def test_a_line_for_programs() -> None:
    stream = io.StringIO()
    configure("json", "info", stream)
    say(logging.getLogger("stopguard.stops"), logging.WARNING, "leak", "kv.held\n13 blocks", ledger="kv", level="mine")
    document = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", document.pop("time"))
    # A field never hides what every line has.
    assert document == {
        "level": "warn",
        "logger": "stopguard.stops",
        "event": "leak",
        "message": "kv.held 13 blocks",
        "ledger": "kv",
    }


def test_the_level_is_ours_and_libraries_stay_quiet() -> None:
    stream = io.StringIO()
    configure("text", "info", stream)
    logging.getLogger("stopguard.x").debug("too fine")
    logging.getLogger("httpx").info("GET http://engine/v1/models")
    logging.getLogger("uvicorn.access").info("GET /requests")
    logging.getLogger("other").info("chatter")
    assert stream.getvalue() == ""
    configure("text", "debug", stream)
    logging.getLogger("stopguard.x").debug("fine")
    assert "debug x: fine" in stream.getvalue()


def test_an_exception_keeps_its_traceback() -> None:
    for form in ("text", "json"):
        stream = io.StringIO()
        configure(form, "info", stream)
        try:
            raise ValueError("odd")
        except ValueError:
            logging.getLogger("stopguard").exception("a bug")
        assert "ValueError: odd" in stream.getvalue()
        assert stream.getvalue().count("\n") == 1 or form == "text"
