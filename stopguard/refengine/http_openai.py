"""OpenAI's chat and completions: a body becomes `RequestSpec`s, outputs become chunks or one answer.

A `Call` is one HTTP request: one or more prompts, each with `n` sequences. Its choices are numbered
prompt by prompt, as OpenAI numbers them. A `Shape` knows how one route writes; the exchange (see
`http_exchange`) asks it for chunks and sends them.

Beside OpenAI's fields the usual extensions work: `priority`, `ignore_eos`, `return_token_ids`, `rid`,
`stream_options.continuous_usage_stats`, and an object `refengine` with what only a reference engine has
(`eos_probability`, `speculative`, `transfer_steps`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from stopguard.refengine.http_styles import HttpProblem, Style
from stopguard.refengine.interface import EngineConfig, FinishReason, Output, RequestSpec, SamplingParameters, Usage
from stopguard.refengine.model import BOS, VOCABULARY, encode

__all__ = ["BodyReader", "Call", "CallDefaults", "ChatShape", "Choice", "CompletionShape", "Shape", "parse_call"]

PROMPTS_MAX: Final = 64
SEQUENCES_MAX: Final = 128
STOPS_MAX: Final = 16
_COMPLETION_TOKENS: Final = 16
_IMAGE_PARTS: Final = frozenset({"image_url", "image", "input_image"})

Json = dict[str, Any]


class CallDefaults(msgspec.Struct, frozen=True):
    """What a body that says nothing gets."""

    model: str = "base"
    #: Tokens for a chat without `max_tokens` (less when the context ends before).
    max_tokens: int = 256
    eos_probability: float = 0.0
    speculative: bool = False


class Choice(msgspec.Struct):
    """What one sequence has delivered so far."""

    text: list[str] = []
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    #: The shape's opening has been written; the prompt's ids have been said.
    started: bool = False
    prompt_said: bool = False
    #: Tokens whose text is held back and whose chunk was skipped: they come with the next one.
    held: list[int] = []

    def take(self, tokens: tuple[int, ...]) -> list[int]:
        """The tokens for the chunk that is written now."""
        taken, self.held = [*self.held, *tokens], []
        return taken


class Call(msgspec.Struct):
    """One HTTP request for generation. `specs` has one entry a prompt; `handles` the names to abort them by."""

    response_id: str
    model: str
    created: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    specs: list[RequestSpec]
    handles: list[str]
    sequences: int
    echo: str = ""
    choices: list[Choice] = []
    #: What whoever sent it calls it: `X-Request-Id`, or `rid` where that is only in the body.
    owner: str = ""

    def usage(self) -> Json:
        """Tokens of the whole call; prompts count once, whatever `n` is."""
        ended = [choice.usage for choice in self.choices if choice.usage is not None]
        prompt = sum(len(spec.prompt) for spec in self.specs)
        completion = sum(len(choice.token_ids) for choice in self.choices)
        firsts = (choice.usage for choice in self.choices[:: self.sequences])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.cached_tokens for usage in firsts if usage is not None) if ended else 0
            },
        }


class Shape(Protocol):
    """How one route writes. Each method returns the events (or the body) as plain JSON values."""

    def opening(self, call: Call, index: int) -> list[Json]:
        """Before the first chunk of choice `index`."""

    def chunk(self, call: Call, index: int, output: Output) -> list[Json]:
        """Tokens of one step for choice `index`; `output` has been added to its `Choice` already."""

    def closing(self, call: Call) -> list[Json]:
        """After the last chunk."""

    def whole(self, call: Call) -> Any:
        """The answer that is not streamed."""

    @property
    def done(self) -> bytes:
        """What ends the stream."""


# Reading bodies -------------------------------------------------------------------------------------


class BodyReader:
    """Typed access to a JSON object; `HttpProblem` 400 names the field."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise HttpProblem(400, f"{name} must be true or false, not {value!r}")
        return value

    def integer(self, name: str, default: int, least: int = 0, most: int = 2**31 - 1) -> int:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise HttpProblem(400, f"{name} must be an integer from {least} to {most}, not {value!r}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise HttpProblem(400, f"{name} must be a number from {least:g} to {most:g}, not {value!r}")
        return float(value)

    def text(self, name: str, default: str = "") -> str:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise HttpProblem(400, f"{name} must be a string, not {value!r}")
        return value

    def object(self, name: str) -> BodyReader:
        value = self.body.get(name)
        if value is None:
            return BodyReader({})
        if not isinstance(value, dict):
            raise HttpProblem(400, f"{name} must be an object, not {value!r}")
        return BodyReader(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """One string or a list of strings; empty ones are dropped."""
        value = self.body.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise HttpProblem(400, f"{name} must be a string or a list of strings")
        if len(values) > STOPS_MAX:
            raise HttpProblem(400, f"{name} has {len(values)} entries; at most {STOPS_MAX} are allowed")
        return tuple(text for text in values if text)


def token_ids(value: Sequence[Any]) -> tuple[int, ...]:
    """A prompt given as ids; `HttpProblem` 400 when one is not of the vocabulary."""
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < len(VOCABULARY):
            raise HttpProblem(400, f"token id {token!r} is out of vocabulary (0 to {len(VOCABULARY) - 1})")
    return tuple(value)


def prompts_of(value: Any, *, add_special_tokens: bool) -> list[tuple[int, ...]]:
    """A string, a list of strings, token ids, or a list of these."""
    first = [BOS] if add_special_tokens else []
    if isinstance(value, str):
        return [(*first, *encode(value))]
    if isinstance(value, list) and value:
        if isinstance(value[0], int):
            return [token_ids(value)]
        if len(value) > PROMPTS_MAX:
            raise HttpProblem(400, f"{len(value)} prompts; at most {PROMPTS_MAX} are allowed in one request")
        prompts: list[tuple[int, ...]] = []
        for item in value:
            if not isinstance(item, (str, list)):
                raise HttpProblem(400, "prompt must be a string, token ids, or a list of either")
            prompts += prompts_of(item, add_special_tokens=add_special_tokens)
        return prompts
    raise HttpProblem(400, "prompt must be a string, token ids, or a list of either, and not be empty")


def chat_prompt(reader: BodyReader) -> tuple[str, int]:
    """The text that the chat template makes of `messages`, and how many images they contain."""
    messages = reader.body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HttpProblem(400, "messages must be a list with at least one message")
    parts: list[str] = []
    images = 0
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise HttpProblem(400, "each message must be an object with a role")
        text, pictures = _content(message.get("content"))
        images += pictures
        parts.append(f"<|{message['role']}|>\n{text}")
    if reader.boolean("continue_final_message"):
        return "\n".join(parts), images
    parts.append("<|assistant|>\n" if reader.boolean("add_generation_prompt", True) else "")
    return "\n".join(parts), images


def _content(content: Any) -> tuple[str, int]:
    if content is None:
        return "", 0
    if isinstance(content, str):
        return content, 0
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise HttpProblem(400, "content must be a string or a list of parts")
    texts = [part["text"] for part in content if part.get("type") == "text" and isinstance(part.get("text"), str)]
    return "".join(texts), sum(part.get("type") in _IMAGE_PARTS for part in content)


def grammar_of(reader: BodyReader) -> str:
    """A name for the grammar that the body asks for; empty when it asks for none."""
    kind = reader.object("response_format").text("type")
    if kind and kind != "text":
        return msgspec.json.encode(reader.body["response_format"], order="sorted").decode()
    for name in ("guided_json", "guided_regex", "structured_outputs", "json_schema", "grammar", "regex", "ebnf"):
        if reader.body.get(name):
            return msgspec.json.encode({name: reader.body[name]}, order="sorted").decode()
    return ""


def lora_of(model: str, defaults: CallDefaults) -> str:
    """`base` is the model, `base:NAME` the model with a LoRA adapter; `HttpProblem` 404 for any other name."""
    if not model or model == defaults.model:
        return ""
    base, colon, name = model.partition(":")
    if colon and base == defaults.model and name:
        return name
    raise HttpProblem(404, f"The model `{model}` does not exist.")


# A body becomes a call ------------------------------------------------------------------------------


def parse_call(
    body: Json,
    *,
    chat: bool,
    headers: Mapping[str, str],
    style: Style,
    defaults: CallDefaults,
    config: EngineConfig,
    numbers: random.Random,
    created: int,
) -> Call:
    """The call that `body` asks for; `HttpProblem` when it asks for something impossible."""
    reader = BodyReader(body)
    model = reader.text("model", defaults.model)
    if chat:
        text, images = chat_prompt(reader)
        prompts = [(BOS, *encode(text))]
    else:
        prompts = prompts_of(body.get("prompt"), add_special_tokens=reader.boolean("add_special_tokens", True))
        images = 0
    sequences = reader.integer("n", 1, 1, SEQUENCES_MAX)
    longest = max(map(len, prompts))
    rest = max(1, min(config.max_model_tokens, config.blocks * config.block_tokens) - longest)
    default_tokens = min(rest, defaults.max_tokens) if chat else _COMPLETION_TOKENS
    asked = reader.integer("max_completion_tokens", reader.integer("max_tokens", default_tokens, 1), 1)
    if style.caps_max_tokens:
        asked = min(asked, rest)
    extension = reader.object("refengine")
    reader.number("temperature", 1.0, 0.0, 100.0)
    sampling = SamplingParameters(
        max_tokens=asked,
        n=sequences,
        stop=reader.strings("stop"),
        eos_probability=extension.number("eos_probability", defaults.eos_probability, 0.0, 1.0),
        ignore_eos=reader.boolean("ignore_eos"),
        seed=reader.integer("seed", 0, -(2**63), 2**63 - 1),
    )
    options = reader.object("stream_options")
    stream = reader.boolean("stream")
    detached = style.policy == "llamacpp" and bool(headers.get("x-conversation-id"))
    template = RequestSpec(
        request_id="",
        prompt=(),
        sampling=sampling,
        priority=style.priority_sign * reader.integer("priority", 0, -(2**31)),
        stream=stream,
        lora=lora_of(model, defaults),
        images=images,
        grammar=grammar_of(reader),
        speculative=extension.boolean("speculative", defaults.speculative),
        transfer_steps=extension.integer("transfer_steps", 0, 0, 10_000),
        detached=detached,
    )
    response_id, names = name_call(reader, len(prompts), chat=chat, headers=headers, style=style, numbers=numbers)
    handles = [headers["x-conversation-id"]] * len(prompts) if detached else names
    return Call(
        response_id=response_id,
        model=model,
        created=created,
        stream=stream,
        include_usage=options.boolean("include_usage"),
        continuous_usage=options.boolean("continuous_usage_stats"),
        return_token_ids=reader.boolean("return_token_ids"),
        specs=[
            msgspec.structs.replace(template, request_id=name, prompt=prompt)
            for name, prompt in zip(names, prompts, strict=True)
        ],
        handles=handles,
        sequences=sequences,
        choices=[Choice() for _ in range(len(prompts) * sequences)],
    )


def name_call(
    reader: BodyReader, prompts: int, *, chat: bool, headers: Mapping[str, str], style: Style, numbers: random.Random
) -> tuple[str, list[str]]:
    """The response's id, and the id of each prompt's request, as the imitated server makes them.

    vLLM: `chatcmpl-<X-Request-Id>`, `cmpl-<X-Request-Id>-<prompt index>`. SGLang: the body's `rid` as it
    is (with several prompts, a list or a stem). DeepInfer: the header as it is. Others: random.
    """
    fresh = f"{numbers.getrandbits(128):032x}"
    prefix = "chatcmpl-" if chat else "cmpl-"
    if style.id_from == "rid":
        rid = reader.body.get("rid")
        if isinstance(rid, list):
            if len(rid) != prompts or not all(isinstance(name, str) and name for name in rid):
                raise HttpProblem(400, f"rid must be a string or a list of {prompts} strings")
            return rid[0], list(rid)
        stem = reader.text("rid") or fresh
    elif style.id_from == "header":
        given = headers.get("x-request-id") or fresh
        if style.twins:
            names = [prefix + given] if chat else [f"{prefix}{given}-{index}" for index in range(prompts)]
            return prefix + given, names
        stem = given
    else:
        stem = prefix + fresh
    return stem, [stem] if prompts == 1 else [f"{stem}_{index}" for index in range(prompts)]


# Outputs become chunks ------------------------------------------------------------------------------


class _OpenAiShape:
    """What chat and completions have in common."""

    kind = ""

    def __init__(self, style: Style) -> None:
        self.style = style

    @property
    def done(self) -> bytes:
        return b"data: [DONE]\n\n"

    def closing(self, call: Call) -> list[Json]:
        if not call.include_usage:
            return []
        return [{**self._frame(call), "choices": [], "usage": call.usage()}]

    def chunk(self, call: Call, index: int, output: Output) -> list[Json]:
        style = self.style
        choice = call.choices[index]
        ends = output.finish_reason is not None
        apart = ends and (style.separate_finish or not (output.text or output.token_ids))
        events: list[Json] = []
        if output.text or not (style.skips_empty_text or apart):
            reason = None if apart else output.finish_reason
            events.append(self._event(call, index, self._delta(output.text), reason, choice.take(output.token_ids)))
        else:
            choice.held.extend(output.token_ids)
        if apart:
            events.append(self._event(call, index, self._end_delta(), output.finish_reason, choice.take(())))
        return events

    def _frame(self, call: Call) -> Json:
        return {"id": call.response_id, "object": self.kind, "created": call.created, "model": call.model}

    def _event(self, call: Call, index: int, delta: Json, reason: str | None, tokens: list[int]) -> Json:
        choice: Json = {"index": index, **delta, "logprobs": None, "finish_reason": reason}
        if call.return_token_ids:
            choice["token_ids"] = tokens
        event = {**self._frame(call), "choices": [choice]}
        if call.continuous_usage:
            event["usage"] = call.usage()
        return event

    def _delta(self, text: str) -> Json:
        raise NotImplementedError

    def _end_delta(self) -> Json:
        raise NotImplementedError


class ChatShape(_OpenAiShape):
    """`/v1/chat/completions`."""

    kind = "chat.completion.chunk"

    def opening(self, call: Call, index: int) -> list[Json]:
        event = self._event(call, index, {"delta": {"role": "assistant", "content": ""}}, None, [])
        if call.return_token_ids:
            event["prompt_token_ids"] = list(call.specs[0].prompt)
            event["choices"][0]["token_ids"] = None
        return [event]

    def whole(self, call: Call) -> Json:
        choices = []
        for index, choice in enumerate(call.choices):
            message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
            choices.append(
                {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}
            )
            if call.return_token_ids:
                choices[-1]["token_ids"] = choice.token_ids
        answer = {**self._frame(call), "object": "chat.completion", "choices": choices, "usage": call.usage()}
        if call.return_token_ids:
            answer["prompt_token_ids"] = list(call.specs[0].prompt)
        return answer

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def _end_delta(self) -> Json:
        return {"delta": {}}


class CompletionShape(_OpenAiShape):
    """`/v1/completions`."""

    kind = "text_completion"

    def opening(self, call: Call, index: int) -> list[Json]:
        return []

    def chunk(self, call: Call, index: int, output: Output) -> list[Json]:
        events = super().chunk(call, index, output)
        if call.return_token_ids and events and not call.choices[index].prompt_said:
            call.choices[index].prompt_said = True
            events[0]["choices"][0]["prompt_token_ids"] = list(call.specs[index // call.sequences].prompt)
        return events

    def whole(self, call: Call) -> Json:
        choices = []
        for index, choice in enumerate(call.choices):
            choices.append(
                {
                    "index": index,
                    "text": "".join(choice.text),
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
            )
            if call.return_token_ids:
                choices[-1]["token_ids"] = choice.token_ids
                choices[-1]["prompt_token_ids"] = list(call.specs[index // call.sequences].prompt)
        return {**self._frame(call), "choices": choices, "usage": call.usage()}

    def _delta(self, text: str) -> Json:
        return {"text": text}

    def _end_delta(self) -> Json:
        return {"text": ""}
