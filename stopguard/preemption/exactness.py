"""What may be continued at the gateway: exactly, approximately, or never. The table, and its use.

Each row says how a request with one feature goes on from token ids, compared with one that nobody disturbed. A
request's verdict is its worst row. A field that the table does not know makes it NEVER: what is not understood is
not continued. Engines may do better in single rows (`Resumption.exact`), which were then measured there.

Only `EXACT` is done unasked. `APPROXIMATE` needs the client's consent, by the header ``X-StopGuard-Resume:
approximate``; the continuation is then a fair sample, but not the one that would have come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stopguard.engines.resumption import Ask, AskKind, Feature, Resumption
from stopguard.preemption.ways import EXACT, Exactness, Verdict

__all__ = ["TABLE", "Row", "features_of", "judge", "verdict_of"]

Json = dict[str, Any]
Test = Callable[[Ask], bool]


class Row(msgspec.Struct, frozen=True, gc=False):
    """One feature: how it goes on, why, and the body fields by which a request is known to have it."""

    feature: Feature
    exactness: Exactness
    why: str
    fields: tuple[str, ...] = ()


_E, _A, _N = Exactness.EXACT, Exactness.APPROXIMATE, Exactness.NEVER

TABLE: tuple[Row, ...] = (
    Row(Feature.GREEDY, _E, "the same ids give the same next id; the overlap proves it each time"),
    Row(Feature.SAMPLED, _A, "a fair sample goes on, not the same one", ("temperature", "top_p", "top_k", "min_p")),
    Row(Feature.SAMPLED_WITH_SEED, _A, "the engine's random numbers begin anew", ("seed",)),
    Row(Feature.TOKEN_LIMIT, _E, "the rest is asked for", ("max_tokens", "max_completion_tokens")),
    Row(Feature.MIN_TOKENS, _E, "what is left of it is asked for", ("min_tokens",)),
    Row(Feature.STOP_TOKEN_IDS, _E, "looks at one id at a time", ("stop_token_ids", "ignore_eos")),
    Row(Feature.LOGIT_BIAS, _E, "the same for each token", ("logit_bias",)),
    Row(Feature.USAGE, _E, "the gateway adds it up", ("stream_options",)),
    Row(Feature.REPETITION_PENALTY, _N, "counts prompt and output apart", ("repetition_penalty", "repeat_penalty")),
    Row(Feature.COUNT_PENALTIES, _N, "counts the output only", ("presence_penalty", "frequency_penalty")),
    Row(Feature.LOGPROBS, _N, "not known to be bit-equal", ("logprobs",)),
    Row(Feature.TOP_LOGPROBS_OF_CHAT, _N, "cannot be had for ids in a chat's form", ("top_logprobs",)),
    Row(Feature.PROMPT_LOGPROBS, _N, "the prompt is another one the second time", ("prompt_logprobs", "echo")),
    Row(Feature.STOP_STRINGS, _N, "the engine holds text back and forgets it", ("stop", "stop_regex")),
    Row(
        Feature.GRAMMAR,
        _N,
        "the grammar's state is lost",
        (
            *("response_format", "grammar", "json_schema", "regex", "ebnf", "structural_tag", "structured_outputs"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        ),
    ),
    Row(Feature.TOOLS, _N, "the parser's state is lost", ("tools", "functions", "tool_choice", "function_call")),
    Row(Feature.REASONING, _N, "the parser's state is lost (seen in the stream)"),
    Row(Feature.MEDIA, _N, "their places in the prompt cannot be given as ids", ("modalities", "audio", "image_data")),
    Row(Feature.SEVERAL_ANSWERS, _N, "split it into single ones", ("n", "best_of", "use_beam_search")),
    Row(Feature.SEVERAL_PROMPTS, _N, "split it into single ones"),
    Row(Feature.SUFFIX, _N, "comes after the text that is still to be made", ("suffix",)),
    Row(
        Feature.BAD_WORDS,
        _N,
        "looks at several ids at a time",
        ("bad_words", "logits_processors", "custom_logit_processor", "dry_multiplier", "mirostat"),
    ),
    Row(Feature.NOT_STREAMED, _N, "nothing was delivered: send it again instead", ("stream",)),
    Row(Feature.UNKNOWN, _N, "what is not understood is not continued"),
)

_BY_FEATURE = {row.feature: row for row in TABLE}
_KNOWN = frozenset(name for row in TABLE for name in row.fields) | {
    *("model", "messages", "prompt", "user", "metadata", "store", "service_tier", "priority", "request_id"),
    *("add_special_tokens", "skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"),
    *("continue_final_message", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort"),
    *("return_token_ids", "safety_identifier", "prompt_cache_key", "include_stop_str_in_output", "parallel_tool_calls"),
    *("typical_p", "cache_salt"),
}


def _is(value: Any, *nothing: Any) -> bool:
    """Whether a field asks for something: it is there, and is none of the values that mean "not"."""
    # `True` first: for Python it equals 1, which often means "not".
    return value is True or (value is not None and value is not False and value not in nothing)


def _any_of(feature: Feature, *nothing: Any) -> Test:
    names = _BY_FEATURE[feature].fields
    return lambda ask: any(_is(ask.fields.get(name), *nothing) for name in names)


def _greedy(ask: Ask) -> bool:
    temperature = ask.fields.get("temperature")
    return (isinstance(temperature, (int, float)) and temperature == 0) or ask.fields.get("top_k") == 1


def _media(ask: Ask) -> bool:
    messages = ask.fields.get("messages")
    contents = [message.get("content") for message in messages or () if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts) or _any_of(Feature.MEDIA)(
        ask
    )


def _several_prompts(ask: Ask) -> bool:
    prompt = ask.fields.get("prompt")
    if ask.kind is AskKind.CHAT:
        return False
    if isinstance(prompt, list):
        return not prompt or not all(isinstance(token, int) for token in prompt)
    return not isinstance(prompt, str)


_TESTS: tuple[tuple[Feature, Test], ...] = (
    (Feature.GREEDY, _greedy),
    (Feature.SAMPLED, lambda ask: not _greedy(ask) and ask.fields.get("seed") is None),
    (Feature.SAMPLED_WITH_SEED, lambda ask: not _greedy(ask) and ask.fields.get("seed") is not None),
    (Feature.TOKEN_LIMIT, _any_of(Feature.TOKEN_LIMIT)),
    (Feature.MIN_TOKENS, _any_of(Feature.MIN_TOKENS, 0)),
    (Feature.STOP_TOKEN_IDS, _any_of(Feature.STOP_TOKEN_IDS, [])),
    (Feature.LOGIT_BIAS, _any_of(Feature.LOGIT_BIAS, {}, [])),
    (Feature.USAGE, lambda ask: ask.wants_usage),
    (Feature.REPETITION_PENALTY, _any_of(Feature.REPETITION_PENALTY, 1)),
    (Feature.COUNT_PENALTIES, _any_of(Feature.COUNT_PENALTIES, 0)),
    (Feature.LOGPROBS, lambda ask: ask.wants_logprobs),
    (Feature.TOP_LOGPROBS_OF_CHAT, lambda ask: ask.kind is AskKind.CHAT and bool(ask.fields.get("top_logprobs"))),
    (Feature.PROMPT_LOGPROBS, _any_of(Feature.PROMPT_LOGPROBS)),
    (Feature.STOP_STRINGS, _any_of(Feature.STOP_STRINGS, [], "")),
    (Feature.GRAMMAR, _any_of(Feature.GRAMMAR, {"type": "text"}, "", {})),
    (Feature.TOOLS, _any_of(Feature.TOOLS, [], "none", "auto")),
    (Feature.MEDIA, _media),
    (Feature.SEVERAL_ANSWERS, _any_of(Feature.SEVERAL_ANSWERS, 1)),
    (Feature.SEVERAL_PROMPTS, _several_prompts),
    (Feature.SUFFIX, _any_of(Feature.SUFFIX, "")),
    (Feature.BAD_WORDS, _any_of(Feature.BAD_WORDS, [], {}, 0)),
    (Feature.NOT_STREAMED, lambda ask: ask.fields.get("stream") is not True),
)


def features_of(ask: Ask, known_fields: frozenset[str] = frozenset()) -> list[Feature]:
    """The features that a request has, in the table's order. `known_fields` are the engine's own harmless ones."""
    found = [feature for feature, test in _TESTS if test(ask)]
    if any(name not in _KNOWN and name not in known_fields for name in ask.fields):
        found.append(Feature.UNKNOWN)
    return found


def verdict_of(feature: Feature, resumption: Resumption) -> Exactness:
    """One row, at one kind of engine."""
    return Exactness.EXACT if feature in resumption.exact else _BY_FEATURE[feature].exactness


def judge(ask: Ask, resumption: Resumption) -> Verdict:
    """How `ask` goes on at this kind of engine: the worst of its rows, which is the reason."""
    refusal = resumption.refusal(ask)
    if refusal:
        return Verdict(Exactness.NEVER, refusal)
    worst = EXACT
    for feature in features_of(ask, resumption.fields):
        exactness = verdict_of(feature, resumption)
        if exactness < worst.exactness:
            worst = Verdict(exactness, _reason(feature, ask, resumption))
    return worst


def _reason(feature: Feature, ask: Ask, resumption: Resumption) -> str:
    if feature is Feature.UNKNOWN:
        unknown = sorted(name for name in ask.fields if name not in _KNOWN and name not in resumption.fields)
        return f"the field {unknown[0][:60]}"
    return feature.value
