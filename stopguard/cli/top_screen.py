"""The screen of `stopguard top`: it looks at every turn, draws, and listens for a key in between.

Keys are read from the terminal itself, without echo and without waiting for Enter, where the system has such a mode
(`termios`); elsewhere only Ctrl-C ends it. The terminal is left as it was, however the screen ends.
"""

from __future__ import annotations

import contextlib
import sys
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from stopguard.cli.top import INTERVAL_LIMITS, AdminUnreachable, fetch, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx
    from rich.console import Console, Group

__all__ = ["Screen", "watch"]

_CHROME_ROWS = 9
"""Rows that are not stops, without engines, warnings and leaks: summary, headings, gaps, key hints."""

_SUMMARY_COLUMNS = 150
"""About what the summary takes; on a narrower terminal it wraps."""


class Screen:
    """What is on it. `key` takes a key, `look` a new moment; `draw` is what to show."""

    def __init__(self, interval_seconds: float) -> None:
        self.interval_seconds = interval_seconds
        self.paused = False
        self.ended = False
        self.overview: dict[str, Any] | None = None
        self.problem = ""

    def key(self, pressed: str) -> bool:
        """Act on a key; whether it wants a new look at once."""
        least, most = INTERVAL_LIMITS
        if pressed in ("q", "Q", "\x03", "\x04"):
            self.ended = True
        elif pressed in ("p", "P"):
            self.paused = not self.paused
            return not self.paused
        elif pressed == " ":
            return True
        elif pressed in ("+", "="):
            self.interval_seconds = max(least, self.interval_seconds / 2)
        elif pressed == "-":
            self.interval_seconds = min(most, self.interval_seconds * 2)
        return False

    def look(self, ask: Callable[[], dict[str, Any]]) -> None:
        """Ask for a new moment. One that does not come leaves the last one, and says so."""
        try:
            self.overview, self.problem = ask(), ""
        except AdminUnreachable as error:
            self.problem = str(error)

    def draw(self, width: int, height: int) -> Group:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = []
        if self.problem:
            parts.append(Text(f"! {self.problem}", style="bold red", overflow="ellipsis", no_wrap=True))
        if self.overview is not None:
            above = len(self.overview["engines"]) + len(self.overview["warnings"]) + len(self.overview["reasons"])
            above += min(4, sum(leak["open"] for leak in self.overview["leaks"])) + (1 if self.problem else 0)
            above += _SUMMARY_COLUMNS // max(width, 1)
            parts += render(self.overview, stops_max=max(1, height - _CHROME_ROWS - above), width=width)
        state = "paused" if self.paused else f"every {self.interval_seconds:g} s"
        parts += [
            Text(),
            Text.assemble(
                *(("q", "bold"), (" quit   ", "dim"), ("p", "bold"), (" pause   ", "dim")),
                *(("space", "bold"), (" now   ", "dim"), ("+", "bold"), ("/", "dim"), ("-", "bold")),
                *((" faster, slower   ", "dim"), (state, "yellow" if self.paused else "dim")),
            ),
        ]
        return Group(*parts)


def watch(console: Console, client: httpx.Client, interval_seconds: float) -> None:
    """Until `q` or Ctrl-C. Raises `AdminUnreachable` only when the first look fails."""
    from rich.live import Live

    screen = Screen(interval_seconds)
    screen.overview = fetch(client)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as wait_for_key,
        Live(screen.draw(console.width, console.height), console=console, screen=True, auto_refresh=False) as live,
    ):
        due_at = monotonic() + screen.interval_seconds
        while not screen.ended:
            pressed = wait_for_key(min(0.25, max(0.0, due_at - monotonic())))
            if (pressed and screen.key(pressed)) or (not screen.paused and monotonic() >= due_at):
                screen.look(lambda: fetch(client))
                due_at = monotonic() + screen.interval_seconds
            live.update(screen.draw(console.width, console.height), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key for so many seconds at most, and returns it or nothing."""
    try:
        import termios
        import tty
    except ImportError:
        yield _no_key
        return
    if not sys.stdin.isatty():
        yield _no_key
        return
    import os
    import select

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([file], [], [], seconds)
        return os.read(file, 1).decode("latin-1") if ready else ""

    try:
        tty.setcbreak(file)
        yield wait
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    sleep(seconds)
    return ""
