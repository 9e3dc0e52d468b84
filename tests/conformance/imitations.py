"""Reference engines in a thread of their own, one a policy, to be examined as the engines that they imitate."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from stopguard.gateway.server import loop_factory
from stopguard.refengine import EngineConfig, EngineSnapshot, ReferenceEngine
from stopguard.refengine.http_face import Face, FaceOptions
from stopguard.refengine.http_server import serving

__all__ = ["Imitation", "imitation"]

_SECONDS = 30.0


class Imitation:
    """A reference engine that serves. `truth` says whether its routes under ``/ref/`` exist."""

    def __init__(self, policy: str, *, truth: bool, dev_mode: bool = True, faults: tuple[str, ...] = ()) -> None:
        self.engine = ReferenceEngine(
            EngineConfig(blocks=1024, max_running=8, max_model_tokens=4096, max_batch_tokens=256), policy, faults
        )
        self.options = FaceOptions(dev_mode=dev_mode, truth=truth)
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"imitation of {policy}")

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.face = Face(self.engine, options=self.options)
        async with serving(self.face) as url:
            self.url = url
            self._ready.set()
            await self._over.wait()

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(_SECONDS)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive()

    def snapshot(self) -> EngineSnapshot:
        """The whole truth, whatever the adapter believes."""

        async def take() -> EngineSnapshot:
            return self.engine.snapshot(self.face.driver.catch_up())

        return asyncio.run_coroutine_threadsafe(take(), self.loop).result(_SECONDS)


@contextlib.contextmanager
def imitation(
    policy: str, *, truth: bool = False, dev_mode: bool = True, faults: tuple[str, ...] = ()
) -> Iterator[Imitation]:
    """A reference engine with the stop behaviour and the HTTP manners of `policy`'s engine."""
    serving_engine = Imitation(policy, truth=truth, dev_mode=dev_mode, faults=faults)
    serving_engine.start()
    try:
        yield serving_engine
    finally:
        serving_engine.stop()
