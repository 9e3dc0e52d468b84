"""The checks on real engines, tried on the reference engine: they pass where all is well, and can fail."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from stopguard.testing.conformance import Subject
from stopguard.testing.engine_checks import KilledReport, Told, killed_mid_stream, neighbours
from stopguard.testing.rig import free_port
from tests.conformance.imitations import imitation
from tests.integration.serving import ended, start


def test_neighbours() -> None:
    with imitation("vllm", truth=True) as engine, Subject("ref", engine.url) as subject:
        report = neighbours(subject, streams=40, cancelled=20)
    assert report.clean, str(report)
    assert (report.compared, sum(report.outcomes.values())) == (20, 20)
    assert "20 of 40 streams cancelled" in str(report)


def test_an_engine_that_stops_everybody_is_found_out() -> None:
    with (
        imitation("vllm", truth=True, faults=("global-stop-flag",)) as engine,
        Subject("ref", engine.url) as subject,
    ):
        # On a busy machine a round may be over before its first cancel arrives: one of several must show it.
        assert not all(neighbours(subject, streams=32, cancelled=16).clean for _ in range(5))


class Mortal:
    """A reference engine in a process of its own, that can die and come back at its address."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._stack = stack
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = start("refengine", "serve", "--port", str(self.port))
        self._stack.enter_context(ended(process))
        assert process.stdout is not None
        assert process.stdout.readline().startswith("refengine ready: ")
        return process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.process = self._start()


@pytest.fixture
def mortal() -> Iterator[Mortal]:
    with contextlib.ExitStack() as stack:
        yield Mortal(stack)


def test_an_engine_that_dies_and_comes_back(mortal: Mortal) -> None:
    with Subject("ref", mortal.url, settle_seconds=5.0) as subject:
        report = killed_mid_stream(subject, mortal.kill, mortal.restart)
    assert report.clean, report
    assert [one.stream for one in report.told] == [True, True, False]
    assert {one.retry for one in report.told} == {"unsafe"}
    assert report.semantics == ("fail", "fail", "fail")


def test_a_report_can_be_bad() -> None:
    told = Told(stream=True, status=200, retry="unsafe", reason="x", ended_as_if_whole=False)
    away = msgspec.structs.replace(told, status=502, retry="safe")
    good = KilledReport(told=(told,), semantics=("fail",), while_away=away, back_seconds=1.0)
    assert good.clean
    for worse in (
        {"told": (msgspec.structs.replace(told, retry=""),)},
        {"told": (msgspec.structs.replace(told, ended_as_if_whole=True),)},
        {"semantics": ("fail", "finish")},
        {"while_away": told},
    ):
        assert not msgspec.structs.replace(good, **worse).clean
