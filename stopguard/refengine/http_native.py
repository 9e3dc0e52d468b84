"""The routes that are not OpenAI's: SGLang's `/generate` and llama.cpp's `/completion`.

Both take prompts as text or token ids and say token ids back, which is what an exact resume needs.
SGLang's chunks are cumulative (`text` and `output_ids` so far), llama.cpp's are increments.
Shapes: SGLang 0.5.23 `io_struct.GenerateReqInput`; llama.cpp build 10068 `tools/server/README.md`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from stopguard.refengine.http_openai import (
    BodyReader,
    Call,
    CallDefaults,
    Choice,
    Json,
    grammar_of,
    name_call,
    prompts_of,
    token_ids,
)
from stopguard.refengine.http_styles import HttpProblem, Style
from stopguard.refengine.interface import EngineConfig, Output, RequestSpec, SamplingParameters

__all__ = ["GenerateShape", "LlamaShape", "parse_generate", "parse_llama"]


def parse_generate(body: Json, *, style: Style, defaults: CallDefaults, numbers: random.Random, created: int) -> Call:
    """SGLang's `/generate`: `text` or `input_ids`, `sampling_params`, `rid`, `stream`, `lora_path`, `image_data`."""
    reader = BodyReader(body)
    given = body.get("input_ids")
    if given is None:
        given = body.get("text")
    prompts = prompts_of(given, add_special_tokens=True)
    parameters = reader.object("sampling_params")
    extension = reader.object("refengine")
    sequences = parameters.integer("n", 1, 1, 128)
    stream = reader.boolean("stream")
    images = body.get("image_data")
    lora = body.get("lora_path")
    sampling = SamplingParameters(
        max_tokens=parameters.integer("max_new_tokens", 128, 1),
        n=sequences,
        stop=parameters.strings("stop"),
        eos_probability=extension.number("eos_probability", defaults.eos_probability, 0.0, 1.0),
        ignore_eos=parameters.boolean("ignore_eos"),
        seed=parameters.integer("sampling_seed", 0, -(2**63), 2**63 - 1),
    )
    response_id, names = name_call(reader, len(prompts), chat=False, headers={}, style=style, numbers=numbers)
    specs = [
        RequestSpec(
            request_id=name,
            prompt=prompt,
            sampling=sampling,
            priority=style.priority_sign * reader.integer("priority", 0, -(2**31)),
            stream=stream,
            lora=lora if isinstance(lora, str) else "",
            images=0 if images is None else len(images) if isinstance(images, list) else 1,
            grammar=grammar_of(parameters),
            speculative=extension.boolean("speculative", defaults.speculative),
            transfer_steps=extension.integer("transfer_steps", 0, 0, 10_000),
        )
        for name, prompt in zip(names, prompts, strict=True)
    ]
    return Call(
        response_id=response_id,
        model=defaults.model,
        created=created,
        stream=stream,
        include_usage=False,
        continuous_usage=False,
        return_token_ids=reader.boolean("return_prompt_token_ids"),
        specs=specs,
        handles=names,
        sequences=sequences,
        choices=[Choice() for _ in range(len(prompts) * sequences)],
    )


