"""The real llama.cpp server on a machine without a GPU: how it is installed and started (`stopguard.testing.rig`).

The wheel `xllamacpp` holds llama.cpp's own HTTP server as a library, with kernels for AVX2. The models are made on the
spot, with random weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stopguard.testing import rig

__all__ = ["RECIPE", "LlamaCppRecipe"]

MODEL: Final = "tiny"
_HERE: Final = Path(__file__).resolve().parent
_MAKE: Final = _HERE / "tiny_gguf.py"
_SERVE: Final = _HERE / "serve.py"
#: Layers and width. `tiny` makes some thousand tokens a second on one core, `slow` about 150, `slowest` about 100.
#: `spelled` is as `tiny` and also writes characters that take several tokens. `exact` is as `slow` with 32 bits all
#: through: with 16 a greedy text depends on who else is in the batch (8 of 300 differed, and 0 of 300 with `exact`).
_MODELS: Final[dict[str, tuple[int, int]]] = {
    "tiny": (2, 128),
    "slow": (8, 512),
    "slowest": (12, 768),
    "spelled": (2, 128),
    "exact": (8, 512),
}
_OPTIONS: Final[dict[str, Any]] = {
    "model": "tiny",
    "slots": 4,
    # Tokens in all slots together.
    "context": 32768,
    # Prompt tokens of one step: the step cannot be interrupted.
    "batch": 2048,
    # llama.cpp's own default is slots + 4; with more requests than threads even /health waits.
    "http_threads": 64,
    "threads": 1,
    # 5 and more write the queue and each token into the log; below 0 is llama.cpp's own default.
    "verbosity": -1,
}


class LlamaCppRecipe:
    """llama.cpp's server with a small random model; see `stopguard.testing.rig.Recipe`."""

    kind = "llamacpp"
    version = "2026.10.11549"
    ingredients: tuple[Path, ...] = (_MAKE,)

    def install(self, home: Path, say: rig.Say) -> None:
        """About 180 MB, in some seconds."""
        rig.make_environment(home, say)
        rig.pip(home, say, f"xllamacpp=={self.version}", "gguf", "numpy")
        self._model(home, "tiny", say)

    def _model(self, home: Path, name: str, say: rig.Say) -> Path:
        """The model file, made when it is first wanted (the slowest one is 130 MB)."""
        layers, width = _MODELS[name]
        path = home / f"{name}.gguf"
        if not path.exists():
            size = [
                "--layers",
                str(layers),
                "--width",
                str(width),
                *([f"--{name}"] if name in {"spelled", "exact"} else []),
            ]
            rig.run_logged(home, say, [str(rig.python_of(home)), str(_MAKE), str(path), *size])
        return path

    def launch(self, home: Path, port: int, arguments: Sequence[str], options: Mapping[str, Any]) -> rig.Launch:
        """The server process; ready in about a second."""
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise rig.RigError(f"llamacpp: unknown options {sorted(unknown)} (there are: {', '.join(_OPTIONS)})")
        chosen = {**_OPTIONS, **options}
        if chosen["model"] not in _MODELS:
            raise rig.RigError(f"llamacpp: no model {chosen['model']!r} (there are: {', '.join(_MODELS)})")
        model = self._model(home, chosen["model"], rig.say_to_stderr)
        command = [str(rig.python_of(home)), str(_SERVE), str(model), "--port", str(port), "--alias", MODEL]
        for name in ("slots", "context", "batch", "http_threads", "threads", "verbosity"):
            command += [f"--{name.replace('_', '-')}={chosen[name]}"]
        if chosen["model"] == "exact":
            command.append("--exact")
        return rig.Launch(command=(*command, *arguments), model=MODEL, ready_path="/v1/models", ready_seconds=60.0)


RECIPE: Final = LlamaCppRecipe()
