"""A real gateway, its admin port and a reference engine in one process, with exact books: what the page is tested with.

The relay has a thread and a loop of its own, and the admin port another, as in `stopguard serve`. The engine's frames
go straight to the gateway's controller, as a probe's would, so that every stop is proved.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from stopguard.admin import create_app
from stopguard.admin.live import LiveView
from stopguard.admin.thread import AdminThread
from stopguard.config import Address
from stopguard.engines.ids import with_our_ids
from stopguard.engines.registry import create
from stopguard.gateway.server import Gateway, loop_factory
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.ledger import Evidence
from stopguard.probe import wire
from stopguard.refengine import EngineConfig, ReferenceEngine, StepCost
from stopguard.refengine.http_face import Face, FaceOptions
from stopguard.refengine.http_openai import CallDefaults
from stopguard.refengine.http_server import serving
from stopguard.stops import Semantics, Source, StopCause, StopConfig, observe_frame
from stopguard.testing.live import LiveStorm
from stopguard.testing.plan import plan_storm

__all__ = ["Client", "Rig", "rig"]

T = TypeVar("T")
ENGINE = "gpu0"
STARTING_SECONDS = 20.0


class Rig:
    """Everything, running. `url` is the data port, `admin` the admin port's address; `admin_address` may be fixed."""

    def __init__(
        self,
        *,
        policy: str = "vllm",
        faults: tuple[str, ...] = (),
        model: str = "base",
        blocks: int = 400,
        settle_seconds: float = 3.0,
        step_seconds: float = 0.008,
        token: str | None = None,
        admin_port: int = 0,
    ) -> None:
        config = EngineConfig(
            blocks=blocks, max_running=16, host_blocks=32, step_cost=StepCost(base_seconds=step_seconds)
        )
        self.engine = ReferenceEngine(config, policy, faults, 7)
        self.url = self.admin = ""
        self.gateway: Gateway | None = None
        self._model = model
        self._settle_seconds = settle_seconds
        self._token = token
        self._admin_port = admin_port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay")
        self._storms: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(STARTING_SECONDS) or self._failure is not None:
            raise RuntimeError(f"the rig did not start: {self._failure}")

    def stop(self) -> None:
        """Harmless twice."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STARTING_SECONDS)
        if self._failure is not None:
            raise self._failure

    def storm(self, seed: int, requests: int, over_seconds: float) -> None:
        """Let a storm's clients loose, and do not wait for them."""
        assert self._loop is not None
        storm = LiveStorm(
            plan_storm(seed, requests, over_seconds=over_seconds), self.url, model=self._model, fail=self._fail
        )

        def begin() -> None:
            self._storms.append(asyncio.ensure_future(storm.run()))

        self._loop.call_soon_threadsafe(begin)

    # ---- private -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        options = FaceOptions(defaults=CallDefaults(model=self._model), dev_mode=True)
        face = Face(self.engine, options=options, on_frame=self._on_frame, seed=7)
        async with serving(face) as engine_url:
            adapter = create("ref", ENGINE, engine_url)
            adapter.profile = msgspec.structs.replace(adapter.profile, best_evidence=Evidence.PROBE, probed=True)
            gateway = self.gateway = Gateway(
                [(adapter, EngineSettings())],
                GatewaySettings(listeners=(Listener(port=0),)),
                stop_config=StopConfig(settle_seconds=self._settle_seconds, write_off_seconds=600.0),
            )
            await gateway.start()
            host, port = gateway.addresses[0]
            self.url = f"http://{host}:{port}"
            view = LiveView(gateway, None, self._loop, kinds={ENGINE: "ref"})
            app = create_app(view, token=self._token)
            admin = AdminThread.start(app, Address("127.0.0.1", self._admin_port), background=view.background)
            self.admin = admin.url
            # Its model is known, and its gauges are read, from the beginning.
            async with asyncio.timeout(STARTING_SECONDS):
                while view.signs().reasons:  # noqa: ASYNC110 - the view is only read, it announces nothing
                    await asyncio.sleep(0.01)
            self._ready.set()
            try:
                await self._stopping.wait()
            finally:
                for task in self._storms:
                    task.cancel()
                await asyncio.gather(*self._storms, return_exceptions=True)
                await gateway.shutdown(drain_seconds=0.0)
                await asyncio.to_thread(admin.stop)

    def _on_frame(self, frame: wire.Frame) -> None:
        gateway = self.gateway
        if gateway is not None and frame.events:
            at = monotonic()
            gateway.carry_out(observe_frame(gateway.controller, ENGINE, at, with_our_ids(frame)), at)

    def _fail(self, request_id: str) -> None:
        """Stop a request as an operator would whose machine goes down."""
        gateway = self.gateway
        tracked = gateway.controller.tracked.get(request_id) if gateway is not None else None
        if gateway is not None and tracked is not None:
            cause = StopCause(
                semantics=Semantics.FAIL,
                source=Source.GATEWAY,
                reason="operator",
                observed_at=monotonic(),
                actor="test",
            )
            gateway.stop(tracked, cause)


@contextlib.contextmanager
def rig(**options: Any) -> Iterator[Rig]:
    """A rig, until the end of the block."""
    made = Rig(**options)
    made.start()
    try:
        yield made
    finally:
        made.stop()


class Client:
    """One streaming request of a client, on a connection of its own, which a `with` block ends. `id` is what StopGuard
    calls it.
    """

    def __init__(self, url: str, *, tokens: int = 3000, model: str = "base", group: str = "") -> None:
        target = urlsplit(url)
        self._connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
        body = {
            "model": model,
            "stream": True,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": "Tell me a story."}],
        }
        headers = {"content-type": "application/json", **({"x-stopguard-group": group} if group else {})}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        self.response = self._connection.getresponse()
        assert self.response.status == 200, self.response.read()
        self.id = self.response.headers["x-stopguard-id"]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Close the connection, in the middle or not. Harmless twice."""
        self.response.close()
        self._connection.close()


if __name__ == "__main__":
    import sys

    with rig(faults=tuple(sys.argv[2:]), admin_port=int(sys.argv[1])) as running:
        print(running.admin, running.url, flush=True)
        for number in range(20):
            running.storm(number, 400, 30.0)
            time.sleep(30.0)
