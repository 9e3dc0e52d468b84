"""A pytest plugin: assert that a test left nothing behind in an engine or gateway, as goleak does for goroutines.

The marker watches an engine around a test::

    @pytest.mark.stopguard("http://127.0.0.1:8000", within=5.0)
    def test_cancelling_a_stream(): ...

The fixture does it for a part of one, also in an asynchronous test, and for an engine in the same process
(anything callable that gives a `Reading`)::

    def test_two_engines(leak_watch):
        with leak_watch("http://127.0.0.1:8000"), leak_watch("http://127.0.0.1:8001", kind="openai"):
            ...

    async def test_in_the_same_loop(leak_watch):
        async with leak_watch(url): ...

After the test the engine has `within` seconds to hold no more than before it; what is then still held fails the
test, each thing with its ledger and amount. An engine that shows nothing fails it too: nothing would be proved.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stopguard.audit.target import Reading

__all__ = ["LeakWatch", "leak_watch"]

MARKER = "stopguard(url, within=5.0, kind='auto', model=''): the test may leave nothing behind in the engine at url"
_POLL_SECONDS = 0.05

#: A URL, or something that gives a reading of an engine in this process.
Source = str | Callable[[], "Reading"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Watch around the tests that bear the marker, fixtures aside."""
    marks = list(item.iter_markers("stopguard"))
    watches = [LeakWatch(*mark.args, **mark.kwargs) for mark in marks]
    for watch in watches:
        watch.__enter__()
    yield
    for watch in watches:
        watch.check()


@pytest.fixture
def leak_watch() -> Callable[..., LeakWatch]:
    """`leak_watch(url_or_reader, within=5.0, kind="auto", model="")`: a context manager, plain or asynchronous."""
    return LeakWatch


class LeakWatch:
    """Reads an engine before and after, and fails when it holds more than before.

    `within` is seconds; `kind` is one of the kinds of `stopguard audit --engine`.
    """

    def __init__(self, source: Source, within: float = 5.0, kind: str = "auto", model: str = "") -> None:
        self.source = source
        self.within = within
        self.kind = kind
        self.model = model
        self._before: Reading | None = None

    # Plain ----------------------------------------------------------------------------------------

    def __enter__(self) -> LeakWatch:
        self._before = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.check()

    def check(self) -> None:
        """Fail unless the engine comes back to what it held before, in time."""
        until = time.monotonic() + self.within
        while findings := self._findings(self._read()):
            if time.monotonic() >= until:
                self._fail(findings)
            time.sleep(_POLL_SECONDS)

    def _read(self) -> Reading:
        if callable(self.source):
            return self.source()
        return _in_thread(self._read_url())

    # Asynchronous ---------------------------------------------------------------------------------

    async def __aenter__(self) -> LeakWatch:
        self._before = await self._aread()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        until = time.monotonic() + self.within
        while findings := self._findings(await self._aread()):
            if time.monotonic() >= until:
                self._fail(findings)
            await asyncio.sleep(_POLL_SECONDS)

    async def _aread(self) -> Reading:
        return self.source() if callable(self.source) else await self._read_url()

    # Both -----------------------------------------------------------------------------------------

    async def _read_url(self) -> Reading:
        from stopguard.audit.client import SocketWorld  # noqa: PLC0415 (only for those who watch a URL)
        from stopguard.audit.runner import find_model  # noqa: PLC0415
        from stopguard.audit.target import make_observer  # noqa: PLC0415

        assert isinstance(self.source, str)
        world = SocketWorld(self.source)
        try:
            model = await find_model(world, self.model)
            observer = await make_observer(
                self.kind, "metrics" if self.kind == "ref" else "", world.control, world.now, model
            )
            reading = await observer.read()
        finally:
            await world.aclose()
        if reading is None:
            pytest.fail(
                f"{self.source} shows nothing that could prove that nothing leaked ({observer.facts.observed_by})"
            )
        return reading

    def _findings(self, now: Reading) -> list[str]:
        before = self._before
        assert before is not None, "the watch was never begun"
        rows = [
            ("queue", "requests", before.places, now.places),
            ("kv", "blocks", before.gauges.blocks_used, now.gauges.blocks_used),
            ("stream", "watchers", before.watchers, now.watchers),
            *(("kv", name, before.beside.get(name, 0), amount) for name, amount in now.beside.items()),
        ]
        return [
            f"{ledger}: {new - old} {unit} more than before ({old} then, {new} now)"
            for ledger, unit, old, new in rows
            if old is not None and new is not None and new > old
        ]

    def _fail(self, findings: list[str]) -> None:
        where = self.source if isinstance(self.source, str) else "the engine"
        listed = "; ".join(findings)
        pytest.fail(f"LEAK in {where}, {self.within:g} s after the test: {listed}", pytrace=False)


def _in_thread(work: Coroutine[Any, Any, Reading]) -> Reading:
    """Run `work` in a loop of its own, whatever loop the test has."""
    result: list[Reading] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="stopguard leak watch")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]