class GenerateShape:
    """One object a choice; a list when there are several."""

    def __init__(self, style: Style) -> None:
        self.style = style

    @property
    def done(self) -> bytes:
        return b"data: [DONE]\n\n"

    def opening(self, call: Call, index: int) -> list[Json]:
        return []

    def chunk(self, call: Call, index: int, output: Output) -> list[Json]:
        event = self._object(call, index)
        if len(call.choices) > 1:
            event["index"] = index
        return [event]

    def closing(self, call: Call) -> list[Json]:
        return []

    def whole(self, call: Call) -> Any:
        objects = [self._object(call, index) for index in range(len(call.choices))]
        return objects[0] if len(objects) == 1 else objects

    def _object(self, call: Call, index: int) -> Json:
        choice = call.choices[index]
        spec = call.specs[index // call.sequences]
        match choice.finish_reason:
            case None:
                finish: Json | None = None
            case "length":
                finish = {"type": "length", "length": len(choice.token_ids)}
            case "abort":
                finish = {"type": "abort", "message": "Aborted by AbortReq."}
            case reason:
                finish = {"type": reason}
        answer: Json = {
            "text": "".join(choice.text),
            "output_ids": choice.token_ids.copy(),
            "meta_info": {
                "id": spec.request_id,
                "finish_reason": finish,
                "prompt_tokens": len(spec.prompt),
                "completion_tokens": len(choice.token_ids),
                "cached_tokens": choice.usage.cached_tokens if choice.usage else 0,
                "weight_version": "default",
            },
        }
        if call.return_token_ids:
            answer["prompt_token_ids"] = list(spec.prompt)
        return answer


def parse_llama(
    body: Json,
    *,
    headers: Mapping[str, str],
    style: Style,
    defaults: CallDefaults,
    config: EngineConfig,
    numbers: random.Random,
    created: int,
) -> Call:
    """llama.cpp's `/completion`: `prompt`, `n_predict`, `stop`, `stream`, `return_tokens`, `seed`."""
    reader = BodyReader(body)
    given = body.get("prompt")
    if (
        isinstance(given, list)
        and any(isinstance(item, str) for item in given)
        and not all(isinstance(item, str) for item in given)
    ):
        raise HttpProblem(400, "a prompt of mixed strings and token ids is not supported: give one or the other")
    prompts = prompts_of(given, add_special_tokens=True) if given != [] else [token_ids([])]
    longest = max(map(len, prompts))
    rest = max(1, min(config.max_model_tokens, config.blocks * config.block_tokens) - longest)
    extension = reader.object("refengine")
    asked = reader.integer("n_predict", -1, -1)
    conversation = headers.get("x-conversation-id", "")
    sampling = SamplingParameters(
        max_tokens=min(rest, defaults.max_tokens if asked < 0 else max(1, asked)),
        stop=reader.strings("stop"),
        eos_probability=extension.number("eos_probability", defaults.eos_probability, 0.0, 1.0),
        ignore_eos=reader.boolean("ignore_eos"),
        seed=reader.integer("seed", 0, -(2**63), 2**63 - 1),
    )
    response_id, names = name_call(reader, len(prompts), chat=False, headers=headers, style=style, numbers=numbers)
    template = RequestSpec(
        request_id="",
        prompt=(),
        sampling=sampling,
        stream=reader.boolean("stream"),
        grammar=grammar_of(reader),
        speculative=extension.boolean("speculative", defaults.speculative),
        detached=bool(conversation),
    )
    return Call(
        response_id=response_id,
        model=defaults.model,
        created=created,
        stream=template.stream,
        include_usage=False,
        continuous_usage=False,
        return_token_ids=reader.boolean("return_tokens"),
        specs=[
            msgspec.structs.replace(template, request_id=name, prompt=prompt)
            for name, prompt in zip(names, prompts, strict=True)
        ],
        handles=[conversation] * len(prompts) if conversation else names,
        sequences=1,
        choices=[Choice() for _ in prompts],
    )


class LlamaShape:
    """Increments, a last object with totals, and no `[DONE]`."""

    def __init__(self, style: Style) -> None:
        self.style = style

    @property
    def done(self) -> bytes:
        return b""

    def opening(self, call: Call, index: int) -> list[Json]:
        return []

    def chunk(self, call: Call, index: int, output: Output) -> list[Json]:
        events: list[Json] = []
        choice = call.choices[index]
        if output.text:
            tokens = choice.take(output.token_ids)
            events.append(
                {
                    "index": index,
                    "content": output.text,
                    "tokens": tokens if call.return_token_ids else [],
                    "stop": False,
                    "id_slot": -1,
                    "tokens_predicted": len(call.choices[index].token_ids),
                    "tokens_evaluated": len(call.specs[index].prompt),
                }
            )
        else:
            choice.held.extend(output.token_ids)
        if output.finish_reason is not None:
            tokens = choice.take(())
            events.append(self._last(call, index, content="", tokens=tokens if call.return_token_ids else []))
        return events

    def closing(self, call: Call) -> list[Json]:
        return []

    def whole(self, call: Call) -> Any:
        objects = []
        for index, choice in enumerate(call.choices):
            tokens = choice.token_ids if call.return_token_ids else []
            objects.append(self._last(call, index, content="".join(choice.text), tokens=tokens))
        return objects[0] if len(objects) == 1 else objects

    def _last(self, call: Call, index: int, *, content: str, tokens: list[int]) -> Json:
        choice = call.choices[index]
        spec = call.specs[index]
        stopped_by = {"length": "limit", "stop": "word" if spec.sampling.stop else "eos"}
        return {
            "index": index,
            "content": content,
            "tokens": tokens,
            "id_slot": -1,
            "stop": True,
            "model": call.model,
            "tokens_predicted": len(choice.token_ids),
            "tokens_evaluated": len(spec.prompt),
            "truncated": False,
            "stop_type": stopped_by.get(choice.finish_reason or "", "none"),
            "tokens_cached": choice.usage.cached_tokens if choice.usage else 0,
        }
