"""What travels through the proxy's request queue to the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CancellingRequest", "GenerationRequest"]


@dataclass
class GenerationRequest:
    """New work: `id` is an internal integer."""

    id: int
    prompt_token_ids: list[int]
    max_tokens: int
    streaming: bool
    n: int = 1
    # What PyExecutor does with it.
    computed_tokens: int = 0
    output_tokens: int = 0
    blocks: int = 0
    refusals: int = 0
    finish_reason: str = ""
    new_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CancellingRequest:
    """Stop the request `id`. It waits its turn in the queue like everything else, and nobody answers it."""

    id: int
