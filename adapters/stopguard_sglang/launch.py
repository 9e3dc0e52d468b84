"""How SGLang is started on a machine without a GPU, with a tiny model of random weights.

Kept apart from `rig`, whose text decides whether an installation is still the right one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from stopguard.testing import tiny_model
from stopguard.testing.rig import Launch, RigError, put_stopguard, python_of, run_logged

__all__ = ["Options", "launch"]

SERVED_MODEL: Final = "tiny"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a test may want of the engine. Pool and prompts in tokens."""

    #: The KV pool. 2,000 with many requests forces retractions.
    pool_tokens: int = 65536
    running_requests: int = 64
    #: A longer prompt is prefilled in pieces of this size.
    prefill_chunk_tokens: int = 512
    #: 0.1 lets it admit more than fits, so that it must retract.
    conservativeness: float = 1.0
    context_tokens: int = 8192
    priority_scheduling: bool = False


def launch(home: Path, port: int, arguments: Sequence[str], options: Mapping[str, Any]) -> Launch:
    """See `stopguard.testing.rig.Recipe.launch`; `options` are the fields of `Options`."""
    try:
        wanted = msgspec.convert(dict(options), Options)
    except msgspec.ValidationError as error:
        raise RigError(f"sglang: {error}; its options are {', '.join(Options.__struct_fields__)}") from None
    put_stopguard(home, _say)
    python = python_of(home)
    command = [
        *(str(python), "-m", "sglang.launch_server"),
        *("--model-path", str(_model(home, wanted)), "--served-model-name", SERVED_MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--max-total-tokens", str(wanted.pool_tokens), "--max-running-requests", str(wanted.running_requests)),
        *("--chunked-prefill-size", str(wanted.prefill_chunk_tokens)),
        *("--schedule-conservativeness", str(wanted.conservativeness)),
        # Without --sleep-on-idle an idle scheduler spins on a core.
        *("--enable-metrics", "--skip-server-warmup", "--sleep-on-idle"),
        *(("--enable-priority-scheduling",) if wanted.priority_scheduling else ()),
        *arguments,
    ]
    return Launch(
        command=tuple(command),
        model=SERVED_MODEL,
        environment={"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def _model(home: Path, wanted: Options) -> Path:
    """The folder of the model, which the engine's own environment makes once."""
    folder = home / "models" / f"tiny-{wanted.context_tokens}"
    if not (folder / "model.safetensors").exists():
        arguments = (str(folder), "--positions", str(wanted.context_tokens))
        run_logged(home, _say, [str(python_of(home)), str(tiny_model.__file__), *arguments])
    return folder


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
