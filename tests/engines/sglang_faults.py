"""A plugin of SGLang that is wrong on purpose, for the tests. Loaded inside the engine; it knows nothing of StopGuard.

Each fault strikes while a file of its name lies in the folder `SGLANG_FAULTS`, and takes one line off it each time:

- `keep_tokens`: a request that is released keeps eight KV tokens;
- `lose_abort`: the scheduler's abort does not find a running request;
- `keep_lora`: a request that ends keeps its reference to its LoRA adapter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT_TOKENS = 8
FOLDER = "SGLANG_FAULTS"


def _strikes(name: str) -> bool:
    file = Path(os.environ[FOLDER]) / name
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return False
    if not lines:
        return False
    file.write_text("".join(f"{line}\n" for line in lines[1:]))
    return True


def keep_tokens(original: Callable[..., Any], tree: Any, req: Any, **kwargs: Any) -> Any:
    if not req.rid.startswith("HEALTH_CHECK") and _strikes("keep_tokens"):
        tree.token_to_kv_pool_allocator.alloc(KEPT_TOKENS)
    return original(tree, req, **kwargs)


def lose_abort(original: Callable[..., Any], scheduler: Any) -> Any:
    return set() if _strikes("lose_abort") else original(scheduler)


def keep_lora(original: Callable[..., Any], manager: Any, state: Any) -> Any:
    if getattr(state.obj, "lora_path", None) and not state.lora_released and _strikes("keep_lora"):
        state.lora_released = True
        return None
    return original(manager, state)


def _without_pinned_memory() -> None:
    """SGLang's LoRA layers ask for pinned memory on a machine that has none: give them ordinary memory."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return call

    for name in ("tensor", "empty", "zeros", "arange", "full"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


def register() -> None:
    """Called by SGLang's plugin loader."""
    if FOLDER not in os.environ:
        return
    _without_pinned_memory()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    tree = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{tree}.on_release", keep_tokens, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.collect_inflight_reqs", lose_abort, HookType.AROUND)
    HookRegistry.register(f"{manager}._release_lora_once", keep_lora, HookType.AROUND)
