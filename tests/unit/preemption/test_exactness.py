"""The table of what goes on exactly, approximately or never: row by row."""

from __future__ import annotations

from typing import Any

import pytest

from stopguard.engines.resumption import Ask, AskKind, Feature, Resumption
from stopguard.preemption.exactness import TABLE, features_of, judge, verdict_of
from stopguard.preemption.ways import Exactness
from stopguard_llamacpp.resumption import RESUMPTION as LLAMACPP
from stopguard_refengine.resumption import RESUMPTION as REFERENCE
from stopguard_sglang.resumption import RESUMPTION as SGLANG
from stopguard_vllm.resumption import RESUMPTION as VLLM

EXACT, APPROXIMATE, NEVER = Exactness.EXACT, Exactness.APPROXIMATE, Exactness.NEVER
BASE: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0, "max_tokens": 5}


def chat(**fields: Any) -> Ask:
    messages = [{"role": "user", "content": "hi"}]
    return Ask(kind=AskKind.CHAT, path="/v1/chat/completions", fields={**BASE, "messages": messages, **fields})


def text(**fields: Any) -> Ask:
    return Ask(kind=AskKind.COMPLETIONS, path="/v1/completions", fields={**BASE, "prompt": "hi", **fields})


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]

ROWS: list[tuple[Feature, Ask, Exactness]] = [
    (Feature.GREEDY, chat(), EXACT),
    (Feature.GREEDY, text(temperature=0.9, top_k=1), EXACT),
    (Feature.SAMPLED, chat(temperature=0.7), APPROXIMATE),
    (Feature.SAMPLED, chat(temperature=None), APPROXIMATE),
    (Feature.SAMPLED_WITH_SEED, chat(temperature=0.7, seed=3), APPROXIMATE),
    (Feature.TOKEN_LIMIT, chat(max_completion_tokens=7), EXACT),
    (Feature.MIN_TOKENS, chat(min_tokens=3), EXACT),
    (Feature.STOP_TOKEN_IDS, chat(stop_token_ids=[7]), EXACT),
    (Feature.STOP_TOKEN_IDS, chat(ignore_eos=True), EXACT),
    (Feature.LOGIT_BIAS, chat(logit_bias={"7": -100}), EXACT),
    (Feature.USAGE, chat(stream_options={"include_usage": True}), EXACT),
    (Feature.LOGPROBS, text(logprobs=0), NEVER),
    (Feature.LOGPROBS, chat(logprobs=True), NEVER),
    (Feature.TOP_LOGPROBS_OF_CHAT, chat(logprobs=True, top_logprobs=2), NEVER),
    (Feature.PROMPT_LOGPROBS, text(echo=True), NEVER),
    (Feature.PROMPT_LOGPROBS, text(prompt_logprobs=1), NEVER),
    (Feature.REPETITION_PENALTY, chat(repetition_penalty=1.1), NEVER),
    (Feature.COUNT_PENALTIES, chat(presence_penalty=0.5), NEVER),
    (Feature.COUNT_PENALTIES, chat(frequency_penalty=-0.5), NEVER),
    (Feature.STOP_STRINGS, chat(stop="x"), NEVER),
    (Feature.STOP_STRINGS, chat(stop=["x"]), NEVER),
    (Feature.GRAMMAR, chat(response_format={"type": "json_object"}), NEVER),
    (Feature.GRAMMAR, chat(structured_outputs={"regex": "a"}), NEVER),
    (Feature.TOOLS, chat(tools=[{"type": "function"}]), NEVER),
    (Feature.TOOLS, chat(tool_choice="required"), NEVER),
    (Feature.MEDIA, chat(messages=IMAGE), NEVER),
    (Feature.MEDIA, chat(modalities=["audio"]), NEVER),
    (Feature.SEVERAL_ANSWERS, chat(n=2), NEVER),
    (Feature.SEVERAL_ANSWERS, text(best_of=3), NEVER),
    (Feature.SEVERAL_ANSWERS, text(use_beam_search=True), NEVER),
    (Feature.SEVERAL_PROMPTS, text(prompt=["a", "b"]), NEVER),
    (Feature.SEVERAL_PROMPTS, text(prompt=[[1, 2], [3]]), NEVER),
    (Feature.SUFFIX, text(suffix="x"), NEVER),
    (Feature.BAD_WORDS, chat(bad_words=["x"]), NEVER),
    (Feature.NOT_STREAMED, chat(stream=False), NEVER),
    (Feature.UNKNOWN, chat(brand_new=1), NEVER),
]


@pytest.mark.parametrize(("feature", "ask", "exactness"), ROWS)
def test_row(feature: Feature, ask: Ask, exactness: Exactness) -> None:
    assert feature in features_of(ask)
    assert verdict_of(feature, REFERENCE) is exactness
    verdict = judge(ask, REFERENCE)
    assert verdict.exactness is exactness
    if exactness is not EXACT:
        assert verdict.reason


def test_each_row_has_its_test_but_the_one_that_only_the_stream_shows() -> None:
    assert {row.feature for row in TABLE} == set(Feature)
    assert {feature for feature, _, _ in ROWS} == set(Feature) - {Feature.REASONING}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"stop": None},
        {"stop": []},
        {"stop": ""},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"repetition_penalty": 1.0},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tool_choice": "auto"},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"echo": False},
        {"suffix": None},
        {"min_tokens": 0},
        {"user": "me"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
def test_what_asks_for_nothing_does_not_count(fields: dict[str, Any]) -> None:
    assert judge(chat(**fields), REFERENCE).exactness is EXACT


def test_the_worst_row_decides_and_is_named() -> None:
    verdict = judge(chat(temperature=0.5, stop="x", seed=1), REFERENCE)
    assert (verdict.exactness, verdict.reason) == (NEVER, Feature.STOP_STRINGS.value)
    assert judge(chat(zzz=1, brand_new=1), REFERENCE).reason == "the field brand_new"


@pytest.mark.parametrize(
    ("resumption", "ask", "exactness"),
    [
        (VLLM, text(logprobs=2), EXACT),
        (VLLM, chat(logprobs=True), EXACT),
        (VLLM, chat(logprobs=True, top_logprobs=2), NEVER),
        (VLLM, chat(repetition_penalty=1.2), EXACT),
        (VLLM, chat(presence_penalty=0.2), NEVER),
        (VLLM, chat(kv_transfer_params={"x": 1}), NEVER),
        (LLAMACPP, chat(presence_penalty=0.2), EXACT),
        (LLAMACPP, chat(repeat_penalty=1.2), EXACT),
        (LLAMACPP, chat(logprobs=True), NEVER),
        (LLAMACPP, chat(return_progress=True), NEVER),
        (SGLANG, chat(repetition_penalty=1.2), NEVER),
        (SGLANG, chat(max_tokens=None), NEVER),
        (SGLANG, text(max_tokens=None), EXACT),
        (SGLANG, chat(return_token_ids=True), NEVER),
    ],
)
def test_what_single_engines_do_otherwise(resumption: Resumption, ask: Ask, exactness: Exactness) -> None:
    assert judge(ask, resumption).exactness is exactness
