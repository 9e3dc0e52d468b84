"""DeepInfer's real C++ scheduler on a machine without an accelerator: how it is built and started.

The release is a source distribution for GPUs. Of its extension module three translation units make the scheduler, and
they compile for a CPU with g++ 12 or newer and the headers of a CPU torch (`cpu/build.py`): one to two minutes on two
idle cores.
What its kernels would do is left out (`cpu/module.cpp`), and a forward pass is a pause (`cpu/engine.py`).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stopguard.testing import rig

__all__ = ["RECIPE", "DeepInferRecipe"]

MODEL: Final = "tiny"
_CPU: Final = Path(__file__).resolve().parent / "cpu"
#: Two wheels of this torch are usual: pip takes the CPU one where it is configured to find it.
_TORCH: Final = "torch==2.13.0"
_OPTIONS: Final[dict[str, Any]] = {
    # How the face around the engine aborts: between, at-once, guarded (`face`).
    "aborts": "between",
    "blocks": 512,
    "block_tokens": 16,
    "chunk": 64,
    "sequences": 8,
    "model_tokens": 4096,
    "step_seconds": 0.004,
}


class DeepInferRecipe:
    """DeepInfer's scheduler behind our HTTP face; see `stopguard.testing.rig.Recipe`."""

    kind = "deepinfer"
    version = "0.1.0"
    ingredients: tuple[Path, ...] = (_CPU / "build.py", _CPU / "module.cpp", _CPU / "shim" / "format")

    def install(self, home: Path, say: rig.Say) -> None:
        """About 1 GB with a CPU torch; minutes, for the compiler."""
        if shutil.which("g++") is None:
            raise rig.RigError("deepinfer: its scheduler is compiled here, and there is no g++ (12 or newer)")
        python = rig.make_environment(home, say)
        rig.pip(home, say, _TORCH, "numpy", "uvicorn", "msgspec")
        sources = self._sources(home, say)
        rig.run_logged(home, say, [str(python), str(_CPU / "build.py"), str(sources), str(home / "_C.so")])

    def _sources(self, home: Path, say: rig.Say) -> Path:
        """The unpacked source distribution.

        pip unpacks it and then wants its metadata, which its setup.py makes only on a machine with CUDA and with Python
        3.12; so pip fails, and what it has unpacked by then is all that is needed.
        """
        scratch = home / "sources"
        scratch.mkdir()
        download = [sys.executable, "-m", "pip", "--python", str(rig.python_of(home)), "--disable-pip-version-check"]
        download += ["download", "--no-input", "--no-deps", "--no-build-isolation", "--no-clean", "--no-cache-dir"]
        download += ["--ignore-requires-python", "--no-binary", "deepinfer", f"deepinfer=={self.version}"]
        failure = ""
        try:
            rig.run_logged(home, say, download, {"TMPDIR": str(scratch)})
        except rig.RigError as error:
            failure = str(error)
        found = sorted(scratch.glob("**/csrc/engine/scheduler.hpp"))
        if not found:
            raise rig.RigError(f"deepinfer {self.version}: its sources could not be had: {failure}")
        return found[0].parents[2]

    def launch(self, home: Path, port: int, arguments: Sequence[str], options: Mapping[str, Any]) -> rig.Launch:
        """The scheduler's process; ready in some seconds, most of them the import of torch."""
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise rig.RigError(f"deepinfer: unknown options {sorted(unknown)} (there are: {', '.join(_OPTIONS)})")
        chosen = {**_OPTIONS, **options}
        command = [str(rig.python_of(home)), str(_CPU / "serve.py"), str(home / "_C.so"), "--port", str(port)]
        for name, value in chosen.items():
            command += [f"--{name.replace('_', '-')}={value}"]
        return rig.Launch(command=(*command, *arguments), model=MODEL, ready_seconds=180.0)


RECIPE: Final = DeepInferRecipe()
