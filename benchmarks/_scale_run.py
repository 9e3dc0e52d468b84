"""The processes of a run at scale: the stub, the hosted gateway, and helpers that answer lines with JSON.

Each is a process of its own, so that the memory of the gateway is the gateway's alone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil

from benchmarks._accounting import sockets_of
from benchmarks.relay_bench.processes import free_port

ROOT = Path(__file__).resolve().parent.parent
STOP_SECONDS = 20.0
_QUIET_SECONDS = 20.0
_LOOK_SECONDS = 0.1
RESTING_TASKS = 2
"""The gateway's own and the watch over its one engine."""
NOT_COMPARED = ("history", "unreachable")


class Helper:
    """A module of ours as a process that answers one JSON line to one line."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `stop`)
        self._name = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.pid = self.process.pid

    def ask(self, question: str) -> dict[str, Any]:
        """Ask and wait for the answer."""
        self.say(question)
        return self.answer()

    def say(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the next line. Raises RuntimeError with what the process said last when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended: {self.errors()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def errors(self) -> str:
        """What it has written to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def stop(self) -> int:
        """End it; returns its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.terminate()
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self._errors.close()
        return code


class Stub:
    """The upstream stub, and when it saw the connection of each named request close."""

    def __init__(self) -> None:
        self.port = free_port()
        self.closed_ns: dict[str, int] = {}
        self.finished = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.relay_bench.upstream", str(self.port)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, name="stub-reports", daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Where the gateway finds it."""
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        with output:
            for line in output:
                event, identity, at_ns = line.decode().split()
                if event == "closed":
                    self.closed_ns[identity] = int(at_ns)
                elif event == "finished":
                    self.finished += 1


def end_cleanly() -> None:
    """Have SIGTERM end this process as an exception, so that its children are ended too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


class Scene:
    """Stub and gateway, running. Use as a context manager."""

    def __init__(self, *, trace: bool = False) -> None:
        self.stub = Stub()
        self.gateway = Helper("benchmarks._hosted_gateway", self.stub.url, *(["--trace"] if trace else []))
        self.exit_code: int | None = None

    def __enter__(self) -> Scene:
        try:
            ready = self.gateway.answer()
            self.port, self.admin_url = int(ready["port"]), str(ready["admin"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.exit_code = self.gateway.stop()
        self.stub.stop()

    def holdings(self, question: str = "holdings") -> dict[str, Any]:
        """What the gateway holds, its sockets by the operating system's tables included."""
        held = self.gateway.ask(question)
        return {**self._sockets(), **held}

    def scrape(self) -> None:
        """Read the books, and the metrics where they are served, from the admin port as somebody watching would."""
        for page in ("books", "metrics"):
            try:
                with urllib.request.urlopen(f"{self.admin_url}/{page}", timeout=STOP_SECONDS) as response:
                    response.read()
            except urllib.error.HTTPError as error:
                with error:
                    if error.code != HTTPStatus.NOT_FOUND:
                        raise

    def until_left(self, before: dict[str, Any], question: str = "holdings") -> tuple[dict[str, Any], dict[str, str]]:
        """Wait until nothing more is held than `before`: the last look, and what was left in it.

        Connections to the engine rest in the pool for some seconds by design; health checks come and go.
        """
        ends_at = time.monotonic() + _QUIET_SECONDS
        while True:
            held = self.holdings(question)
            left = differences(before, held)
            if not left or time.monotonic() > ends_at:
                return held, left
            time.sleep(_LOOK_SECONDS)

    def baseline(self) -> dict[str, Any]:
        """What a gateway that has served already holds at rest."""
        ends_at = time.monotonic() + _QUIET_SECONDS
        while True:
            held = self.holdings("collect")
            busy = any(held[name] for name in ("client sockets", "engine sockets", "open books", "request timers"))
            passing = sum(held["tasks"].values()) > RESTING_TASKS
            if not (busy or passing):
                return held
            if time.monotonic() > ends_at:
                raise RuntimeError(f"the gateway does not come to rest: {held}")
            time.sleep(_LOOK_SECONDS)

    def _sockets(self) -> dict[str, int]:
        """One connection to the engine beside the relay's is the health check's, which comes and goes."""
        client = engine = other = 0
        found = psutil.Process(self.gateway.pid).net_connections(kind="inet")
        for one in found:
            if one.status != psutil.CONN_LISTEN and one.laddr.port == self.port:
                client += 1
            elif len(one.raddr) and one.raddr.port == self.stub.port:
                engine += 1
            else:
                other += 1
        unix = sockets_of(self.gateway.pid) - len(found)
        return {"client sockets": client, "engine sockets": max(engine - 1, 0), "other sockets": other + max(unix, 0)}


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """What `after` holds that `before` did not, as ``name: "before -> after"``; empty when nothing is left."""
    found: dict[str, str] = {}
    for name, value in after.items():
        if name in NOT_COMPARED:
            continue
        if isinstance(value, dict):
            inner = {key: count for key, count in before[name].items() if count}
            for key in sorted(inner.keys() | value.keys()):
                if value.get(key, 0) > inner.get(key, 0):
                    found[f"{name}: {key}"] = f"{inner.get(key, 0)} -> {value.get(key, 0)}"
        elif value > before[name]:
            found[name] = f"{before[name]} -> {value}"
    return found
