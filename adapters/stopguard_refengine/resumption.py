"""Continuing a request at a reference engine, whichever engine it imitates.

Every style of its HTTP face has OpenAI's two routes with the usual extensions: `return_token_ids`, and prompts
given as ids. A chat goes on as a completion with ids, as at the engines that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

from stopguard.engines.openai_chunks import CompletionsResumption, carried, rest_of_limit
from stopguard.engines.resumption import Ask, AskKind, EngineCall

__all__ = ["RESUMPTION", "ReferenceResumption"]


class ReferenceResumption(CompletionsResumption):
    """See `stopguard.engines.resumption.Resumption`."""

    family = "reference engine"
    fields = frozenset({"refengine", "rid", "lora"})

    def resume(self, ask: Ask, prompt_ids: Sequence[int], delivered_ids: Sequence[int]) -> EngineCall:
        body = carried(ask, ("refengine", "stream_options"))
        rest = rest_of_limit(ask, len(delivered_ids))
        if rest is not None:
            body["max_tokens"] = rest
        elif ask.kind is AskKind.CHAT:
            # A chat that does not say gets 256 tokens, or what the context has room for, as a whole.
            body["max_tokens"] = max(1, 256 - len(delivered_ids))
        body |= {
            "prompt": [*prompt_ids, *delivered_ids],
            "add_special_tokens": False,
            "return_token_ids": True,
            "stream": True,
        }
        return EngineCall(path="/v1/completions", body=body)


RESUMPTION = ReferenceResumption()
