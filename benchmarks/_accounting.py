"""What the operating system says about a process and about the kernel's own memory (Linux)."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KIB = 1024


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one process in KiB, from ``/proc/PID/smaps_rollup``.

    `resident` counts shared pages whole, `proportional` divides them by who shares them, `anonymous` is what the
    process has written itself and no file backs: heaps and stacks.
    """

    resident_kib: int
    proportional_kib: int
    anonymous_kib: int


def memory_of(pid: int) -> Memory:
    """The memory of process `pid` now."""
    found = _fields(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))
    return Memory(found["Rss"], found["Pss"], found["Anonymous"])


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the kernel uses for sockets, for the whole machine.

    `buffers` is what waits in TCP's buffers (``/proc/net/sockstat``); `slab` is where the structures of sockets,
    files and watches live, with all else that the kernel allocates (``/proc/meminfo``).
    """

    tcp_sockets: int
    buffers_kib: int
    slab_kib: int


def kernel_memory() -> Kernel:
    """The kernel's memory for sockets now."""
    words = next(
        line.split() for line in Path("/proc/net/sockstat").read_text(encoding="ascii").splitlines() if "TCP:" in line
    )
    values = dict(zip(words[1::2], map(int, words[2::2]), strict=True))
    pages = values["mem"] * os.sysconf("SC_PAGE_SIZE") // KIB
    return Kernel(values["inuse"], pages, _fields(Path("/proc/meminfo").read_text(encoding="ascii"))["Slab"])


def _fields(text: str) -> dict[str, int]:
    lines = (line.partition(":") for line in text.splitlines() if line.endswith(" kB"))
    return {name: int(value.split()[0]) for name, _, value in lines}


def sockets_of(pid: int) -> int:
    """How many sockets process `pid` has open, by its table of descriptors."""
    count = 0
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            count += os.readlink(f"{folder}/{name}").startswith("socket:")
        except FileNotFoundError:
            continue  # closed while we looked
    return count


def descriptors_of(pid: int) -> int:
    """How many descriptors of any kind process `pid` has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def processor_seconds_of(pid: int) -> float:
    """User and system time that process `pid` has used, by its own clock (clock_getcpuclockid(3)): nanoseconds."""
    return time.clock_gettime((~pid << 3) | 2)


def raise_descriptor_limit(wanted: int) -> int:
    """Raise this process's limit of descriptors, which children inherit; returns what it is now.

    First beyond the hard limit, which needs the right to do so (CAP_SYS_RESOURCE), else up to it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return soft
    if hard < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
        return wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def slope(values: Sequence[float]) -> float:
    """The change from one value to the next by least squares."""
    count = len(values)
    if count < 2:
        return 0.0
    middle = (count - 1) / 2
    mean = sum(values) / count
    above = sum((number - middle) * (value - mean) for number, value in enumerate(values))
    below = sum((number - middle) ** 2 for number in range(count))
    return above / below
