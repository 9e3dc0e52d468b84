"""Continuing a request at vLLM.

The first request is the client's own with `return_token_ids`; the first chunk then has `prompt_token_ids`, each
choice `token_ids`. It goes on as `/v1/completions` with the ids as prompt, a chat too. Exact in ids, text and log
probabilities (vLLM 0.32.0; benchmarks/resume.py), because the mark that it goes on from never lies inside a
character: from there vLLM's detokenizer would print the prompt into the stream.

A chat's `top_logprobs` cannot be had from completions (tokens with the same text fall together there), its
`logprobs` alone can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stopguard.engines.openai_chunks import (
    ChunkReader,
    CompletionsResumption,
    carried,
    chat_logprobs,
    rest_of_limit,
    rest_of_minimum,
)
from stopguard.engines.resumption import Ask, AskKind, EngineCall, Feature, Piece, Reader

__all__ = ["RESUMPTION", "VLLMResumption"]


class VLLMResumption(CompletionsResumption):
    """See `stopguard.engines.resumption.Resumption`."""

    family = "vLLM"
    # A repetition penalty looks at prompt and output together, so it is the same when output has become prompt.
    exact = frozenset({Feature.LOGPROBS, Feature.REPETITION_PENALTY})
    fields = frozenset({"request_id", "cache_salt", "include_reasoning", "parallel_tool_calls", "kv_transfer_params"})

    def refusal(self, ask: Ask) -> str:
        return "kv_transfer_params" if ask.fields.get("kv_transfer_params") else ""

    def first_reader(self, ask: Ask) -> Reader:
        return ChunkReader(ask, ask.kind, writes_null=True)

    def resume(self, ask: Ask, prompt_ids: Sequence[int], delivered_ids: Sequence[int]) -> EngineCall:
        body = carried(ask, ("stream_options",)) | rest_of_minimum(ask, len(delivered_ids))
        if ask.wants_logprobs:
            body["logprobs"] = 0 if ask.kind is AskKind.CHAT else ask.fields["logprobs"]
        body |= {
            "prompt": [*prompt_ids, *delivered_ids],
            # Null is "as the context has room for", which a chat gets that does not say.
            "max_tokens": rest_of_limit(ask, len(delivered_ids)),
            "add_special_tokens": False,
            "return_token_ids": True,
            "stream": True,
        }
        return EngineCall(path="/v1/completions", body=body)

    def resume_reader(self, ask: Ask) -> Reader:
        return _ResumeReader(ask, AskKind.COMPLETIONS)


class _ResumeReader(ChunkReader):
    """Completions; their log probabilities in a chat's form where the client asked for a chat."""

    __slots__ = ("_as_chat",)

    def __init__(self, ask: Ask, kind: AskKind) -> None:
        super().__init__(ask, kind)
        self._as_chat = ask.kind is AskKind.CHAT

    def look_further(self, piece: Piece, event: dict[str, Any]) -> None:
        if self._as_chat and piece.logprobs is not None:
            piece.logprobs = list(chat_logprobs(piece.logprobs))


RESUMPTION = VLLMResumption()
