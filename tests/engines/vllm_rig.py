"""What the tests on the real vLLM share: an engine that can be broken, and a gateway that hears its probe."""

from __future__ import annotations

import contextlib
import json
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
FAULTS = Path(__file__).with_name("vllm_faults")
CONNECTOR = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "stopguard_vllm_connector",
    "kv_role": "kv_both",
}
LONG_TOKENS = 7000
"""Some twenty seconds: a busy machine has kept the tests from leaving in time when it was five."""
OPTIONS: Mapping[str, Any] = {"pool_blocks": 2049, "max_num_seqs": 16}


def adapter(folder: Path, layers: int = 2, hidden: int = 128, rank: int = 8) -> Path:
    """A LoRA adapter for the tiny model that changes nothing (its matrices are zero), in the safetensors format."""
    folder.mkdir()
    shapes = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": shape
        for layer in range(layers)
        for side, shape in (("A", [rank, hidden]), ("B", [hidden, rank]))
    }
    size = 4 * rank * hidden
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [number * size, (number + 1) * size]}
        for number, (name, shape) in enumerate(shapes.items())
    }
    head = json.dumps(header).encode()
    content = len(head).to_bytes(8, "little") + head + bytes(size * len(shapes))
    (folder / "adapter_model.safetensors").write_bytes(content)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    settings |= {"target_modules": ["q_proj"], "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


class Bench:
    """One folder for the engines of a test module: the probe's socket, and the faults that are on."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "probe.sock"
        self.faults = folder / "faults"
        self.adapter = adapter(folder / "adapter")
        self.plugins = folder / "plugins"
        self.plugins.mkdir()
        for module in FAULTS.glob("*.py"):
            shutil.copy(module, self.plugins)
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
