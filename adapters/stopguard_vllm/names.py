"""vLLM's own routes that StopGuard uses, and what its routes make of a request's id (vLLM 0.32)."""

from __future__ import annotations

from typing import Final

__all__ = ["ABORT_PATHS", "METRICS_PATH", "NOBODY", "external_ids"]

METRICS_PATH: Final = "/metrics"
ABORT_PATHS: Final = ("/inference/v1/abort_requests", "/abort_requests")
NOBODY: Final = "stopguard-asks-for-nobody"
"""An id that no request has. (An empty list of ids would abort everything.)"""

#: What the routes put before the id (`request_id_prefix` and the f-strings of the serving classes).
_PREFIXES: Final = (
    *("chatcmpl", "resp", "embd", "score", "classify", "pooling", "rerank", "transcribe", "translate"),
    *("generate-tokens", "decision", "generative-scoring"),
)
#: Prompts of one completion request whose ids are tried. A longer list is stopped by its connection.
_PROMPTS: Final = 16


def external_ids(request_id: str) -> list[str]:
    """Every id that vLLM may have made of ours. Those that it has not are unknown there, and harmless."""
    return [
        *(f"{prefix}-{request_id}" for prefix in _PREFIXES),
        *(f"cmpl-{request_id}-{index}" for index in range(_PROMPTS)),
    ]
