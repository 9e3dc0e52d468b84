"""Seeded storms that a real Prometheus scrapes: a healthy one, and one for each fault that has an alert.

The storms run side by side in real time, in one thread, each with its own books and telemetry; a tiny HTTP
server answers `/NAME/metrics`. The thread that serves is not the one that books, as in `stopguard serve`.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec

from dashboards.rules import to_yaml
from stopguard.ledger import EngineGauges, Reconciliation, reconcile
from stopguard.refengine import EngineConfig
from stopguard.stops import StopConfig
from stopguard.telemetry.preemption import ContinuationNumbers, PreemptionNumbers
from stopguard.testing.plan import Ending, StormPlan, plan_storm
from stopguard.testing.storm import StormConfig
from tests.unit.telemetry.helpers import WatchedStorm

__all__ = ["FAULTS", "HEALTHY", "SCALE", "LiveStorm", "World", "metrics_server", "prometheus", "world"]

SCALE = 1 / 30
"""How much faster than in production the rules' times run: a ten-minute window is twenty seconds."""

Render = Callable[[str | None], tuple[bytes, str]]

SECONDS = 36.0
REQUESTS = 500
HEALTHY = "healthy"
_IMPATIENT = StopConfig(settle_seconds=2.0, write_off_seconds=2.0)

FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "leak": ("StopGuardLeak", {"faults": ("blocks-leaked-on-abort",)}),
    "slow": (
        "StopGuardSlowStops",
        {"link_seconds": 3.0, "stops": StopConfig(settle_seconds=9.0)},
    ),
    "lost": (
        "StopGuardUnconfirmedStops",
        {"faults": ("abort-lost-in-prefill", "abort-lost"), "stops": _IMPATIENT},
    ),
    "orphans": ("StopGuardOrphanWork", {"faults": ("running-gauge-drifts",)}),
    "gap": ("StopGuardProbeGap", {}),
    "thrash": (
        "StopGuardPreemptionThrash",
        {"engine": EngineConfig(blocks=84, max_running=64, host_blocks=0)},
    ),
    "twice": ("StopGuardBookErrors", {"faults": ("block-freed-twice",)}),
    "down": ("StopGuardEngineDown", {}),
}
"""Job -> the alert that must fire for it, and what is wrong with its storm."""


