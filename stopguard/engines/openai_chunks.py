"""Reading OpenAI-shaped chunks that also have token ids, and speaking chat in the words of completions.

Used by the adapters' `resumption` modules. What an engine has of its own (where the ids are, what must be taken
out again) is a parameter; what is the same everywhere is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from stopguard.engines.resumption import Ask, AskKind, EngineCall, EngineUsage, Feature, Piece, Reader, UnreadableChunk

if TYPE_CHECKING:
    import httpx

__all__ = [
    "SAMPLING_FIELDS",
    "ChunkReader",
    "CompletionsResumption",
    "ControlSide",
    "carried",
    "chat_logprobs",
    "chunk_object",
    "entries_of",
    "rest_of_limit",
    "rest_of_minimum",
    "usage_of",
]

Json = dict[str, Any]
_decode = msgspec.json.Decoder().decode

#: What a continuation is sampled with: as the client said, whatever the route.
SAMPLING_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "logit_bias", "ignore_eos"),
    *("stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "priority", "user", "cache_salt", "lora_path", "lora"),
)


def carried(ask: Ask, further: Iterable[str] = ()) -> Json:
    """The fields of `ask` that also hold for its continuation."""
    fields = ask.fields
    return {name: fields[name] for name in (*SAMPLING_FIELDS, *further) if fields.get(name) is not None}


def rest_of_limit(ask: Ask, delivered: int, *, of_completions: int | None = 16) -> int | None:
    """How many tokens are still wanted after `delivered`, `None` for as many as the context has room for.

    `of_completions` is what a completion gets that does not say: 16 in OpenAI's API and in most servers.
    """
    limit = ask.token_limit
    if limit is None and ask.kind is AskKind.COMPLETIONS and "max_tokens" not in ask.fields:
        limit = of_completions
    return None if limit is None else max(1, limit - delivered)


def rest_of_minimum(ask: Ask, delivered: int) -> Json:
    """`min_tokens` for the continuation, if the client set it."""
    least = ask.fields.get("min_tokens")
    return {"min_tokens": max(0, least - delivered)} if isinstance(least, int) and least > 0 else {}


class ControlSide(Protocol):
    """What a resumption needs of an engine's control side (`OpenAIEngine` has it)."""

    name: str

    async def request(self, method: str, path: str, json: Any = None) -> httpx.Response:
        """Call a route; `EngineUnreachable` unless it answers 200."""
        ...


def chunk_object(data: bytes) -> dict[str, Any]:
    """The JSON object that one chunk is; `UnreadableChunk` when it is none."""
    try:
        event = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableChunk(f"a chunk is no JSON: {error}") from None
    if not isinstance(event, dict):
        raise UnreadableChunk("a chunk is no JSON object")
    return event


