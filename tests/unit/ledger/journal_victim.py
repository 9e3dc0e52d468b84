"""A process that writes a journal as fast as it can until it is killed; run as a script by test_journal_crash.

It says what it is about to hand over, and again when it has, each time with the wall time:

    open ID TIME, opened ID TIME, settle ID TIME, settled ID TIME
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from stopguard.ledger import Book
from stopguard.ledger.journal import Journal
from tests.unit.ledger.journal_scenarios import begin, cancelled, finish, stop

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopguard.ledger import RequestLedgers


def main(path: str, flush_seconds: float) -> None:
    book = Book()
    journal = Journal.open(path, policy="all", flush_seconds=flush_seconds)
    print(f"start {journal.path} {time.time()}", flush=True)
    held = []
    for number in range(1_000_000):
        at = time.monotonic()
        request = begin(book, f"sg-held-{number:07}", at)
        hand_over("open", journal.opened, request)
        held.append(request)
        for part in range(5):
            request = cancelled(book, f"sg-stop-{number:07}-{part}", at)
            hand_over("settle", journal.settled, request)
        if number % 2:
            request = held.pop(0)
            if request.stop is None:
                finish(book, request, at + 5.0)
            else:
                book.write_off(request, at + 5.0, "given up")
            hand_over("settle", journal.settled, request)
        elif number % 3 == 0 and held[0].stop is None:
            stop(held[0], max(at, held[0].last_at))
        # A pace that a slow machine keeps up with, so that the queue is never what loses something.
        time.sleep(0.0005)


def hand_over(word: str, call: Callable[[RequestLedgers], None], request: RequestLedgers) -> None:
    say(word, request)
    call(request)
    say({"open": "opened", "settle": "settled"}[word], request)


def say(word: str, request: RequestLedgers) -> None:
    print(word, request.request_id, time.time(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