class LiveStorm(WatchedStorm):
    """A storm that runs in real time, compares its books with the engine's gauges, and may have a bad probe."""

    def __init__(self, name: str, **config: Any) -> None:
        plan = plan_storm(11, REQUESTS, over_seconds=SECONDS)
        if name == "thrash":
            plan = _outgrowing(plan)
        super().__init__(plan, StormConfig(solo_outputs=False, **config))
        self.name = name
        self.compared: dict[str, Reconciliation] = {}
        self.telemetry.reconciliations = lambda: self.compared
        self.telemetry.healthy = lambda _: name != "down"
        self.telemetry.identities = lambda: {self.profile.name: ("ref", "1")}
        self.telemetry.preemption = self._preemption
        self.telemetry.continuation = self._continuation
        self.telemetry.probes = self._probes
        self.done = False
        self._gap_at = 5.0
        step = self.engine.step

        def watched_step(at: float) -> Any:
            result = step(at)
            self.telemetry.probe_frame(self.profile.name, result.frame, lag_seconds=0.0004)
            return result

        self.engine.step = watched_step  # type: ignore[method-assign]

    def _preemption(self) -> PreemptionNumbers:
        """A storm has no classes: numbers that grow with it stand for what a gateway would say."""
        steps = self.engine.gauges().steps_total
        return PreemptionNumbers(
            away_seconds={self.profile.name: steps / 100},
            longest_away_seconds=1.5,
            victims={("background", "kv"): steps // 50, ("standard", "places"): steps // 200},
            refusals={"guard": steps // 400, "grammar": steps // 100},
            queued={"background": 3, "standard": 1, "urgent": 0},
            recomputed_share=0.02,
            lowered=steps // 300,
            hopeless=steps // 500,
        )

    def _continuation(self) -> ContinuationNumbers:
        """A storm has no gateway that cuts streams: the same."""
        steps = self.engine.gauges().steps_total
        return ContinuationNumbers(preempted=steps // 50, engine_lost=steps // 300, mismatch=0, failed=steps // 600)

    def _probes(self) -> dict[str, tuple[int, int, int, int]]:
        """One probe, which has a gap now and then where that is what the world shows."""
        gaps = self.telemetry.probe_gaps[self.profile.name]
        return {self.profile.name: (1, gaps % 2, gaps, 10 * gaps + self.engine.gauges().steps_total // 100)}

    def live_until(self, seconds: float) -> None:
        """Let virtual time follow real time."""
        while not self.done and self.clock.elapsed_seconds < seconds:
            self.done = not self.advance()
        if self.name == "gap" and seconds >= self._gap_at:
            self.telemetry.probe_gap(self.profile.name)
            self._gap_at += 5.0
        self._compare()

    def _compare(self) -> None:
        gauges, now = self.engine.gauges(), self.clock.now
        reported = EngineGauges(
            at=now,
            running=gauges.running,
            waiting=gauges.waiting + gauges.preempted + gauges.paused + gauges.transferring,
            blocks_used=gauges.blocks_held + gauges.blocks_fenced,
        )
        inside = self.controller.in_engine.get(self.profile.name, {}).values()
        self.compared = {self.profile.name: reconcile([tracked.ledgers for tracked in inside], reported)}


def _outgrowing(plan: StormPlan) -> StormPlan:
    """Fewer requests, none of which is stopped, with outputs that outgrow a small pool together."""
    chosen = plan.clients[::3]
    return StormPlan(
        seed=plan.seed,
        clients=tuple(
            msgspec.structs.replace(client, ending=Ending.FINISH, prompt_tokens=60, max_tokens=200, n=1)
            for client in chosen
        ),
    )


class World:
    """All storms, and where their metrics are."""

    def __init__(self) -> None:
        self.storms = {HEALTHY: LiveStorm(HEALTHY)}
        self.storms |= {name: LiveStorm(name, **config) for name, (_, config) in FAULTS.items()}
        self.port = 0

    def run(self, stopped: threading.Event) -> None:
        """Until the storms are over."""
        began = time.monotonic()
        while not stopped.is_set() and (elapsed := time.monotonic() - began) < SECONDS:
            for storm in self.storms.values():
                storm.live_until(elapsed)
            time.sleep(0.02)


@contextmanager
def metrics_server(renderers: Mapping[str, Render]) -> Iterator[int]:
    """Serve `/NAME/metrics` for each of `renderers`, in threads of their own; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            render = renderers.get(self.path.strip("/").partition("/")[0])
            if render is None:
                self.send_error(404)
                return
            body, content_type = render(self.headers.get("accept"))
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@contextmanager
def world() -> Iterator[tuple[World, Callable[[], None]]]:
    """The storms and the server of their metrics; the second value waits until the storms are over."""
    state = World()
    stopped = threading.Event()
    storming = threading.Thread(target=state.run, args=(stopped,))
    with metrics_server({name: storm.telemetry.render for name, storm in state.storms.items()}) as state.port:
        storming.start()
        try:
            yield state, storming.join
        finally:
            stopped.set()
            storming.join()


@contextmanager
def prometheus(program: str, folder: Path, jobs: dict[str, str], target: str) -> Iterator[str]:
    """A Prometheus of our own that scrapes `target` every second: job -> path. Yields its address."""
    rules = folder / "rules.yml"
    rules.write_text(to_yaml(SCALE), encoding="utf-8")
    scrapes = "".join(
        f"  - job_name: {job}\n    metrics_path: {path}\n    static_configs: [{{targets: ['{target}']}}]\n"
        # Every storm calls its engine `reference`; under their jobs' names they can be told apart in a picture.
        "    metric_relabel_configs:\n"
        f"      - {{source_labels: [engine], regex: reference, target_label: engine, replacement: {job}}}\n"
        for job, path in jobs.items()
    )
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
        f"rule_files: ['{rules}']\nscrape_configs:\n{scrapes}",
        encoding="utf-8",
    )
    port = _free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
                # The page that draws the dashboards comes from another port of this machine.
                "--web.cors.origin=http://127\\.0\\.0\\.1:.*",
            ],
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _until_ready(address, process, folder / "prometheus.log")
        yield address
    finally:
        process.terminate()
        process.wait(10)


def _until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    due_at = time.monotonic() + 20
    while time.monotonic() < due_at and process.poll() is None:
        try:
            if httpx.get(f"{address}/-/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus does not start: {log.read_text(encoding='utf-8')[-2000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
