"""The genuine SGLang server on a machine without a GPU: how it is installed. How it is started is in `launch`.

SGLang runs unmodified on a CPU (`SGLANG_USE_CPU_ENGINE=1`): HTTP server, TokenizerManager, scheduler with its overlap
loop, KV pools, radix cache. Two things are missing there and supplied by `cpu/`:

- `sgl_kernel`, which has builds for accelerators only. `cpu/sgl_kernel` lets every name be imported; a kernel that
  SGLang's own CPU paths do not need raises when it is called.
- torchvision's operators, when the build that came along is one for CUDA and cannot load beside a CPU torch.
  `cpu/torchvision_operators.py` declares their schemas first.

No requirement of SGLang's own list is installed by itself (`--no-deps`), since those are the accelerators' kernels;
the list here is what its imports ask for, at the versions that sglang pins where it pins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stopguard.testing.rig import Launch, Say, make_environment, pip, python_of, run_logged
from stopguard_sglang.launch import launch

__all__ = ["RECIPE", "SGLangRecipe"]

_CURRENT: Final = "0.5.23"
_CPU: Final = Path(__file__).resolve().parent / "cpu"
_TORCH: Final = "torch==2.13.0"
_IMPORTED: Final = (
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "orjson",
    "pyzmq",
    "msgspec",
    "aiohttp",
    "requests",
    "psutil",
    "setproctitle",
    "prometheus-client",
    "pybase64",
    "pillow",
    "python-multipart",
    "partial_json_parser",
    "einops",
    "numpy<2.4",
    "scipy",
    "sentencepiece==0.2.1",
    "tiktoken",
    "interegular",
    "IPython",
    "pydantic",
    "packaging",
    "tqdm",
    "regex",
    "gguf",
    "compressed-tensors==0.18.0",
    "xxhash",
    "zstandard",
    "openai-harmony==0.0.4",
    "anthropic",
    "llguidance",
    "soundfile==0.13.1",
    "python-dateutil",
    "watchfiles",
    "py-spy",
    "distro",
    "numba==0.65.1",
    "jsonschema",
    "triton",
)
# What the versions pin differently (their METADATA); the newest one's pins also for those that are not here.
_PINNED: Final = {
    "0.5.21": ("transformers==5.12.1", "tokenizers==0.22.2", "openai==2.6.1"),
    "0.5.22": ("transformers==5.19.0", "tokenizers==0.23.2", "openai==2.6.1"),
    "0.5.23": ("transformers==5.19.0", "tokenizers==0.23.2", "openai==2.8.0"),
}
# These would bring accelerators' packages along.
_IMPORTED_ALONE: Final = ("apache-tvm-ffi==0.1.11", "dill", "xgrammar==0.2.7", "torchvision==0.28.*")


class SGLangRecipe:
    """One version of SGLang, installed into an environment of its own."""

    kind = "sglang"
    ingredients: tuple[Path, ...] = (_CPU / "sgl_kernel" / "__init__.py", _CPU / "torchvision_operators.py")

    def __init__(self, version: str) -> None:
        self.version = version

    def install(self, home: Path, say: Say) -> None:
        python = make_environment(home, say)
        pip(home, say, _TORCH)
        pip(home, say, "--no-deps", f"sglang=={self.version}")
        pip(home, say, _TORCH, *_IMPORTED, *_PINNED.get(self.version, _PINNED[_CURRENT]))
        pip(home, say, "--no-deps", *_IMPORTED_ALONE)
        run_logged(home, say, [str(python), str(_CPU / "torchvision_operators.py")])
        _put_on_path(home)
        # The first import writes the byte code of some 4,000 modules: not the first start's business.
        run_logged(home, say, [str(python), "-c", "import sglang.srt.entrypoints.http_server"], _ON_CPU)

    def launch(self, home: Path, port: int, arguments: Sequence[str], options: Mapping[str, Any]) -> Launch:
        return launch(home, port, arguments, options)


_ON_CPU: Final = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}


def _put_on_path(home: Path) -> None:
    """Copy `cpu/sgl_kernel` beside the environment, and name the folder in its path."""
    shim = home / "shim" / "sgl_kernel"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_bytes((_CPU / "sgl_kernel" / "__init__.py").read_bytes())
    (packages,) = python_of(home).parent.parent.glob("lib/python*/site-packages")
    (packages / "sgl_kernel_on_cpu.pth").write_text(f"{shim.parent}\n")


RECIPE: Final = SGLangRecipe(_CURRENT)
