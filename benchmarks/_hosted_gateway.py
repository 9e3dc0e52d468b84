"""`stopguard serve` with a window: the whole gateway in a process of its own that answers what it still holds.

Run as ``python -m benchmarks._hosted_gateway UPSTREAM_URL [--trace]``. Requests are lines on standard input, answers
are JSON lines on standard output::

    holdings    what is held now (see `holdings`)
    collect     the same after a full garbage collection, with how many objects only that could free
    empty       answered when no request and no client's connection is left, with CLOCK_MONOTONIC nanoseconds
    trace       with --trace: what has grown since the last such question, by source line

The first line that it says itself is ``{"port": …, "admin": URL}``. It ends by SIGTERM, as
`stopguard serve` does, and with its standard input.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING, Any

from stopguard.cli.serve import serve
from stopguard.config import load

if TYPE_CHECKING:
    from stopguard.admin.thread import AdminThread
    from stopguard.gateway.server import Gateway

_EMPTY_LOOK_SECONDS = 0.002
_TRACE_FRAMES = 6
_TRACE_LINES = 20
_WATCHED = ("Exchange", "Downstream", "Upstream", "Tracked", "Machine", "Timer", "TCPTransport", "TimerHandle", "Task")
"""The types of which a request or a connection has its own, ours and the event loop's."""


def holdings(gateway: Gateway) -> dict[str, Any]:
    """Everything that a request or a connection may leave behind, counted. Sockets are counted from outside."""
    statistics = gateway.statistics()
    controller, registry, admission, book = gateway.controller, gateway.registry, gateway.admission, gateway.book
    counts = book.statistics()
    pools = [member.pool for member in gateway.fleet.members]
    return {
        "client connections": statistics.connections,
        "engine connections": sum(len(pool.open) for pool in pools),
        "engine connections at rest": sum(len(pool.idle) for pool in pools),
        "engine connections in the making": sum(len(pool._making) + len(pool._tasks) for pool in pools),
        "waiting for an engine connection": sum(len(pool.waiting) for pool in pools),
        "queued": len(admission.queue),
        "open books": counts.open_requests,
        "overdue books": counts.overdue_requests,
        "requests of the controller": len(controller.tracked) + len(controller.parts),
        "requests in engines": sum(len(members) for members in controller.in_engine.values()),
        "registered requests": len(registry),
        "registered names": len(registry._aliases) + len(registry._groups) + len(registry._keys),
        "request timers": len(controller.wheel),
        "connection timers": len(gateway._wheel),
        "tasks": dict(Counter(_task_name(task) for task in asyncio.all_tasks())),
        "aborts in flight": statistics.aborts_in_flight,
        "cancel waiters": statistics.cancel_waiters,
        "body bytes": statistics.buffered_body_bytes,
        "failed effects": statistics.failed_effects,
        "open balances": sum(sum(totals) for totals in _open_balances(gateway)),
        "objects": _objects(),
        "history": {
            "opened": counts.opened,
            "settled": counts.settled,
            "written off": counts.written_off,
            "leaks found": counts.leaks_found,
            "refused": statistics.refused,
            "connections accepted": statistics.connections_accepted,
        },
    }


def _open_balances(gateway: Gateway) -> list[list[int]]:
    from stopguard.ledger.accounts import OPEN_ACCOUNT_COUNT

    return [[abs(amount) for amount in row[:OPEN_ACCOUNT_COUNT]] for row in gateway.book._totals.values()]


def _task_name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", repr(task))


def _objects() -> dict[str, int]:
    """Living objects of the watched types. What was frozen at the start belongs to no request."""
    found = Counter(type(each).__name__ for each in gc.get_objects())
    return {name: found[name] for name in _WATCHED}


class _Window:
    """Answers the questions, in the gateway's own loop, so that each answer is one moment."""

    def __init__(self, gateway: Gateway, admin_url: str) -> None:
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._trace: tracemalloc.Snapshot | None = None
        self._loop.add_reader(0, self._read)
        _say({"port": gateway.addresses[0][1], "admin": admin_url})

    def _read(self) -> None:
        piece = os.read(0, 4096)
        if not piece:
            # Whoever asked is gone, perhaps without a word.
            self._loop.remove_reader(0)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._answer(line.decode())

    def _answer(self, question: str) -> None:
        if question == "holdings":
            _say(holdings(self._gateway))
        elif question == "collect":
            unreachable = gc.collect()
            _say({**holdings(self._gateway), "unreachable": unreachable})
        elif question == "empty":
            self._look()
        elif question == "trace":
            _say({"grown": self._grown()})
        else:
            _say({"error": f"unknown question {question!r}"})

    def _look(self) -> None:
        gateway = self._gateway
        if len(gateway.book) or len(gateway.registry) or gateway._connections:
            self._loop.call_later(_EMPTY_LOOK_SECONDS, self._look)
        else:
            _say({"at_ns": time.monotonic_ns()})

    def _grown(self) -> list[str]:
        gc.collect()
        before, self._trace = self._trace, tracemalloc.take_snapshot()
        if before is None:
            return []
        return [str(line) for line in self._trace.compare_to(before, "lineno")[:_TRACE_LINES]]


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM."""
    url = arguments[0]
    if "--trace" in arguments:
        tracemalloc.start(_TRACE_FRAMES)
    flags: dict[str, Any] = {
        "engines": [f"openai={url}"],
        "listen.addresses": ["127.0.0.1:0"],
        "admin.listen": "127.0.0.1:0",
        "journal.path": "off",
        "log.format": "json",
        "log.level": "warning",
    }
    loaded = load(file=None, environment={}, flags=flags)
    windows: list[_Window] = []

    def ready(gateway: Gateway, admin: AdminThread | None) -> None:
        windows.append(_Window(gateway, "" if admin is None else admin.url))

    return serve(loaded.configuration, {}, loaded.warnings, ready=ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
