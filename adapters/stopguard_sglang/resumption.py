"""Continuing a request at SGLang.

Streamed completions say their ids with `return_token_ids`; streamed chats refuse it ("return_token_ids is not
supported with streaming on /v1/chat/completions", `serving_chat.py`, 0.5.23). So a chat is run as a completion: its
prompt's ids are asked beforehand at `/v1/tokenize`, which applies the chat template as the chat route does, and
its chunks are given a chat's form. Both go on as `/v1/completions` with the ids as prompt.

Not every chunk of one token with text is a clean mark here: of a text with an unfinished character SGLang's
detokenizer lets through what precedes the last space (`find_printable_text`). The overlap's text shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stopguard.engines.openai_chunks import (
    ChunkReader,
    CompletionsResumption,
    ControlSide,
    carried,
    rest_of_limit,
    rest_of_minimum,
)
from stopguard.engines.resumption import Ask, AskKind, EngineCall, Piece, Reader, UnreadableChunk

__all__ = ["RESUMPTION", "SGLangResumption"]

Json = dict[str, Any]

#: What the chat template is applied to.
_TEMPLATE_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message"),
    "chat_template_kwargs",
)


class SGLangResumption(CompletionsResumption):
    """See `stopguard.engines.resumption.Resumption`."""

    family = "SGLang"
    fields = frozenset({"rid", "extra_key", "cache_salt", "custom_labels", "separate_reasoning", "stream_reasoning"})
    prepares = True

    def refusal(self, ask: Ask) -> str:
        if ask.kind is AskKind.CHAT and ask.token_limit is None:
            return "a chat without max_tokens"
        if ask.kind is AskKind.CHAT and ask.wants("return_token_ids"):
            return "return_token_ids of a streamed chat"
        return ""

    async def prompt_ids(self, engine: ControlSide, ask: Ask) -> Sequence[int]:
        if ask.kind is AskKind.COMPLETIONS:
            return ()  # its chunks say them
        body = {name: ask.fields[name] for name in _TEMPLATE_FIELDS if ask.fields.get(name) is not None}
        tokens = (await engine.request("POST", "/v1/tokenize", json=body)).json()["tokens"]
        if not isinstance(tokens, list) or not tokens:
            raise UnreadableChunk(f"engine {engine.name} did not say the ids of the prompt")
        return [int(token) for token in tokens]

    def first(self, ask: Ask, prompt_ids: Sequence[int] | None) -> EngineCall:
        if ask.kind is AskKind.COMPLETIONS:
            return EngineCall(path=ask.path, body={**ask.fields, "return_token_ids": True})
        return self.resume(ask, prompt_ids or (), ())

    def first_reader(self, ask: Ask) -> Reader:
        return _ChatReader(ask) if ask.kind is AskKind.CHAT else ChunkReader(ask, AskKind.COMPLETIONS)

    def resume(self, ask: Ask, prompt_ids: Sequence[int], delivered_ids: Sequence[int]) -> EngineCall:
        body = carried(ask, ("stream_options", "extra_key", "cache_salt")) | rest_of_minimum(ask, len(delivered_ids))
        body |= {
            "prompt": [*prompt_ids, *delivered_ids],
            "max_tokens": rest_of_limit(ask, len(delivered_ids)),
            "return_token_ids": True,
            "stream": True,
        }
        return EngineCall(path="/v1/completions", body=body)


class _ChatReader(ChunkReader):
    """Chunks of completions, given the form that the chat route writes (`sse_utils.build_sse_content`)."""

    __slots__ = ("_opened",)

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask, AskKind.COMPLETIONS)
        self._opened = False

    def read(self, data: bytes) -> Sequence[Piece]:
        pieces: list[Piece] = []
        for piece in super().read(data):
            if piece.error or piece.event is None:
                pieces.append(piece)
                continue
            event = piece.event
            base = {"id": event.get("id"), "object": "chat.completion.chunk", "created": event.get("created")}
            base |= {"model": event.get("model")}
            if not event.get("choices"):
                piece.event = {**event, **base, "choices": []}
                pieces.append(piece)
                continue
            if not self._opened:
                self._opened = True
                opening = {**base, "choices": [_choice({"role": "assistant", "content": ""})]}
                pieces.append(Piece(event=opening, opening=True, prompt_ids=piece.prompt_ids))
            reason, detail = piece.finish_reason, piece.stop_detail
            piece.event = {**base, "choices": [_choice({"content": piece.text})]} if piece.text else None
            piece.finish_reason, piece.stop_detail = None, {}
            if piece.token_ids or piece.text:
                pieces.append(piece)
            if reason is not None:
                end = {**base, "choices": [_choice({}, reason, detail.get("matched_stop"))]}
                pieces.append(Piece(event=end, finish_reason=reason, stop_detail=detail))
        return pieces


def _choice(delta: Json, reason: str | None = None, matched_stop: Any = None) -> Json:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": matched_stop}


RESUMPTION = SGLangResumption()
