"""What the tests of SGLang share: the engine with our plugin and faults, a gateway whose collector it finds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from stopguard.gateway.probing import ProbeSettings, Probing
from stopguard.gateway.server import Gateway
from stopguard.ledger import Evidence
from stopguard.probe.collector import OrderResult
from stopguard.testing import rig
from stopguard.testing.conformance import Closed, Subject

TOKEN = "of-the-tests-and-of-nothing-else"
FAULTS = ("keep_tokens", "lose_abort", "keep_lora")

_MAKE_LORA = """
import sys, torch
from safetensors.torch import save_file
hidden, layers, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(1)
weights = {}
for layer in range(layers):
    for name in ("q_proj", "v_proj"):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}."
        weights[at + "lora_A.weight"] = torch.randn(4, hidden) * 0.2
        weights[at + "lora_B.weight"] = torch.randn(hidden, 4) * 0.2
save_file(weights, out + "/adapter_model.safetensors")
"""


class Faulty:
    """A folder for the engine: the plugin with faults as an installed distribution, a LoRA adapter, a socket's path."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.faults = folder / "faults"
        self.lora = folder / "lora"
        self.socket = str(folder / "probe.sock")
        for path in (self.site / "sglang_faults-1.dist-info", self.faults, self.lora):
            path.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("sglang_faults.py"), self.site)
        information = self.site / "sglang_faults-1.dist-info"
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-faults\nVersion: 1\n")
        (information / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaults = sglang_faults:register\n")

    def make_lora(self, home: Path, model: Path) -> None:
        """A LoRA adapter of random weights for the model in `model`, made by the engine's interpreter."""
        shape = json.loads((model / "config.json").read_text())
        arguments = [str(shape["hidden_size"]), str(shape["num_hidden_layers"]), str(self.lora)]
        rig.run_logged(home, print, [str(rig.python_of(home)), "-c", _MAKE_LORA, *arguments])
        adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
        (self.lora / "adapter_config.json").write_text(json.dumps({**adapter, "task_type": "CAUSAL_LM"}))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "STOPGUARD_COLLECTOR": self.socket,
            "STOPGUARD_COLLECTOR_TOKEN": TOKEN,
            "STOPGUARD_SGLANG_LEAK_CHECK": "report",
            "PYTHONPATH": str(self.site),
            "SGLANG_FAULTS": str(self.faults),
        }

    def strike(self, fault: str, times: int = 1) -> None:
        """Let `fault` strike the next `times` opportunities."""
        assert fault in FAULTS
        (self.faults / fault).write_text("strike\n" * times)

    def spare(self) -> None:
        """No fault strikes any more."""
        for fault in FAULTS:
            (self.faults / fault).unlink(missing_ok=True)


class ProbedSubject(Subject):
    """A subject whose gateway listens for the engine's probes at `socket`; entered when they are there."""

    def __init__(self, url: str, model: str, socket: str, **options: Any) -> None:
        self.probing: Probing | None = None
        self._socket = socket
        super().__init__("sglang", url, model=model, prepare=self._listen, **options)

    async def _listen(self, gateway: Gateway) -> None:
        settings = ProbeSettings(listen=(self._socket,), token=TOKEN, gone_seconds=2.0)
        probing = self.probing = Probing(gateway, settings, {"sglang": "sglang"})
        await probing.start()
        due_at = monotonic() + 30.0
        while not gateway.fleet.members[0].profile.probed:
            assert monotonic() < due_at, "the engine's probe did not connect"
            await asyncio.sleep(0.02)

    @property
    def best_evidence(self) -> Evidence:
        """The adapter alone promises less than the gateway with a probe."""
        return self.gateway.fleet.members[0].profile.best_evidence

    def __exit__(self, *error: Any) -> None:
        if self.probing is not None:
            self.run(self.probing.close)
        super().__exit__(*error)

    async def order(self, action: Any, request_id: str) -> OrderResult:
        """Have the probe do `action`."""
        assert self.probing is not None
        return await self.probing.order("sglang", action, request_id)


@contextlib.contextmanager
def probed(url: str, model: str, socket: str, **options: Any) -> Iterator[ProbedSubject]:
    """A gateway of its own with the probe in its books."""
    with ProbedSubject(url, model, socket, **options) as subject:
        yield subject


def describe(closed: Closed) -> str:
    """Everything that its books say, for a failed assertion."""
    at = closed.ledgers.last_at
    leaks = closed.ledgers.leaks or []
    story = [f"{at - closed.ledgers.opened_at:.3f} {text}" for at, text in closed.ledgers.marks]
    return "\n".join([str(closed), f"{len(leaks)} leaks", *(leak.describe(at) for leak in leaks[:8]), *story])
