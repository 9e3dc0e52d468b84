"""Continuing a request at llama.cpp's server.

The ids of OpenAI-shaped chunks come with the log probabilities (`logprobs`, `top_logprobs` 1), which are taken out
again for a client that did not ask for them. The prompt's ids are asked when they are needed: a chat's text from
`/apply-template`, its ids from `/tokenize`. It goes on as `/completion` with the ids as prompt.

A streamed chunk names only the token that completed a character; those before it are missing (seen with
xllamacpp 2026.10.11549: `tokens_predicted` jumps). `timings_per_token` makes the jump visible, and a short
`/completion` that is not streamed says the missing ids, since that one returns all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stopguard.engines.openai_chunks import ChunkReader, ControlSide, chunk_object, rest_of_limit
from stopguard.engines.resumption import (
    Ask,
    AskKind,
    EngineCall,
    EngineUsage,
    Feature,
    Piece,
    Reader,
    UnreadableChunk,
)

__all__ = ["RESUMPTION", "LlamaCppResumption"]

Json = dict[str, Any]

#: The same in OpenAI's routes and in `/completion`. Penalties look back over prompt and output together.
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "seed", "logit_bias", "ignore_eos"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty", "samplers", "min_keep"),
    *("dynatemp_range", "dynatemp_exponent", "cache_prompt", "lora"),
)
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppResumption:
    """See `stopguard.engines.resumption.Resumption`."""

    family = "llama.cpp"
    exact = frozenset({Feature.REPETITION_PENALTY, Feature.COUNT_PENALTIES})
    fields = frozenset(
        {
            *_SAMPLING,
            *("timings_per_token", "return_progress", "reasoning_format", "n_predict", "id_slot", "t_max_predict_ms"),
        }
    )
    prepares = False
    names_prompt = False

    def refusal(self, ask: Ask) -> str:
        for name in ("return_progress", "t_max_predict_ms"):
            if ask.fields.get(name):
                return name
        return ""

    async def prompt_ids(self, engine: ControlSide, ask: Ask) -> Sequence[int]:
        if ask.kind is AskKind.CHAT:
            answer = (await engine.request("POST", "/apply-template", json=ask.fields)).json()
            prompt: Any = answer.get("prompt") if isinstance(answer, dict) else None
        else:
            prompt = ask.fields.get("prompt")
        if isinstance(prompt, list):
            return [int(token) for token in prompt]
        body = {"content": prompt, "add_special": True, "parse_special": True}
        tokens = (await engine.request("POST", "/tokenize", json=body)).json()["tokens"]
        return [int(token) for token in tokens]

    def first(self, ask: Ask, prompt_ids: Sequence[int] | None) -> EngineCall:
        body = {**ask.fields, "timings_per_token": True}
        if ask.kind is AskKind.CHAT:
            body |= {"logprobs": True, "top_logprobs": 1}
        else:
            body["logprobs"] = 1
        return EngineCall(path=ask.path, body=body)

    def first_reader(self, ask: Ask) -> Reader:
        return _FirstReader(ask)

    def resume(self, ask: Ask, prompt_ids: Sequence[int], delivered_ids: Sequence[int]) -> EngineCall:
        rest = rest_of_limit(ask, len(delivered_ids), of_completions=None)
        body = {name: ask.fields[name] for name in _SAMPLING if ask.fields.get(name) is not None}
        body |= {
            "prompt": [*prompt_ids, *delivered_ids],
            "n_predict": -1 if rest is None else rest,
            "return_tokens": True,
            "stream": True,
        }
        return EngineCall(path="/completion", body=body)

    def resume_reader(self, ask: Ask) -> Reader:
        return _NativeReader(ask)

    async def unreported(self, engine: ControlSide, ask: Ask, context_ids: Sequence[int], amount: int) -> Sequence[int]:
        body = {**self.resume(ask, (), context_ids).body, "n_predict": amount, "stream": False}
        answer = (await engine.request("POST", "/completion", json=body)).json()
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or len(tokens) < amount:
            raise UnreadableChunk(f"engine {engine.name} did not say the {amount} token ids that its stream left out")
        return [int(token) for token in tokens[:amount]]


class _FirstReader(ChunkReader):
    """OpenAI-shaped chunks with ids in their log probabilities and a count of tokens in their timings."""

    __slots__ = ("_keeps_timings",)

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask, ask.kind, logprob_ids=True)
        self._keeps_timings = ask.wants("timings_per_token")

    def look_further(self, piece: Piece, event: Json) -> None:
        timings = event.get("timings")
        if isinstance(timings, dict):
            if piece.token_ids:
                piece.position = timings.get("predicted_n")
            # Without `timings_per_token` only the last chunk has them.
            if not self._keeps_timings and piece.finish_reason is None and piece.usage is None:
                del event["timings"]


class _NativeReader:
    """Chunks of `/completion`."""

    __slots__ = ("_shows_usage",)

    def __init__(self, ask: Ask) -> None:
        self._shows_usage = ask.kind is AskKind.COMPLETIONS

    def read(self, data: bytes) -> Sequence[Piece]:
        event = chunk_object(data)
        if event.get("error"):
            said = event["error"]
            return [Piece(error=str(said.get("message") if isinstance(said, dict) else said)[:500])]
        piece = Piece(text=event.get("content") or "", token_ids=event.get("tokens") or ())
        if piece.token_ids:
            piece.position = event.get("tokens_predicted")
        if event.get("stop"):
            piece.finish_reason = _FINISH.get(event.get("stop_type", ""), "stop")
            timings = event.get("timings") or {}
            piece.shows_usage = self._shows_usage
            piece.usage = EngineUsage(
                prompt_tokens=event.get("tokens_evaluated") or 0,
                completion_tokens=event.get("tokens_predicted") or 0,
                cached_tokens=timings.get("cache_n"),
            )
        return [piece]


RESUMPTION = LlamaCppResumption()
