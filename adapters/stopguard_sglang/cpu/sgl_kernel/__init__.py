"""Stands in for the package `sgl_kernel`, whose builds are for accelerators, where SGLang runs on a plain CPU.

SGLang imports many kernels by name when its modules are loaded and then takes its own `forward_native` paths on a CPU
without AMX. So every name can be imported from here and from any submodule; a kernel that is called raises, apart
from the few below that have an obvious body in plain torch. Nothing of SGLang's scheduler, TokenizerManager, memory
pools or HTTP server is touched. Tested with sglang 0.5.21 to 0.5.23.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"
__path__ = []


class _Absent:
    """Any kernel: may be imported, passed on and looked into, not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{self.__name__} has no body on this machine (no accelerator)")

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


def _absent(name: str) -> _Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name)


__getattr__ = _absent


def _stored(value: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return value if out is None else out.copy_(value)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(first half of the last dimension) * second half``."""
    gate, up = x.chunk(2, dim=-1)
    return _stored(torch.nn.functional.silu(gate) * up, out)


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, times `weight`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return _stored((wide * scale).to(x.dtype) * weight, out)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **_: Any
) -> None:
    """In place: ``residual += x``, then ``x = rmsnorm(residual)``."""
    residual.add_(x)
    rmsnorm(residual, weight, eps, out=x)


def copy_all_layer_kv_cache_cpu(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    target: torch.Tensor,
    source: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Move the KV of the tokens `source` to the places `target`, in each layer."""
    for buffer in (*k_buffers, *v_buffers):
        buffer[target] = buffer[source]


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers `import sgl_kernel.ANYTHING` with a module in which every name exists."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _absent  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Submodules())