class ChunkReader:
    """Chunks of `/v1/chat/completions` or `/v1/completions`, whichever `kind` says was called.

    `ask` is what the client asked. Fields that only we asked for are taken out of `Piece.event`: those in
    `ours` (of a choice or of the chunk) unless it asked for them too (they become null where the engine
    `writes_null` for somebody who does not ask), `logprobs` where `logprob_ids` says that the ids come in there and
    the client did not ask for them.
    """

    __slots__ = ("_ids_field", "_kind", "_logprob_ids", "_ours", "_strip_logprobs", "_writes_null")

    def __init__(
        self,
        ask: Ask,
        kind: AskKind,
        *,
        ids_field: str = "token_ids",
        ours: frozenset[str] = frozenset({"token_ids", "prompt_token_ids"}),
        logprob_ids: bool = False,
        writes_null: bool = False,
    ) -> None:
        self._kind = kind
        self._ids_field = ids_field
        self._ours = frozenset() if ask.wants("return_token_ids") else ours
        self._logprob_ids = logprob_ids
        self._writes_null = writes_null
        self._strip_logprobs = logprob_ids and not ask.wants_logprobs

    def read(self, data: bytes) -> Sequence[Piece]:
        event = chunk_object(data)
        if event.get("error") or event.get("object") == "error":
            return [Piece(event=event, error=_error_text(event))]
        usage = usage_of(event)
        # These routes are asked for it exactly as the client asked: what they show it shall see.
        piece = Piece(usage=usage, shows_usage=usage is not None, event=event)
        choices = event.get("choices")
        if choices:
            if len(choices) != 1 or choices[0].get("index", 0) != 0:
                raise UnreadableChunk("a chunk speaks of several answers")
            self._read_choice(piece, event, choices[0])
        prompt_ids = event.get("prompt_token_ids")
        if prompt_ids:
            piece.prompt_ids = prompt_ids
        self._take_out(event)
        self.look_further(piece, event)
        return [piece]

    def look_further(self, piece: Piece, event: Json) -> None:
        """For an engine that has more to say in its chunks."""

    def _read_choice(self, piece: Piece, event: Json, choice: Json) -> None:
        delta: Json = choice
        if self._kind is AskKind.CHAT:
            delta = choice.get("delta") or {}
            piece.text = delta.get("content") or ""
            if delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"):
                piece.unresumable = "a parser of the engine's took part in the answer"
        else:
            piece.text = choice.get("text") or ""
        piece.finish_reason = choice.get("finish_reason")
        if piece.finish_reason is not None:
            piece.stop_detail = {name: choice[name] for name in ("stop_reason", "matched_stop") if name in choice}
        logprobs = choice.get("logprobs")
        if self._logprob_ids:
            entries = (logprobs or {}).get("content") or []
            try:
                piece.token_ids = [entry["id"] for entry in entries]
            except (KeyError, TypeError):
                raise UnreadableChunk("the log probabilities have no token ids") from None
        else:
            piece.token_ids = choice.get(self._ids_field) or ()
        if choice.get("prompt_token_ids"):
            piece.prompt_ids = choice["prompt_token_ids"]
        if self._strip_logprobs:
            # As the engine writes it for somebody who did not ask.
            if self._kind is AskKind.CHAT:
                choice.pop("logprobs", None)
            elif "logprobs" in choice:
                choice["logprobs"] = None
        elif logprobs:
            piece.logprobs = entries_of(logprobs, self._kind)
        self._take_out(choice)
        piece.opening = (
            self._kind is AskKind.CHAT and not piece.token_ids and not piece.text and delta.get("role") is not None
        )

    def _take_out(self, fields: Json) -> None:
        """Remove what only we asked for, in the way in which this engine leaves it out."""
        for name in self._ours:
            if name in fields:
                if self._writes_null:
                    fields[name] = None
                else:
                    del fields[name]


def _error_text(event: Json) -> str:
    error = event.get("error")
    if isinstance(error, dict):
        error = error.get("message")
    return str(error or event.get("message") or "the engine failed")[:500]


def usage_of(event: Json) -> EngineUsage | None:
    """The usage that a chunk has, if any."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return EngineUsage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=cached,
    )


# ---- log probabilities, one entry a token ---------------------------------------------------------------


def entries_of(logprobs: Json, kind: AskKind) -> list[Any]:
    """The log probabilities of a choice as one entry a token: what can be counted off and put together again."""
    if kind is AskKind.CHAT:
        return list(logprobs.get("content") or [])
    columns = {name: values for name, values in logprobs.items() if isinstance(values, list)}
    length = max((len(values) for values in columns.values()), default=0)
    return [
        {name: values[number] for name, values in columns.items() if number < len(values)} for number in range(length)
    ]


def chat_logprobs(entries: Sequence[Json]) -> list[Json]:
    """Entries of completions as entries of a chat that asked for no alternatives (`top_logprobs` 0)."""
    return [
        {
            "token": entry["tokens"],
            "logprob": entry["token_logprobs"],
            "bytes": list(entry["tokens"].encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for entry in entries
    ]


class CompletionsResumption:
    """What is the same wherever the first chunk names the prompt's ids and a request goes on as a completion with ids.

    A base for adapters' `stopguard.engines.resumption.Resumption`; they say the rest, `resume` first of all.
    """

    exact: frozenset[Feature] = frozenset()
    prepares = False
    names_prompt = True

    def refusal(self, ask: Ask) -> str:
        return ""

    async def prompt_ids(self, engine: Any, ask: Ask) -> Sequence[int]:
        raise UnreadableChunk(f"engine {engine.name} did not say the ids of the prompt")

    def first(self, ask: Ask, prompt_ids: Sequence[int] | None) -> EngineCall:
        return EngineCall(path=ask.path, body={**ask.fields, "return_token_ids": True})

    def first_reader(self, ask: Ask) -> Reader:
        return ChunkReader(ask, ask.kind)

    def resume_reader(self, ask: Ask) -> Reader:
        return ChunkReader(ask, AskKind.COMPLETIONS)

    async def unreported(self, engine: Any, ask: Ask, context_ids: Sequence[int], amount: int) -> Sequence[int]:
        raise UnreadableChunk(f"engine {engine.name} left {amount} token ids out")
