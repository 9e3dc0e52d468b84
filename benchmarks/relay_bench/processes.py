"""Processes of a run: where they may run, how they are started and ended, and what processor time they used.

Pinning: the proxy under test gets one processor to itself and the stub and the load generator get the others, the same
for every peer. So no peer is measured fighting its own load generator, a multi-threaded router gets no more than a
single-threaded one, and "processor time a request" is comparable with "requests a second". The price: with two
processors the harness's own ceiling (the ``direct`` row) is near what the fastest proxies can do, so requests a second
cannot tell those apart. Their processor time can.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProcessorPlan:
    """Which processors the three parties may use; empty sets mean no pinning."""

    proxy: frozenset[int] = frozenset()
    upstream: frozenset[int] = frozenset()
    client: frozenset[int] = frozenset()

    def describe(self) -> str:
        """One line for the report."""
        if not self.proxy:
            return "not pinned"
        names = {"proxy": self.proxy, "upstream stub": self.upstream, "client": self.client}
        return ", ".join(f"{name} on {'+'.join(map(str, sorted(cpus)))}" for name, cpus in names.items())


def plan_processors(*, pin: bool = True) -> ProcessorPlan:
    """The last processor for the proxy; the rest for the harness, one each where there are three or more."""
    if not pin or not hasattr(os, "sched_getaffinity"):
        return ProcessorPlan()
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        return ProcessorPlan()
    upstream = {available[0]}
    client = {available[1]} if len(available) > 2 else upstream
    return ProcessorPlan(frozenset({available[-1]}), frozenset(upstream), frozenset(client))


@contextlib.contextmanager
def running_on(processors: frozenset[int]) -> Iterator[None]:
    """Children started inside inherit the affinity from their first instruction, so their thread pools size by it."""
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_port() -> int:
    """A TCP port of the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Running:
    """A started process and its children."""

    def __init__(self, command: Sequence[str], log: Path, processors: frozenset[int], environment: Mapping[str, str]):
        self.log = log
        with log.open("wb") as output, running_on(processors):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._root = psutil.Process(self._process.pid)

    def ended(self) -> bool:
        """True when the process has exited by itself."""
        return self._process.poll() is not None

    def tree(self) -> list[psutil.Process]:
        """The process and its living descendants."""
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def processor_seconds(self) -> float:
        """User and system time used so far by the whole tree, by the operating system's accounting."""
        return sum(_processor_seconds(process) for process in self.tree())

    def resident_bytes(self) -> int:
        """Resident memory of the whole tree (shared pages counted once a process)."""
        total = 0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                total += int(process.memory_info().rss)
        return total

    def last_words(self) -> str:
        """The last line of its log that says something."""
        lines = self.log.read_text(errors="replace").splitlines()[-40:]
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it wrote nothing")

    def stop(self) -> None:
        """Ends the tree: first politely, then not."""
        tree = self.tree()
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(tree, timeout=STOP_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()


def _processor_seconds(process: psutil.Process) -> float:
    if sys.platform == "linux":
        # The process-wide clock of another process (see clock_getcpuclockid(3)): nanoseconds, and it keeps the time of
        # threads that have ended. The figures in /proc are rounded to 10 ms.
        with contextlib.suppress(OSError):
            return time.clock_gettime((~process.pid << 3) | 2)
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
