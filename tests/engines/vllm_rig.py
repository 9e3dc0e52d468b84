"""What the tests on the real vLLM share: an engine that can be broken, and a gateway that hears its probe."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from stopguard.gateway.probing import ProbeSettings, Probing
from stopguard.gateway.server import Gateway
from stopguard.ledger import Leak
from stopguard.stops import Effect, effects
from stopguard.testing import rig
from stopguard.testing.conformance import Subject
from stopguard_vllm.rig import RECIPE

TOKEN = "0123456789abcdef0123456789abcdef"
FAULTS = Path(__file__).with_name("vllm_faults") / "stopguard_vllm_faults.py"
LONG_TOKENS = 7000
"""Some twenty seconds: a busy machine has kept the tests from leaving in time when it was five."""
OPTIONS: Mapping[str, Any] = {"pool_blocks": 2049, "max_num_seqs": 16}


class Bench:
    """One folder for the engines of a test module: the probe's socket, and the faults that are on."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "probe.sock"
        self.faults = folder / "faults"
        self.plugins = folder / "plugins"
        self.plugins.mkdir()
        shutil.copy(FAULTS, self.plugins)
        information = self.plugins / "stopguard_vllm_faults-1.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stopguard-vllm-faults\nVersion: 1\n")
        (information / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nstopguard_faults = stopguard_vllm_faults:register\n"
        )

    @contextlib.contextmanager
    def broken(self, *names: str) -> Iterator[None]:
        """Faults that are on in the block."""
        self.faults.write_text(" ".join(names))
        try:
            yield
        finally:
            self.faults.unlink(missing_ok=True)

    @contextlib.contextmanager
    def engine(self, *arguments: str, port: int = 0, **options: Any) -> Iterator[rig.RunningEngine]:
        """The real vLLM with our plugin and the one that breaks it."""
        with rig.start(
            RECIPE,
            *arguments,
            port=port,
            options={**OPTIONS, "plugins": ("stopguard_faults",), "plugin_folders": (self.plugins,), **options},
            environment={
                "STOPGUARD_COLLECTOR": str(self.socket),
                "STOPGUARD_COLLECTOR_TOKEN": TOKEN,
                "STOPGUARD_TEST_FAULTS": str(self.faults),
            },
        ) as engine:
            yield engine


class Probed:
    """A gateway in front of the engine that also hears its probe. `leaks` are those found so far."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.leaks: list[Leak] = []
        self.probing: Probing | None = None

    @classmethod
    @contextlib.contextmanager
    def before(cls, bench: Bench, url: str, model: str, **options: Any) -> Iterator[Probed]:
        """Enter the gateway and wait until every rank's probe is there."""
        made: list[Probed] = []

        async def prepare(gateway: Gateway) -> None:
            await made[0].listen(gateway, bench.socket)

        subject = Subject("vllm", url, model=model, slots=16, long_tokens=LONG_TOKENS, prepare=prepare, **options)
        made.append(cls(subject))
        with subject:
            probed = made[0]
            try:
                probed.wait(lambda: subject.gateway.fleet.members[0].profile.probed, "the probe does not connect")
                yield probed
            finally:
                assert probed.probing is not None
                subject.run(probed.probing.close)

    async def listen(self, gateway: Gateway, socket: Path) -> None:
        """Listen for the engine's probes, in the gateway's loop."""
        self.probing = Probing(gateway, ProbeSettings(listen=(str(socket),), token=TOKEN), {"vllm": "vllm"})
        gateway.observers.append(self._on_effect)
        await self.probing.start()

    def _on_effect(self, effect: Effect, at: float) -> None:
        if isinstance(effect, effects.Leaked):
            self.leaks.append(effect.leak)

    def wait(self, fulfilled: Callable[[], bool], otherwise: str, seconds: float = 30.0) -> None:
        """Until `fulfilled`, in the test's thread."""
        due_at = monotonic() + seconds
        while not fulfilled():
            assert monotonic() < due_at, otherwise
            sleep(0.02)

    def order(self, action: Any, request_id: str) -> str:
        """Have the engine's own processes do something to one request; their answer."""
        assert self.probing is not None
        probing = self.probing
        return str(self.subject.run(lambda: probing.order("vllm", action, request_id)).answer)

    def blocks_used(self) -> int | None:
        """Blocks that the schedulers say are in use, all ranks together."""
        assert self.probing is not None
        gauges = self.probing.gauges("vllm", monotonic())
        return None if gauges is None else gauges.blocks_used
