"""The seam between two incarnations, and the one voice of both."""

from __future__ import annotations

from typing import Any

import pytest

from stopguard.engines.resumption import Ask, AskKind, EngineUsage, Piece
from stopguard.preemption.marks import UNREPORTED, Mark, Overlap
from stopguard.preemption.stitch import Fresh, Seam, SeamMismatch, Voice


def seam(ids: list[int], text: str) -> Seam:
    return Seam(Overlap(Mark(5, 9), ids, text))


def fresh(one: Seam, ids: list[int], text: str, **more: Any) -> tuple[list[int], str]:
    found = one.feed(Piece(token_ids=ids, text=text, **more))
    return list(found.token_ids), found.text


def test_what_was_delivered_is_dropped_and_the_rest_passes() -> None:
    one = seam([7, 8], "ab")
    seen = []
    for ids, text in (([7], "a"), ([8], "b"), ([9], "c")):
        seen.append((*fresh(one, ids, text), one.closed))
    assert seen == [([], "", False), ([], "", True), ([9], "c", True)]


def test_a_chunk_across_the_seam_is_divided() -> None:
    one = seam([7], "a")
    found = one.feed(Piece(token_ids=[7, 9], text="ac", logprobs=["old", "new"]))
    assert (list(found.token_ids), found.text, found.logprobs) == ([9], "c", ["new"])


def test_another_token_is_a_mismatch() -> None:
    one = seam([7, 8], "ab")
    one.feed(Piece(token_ids=[7], text="a"))
    with pytest.raises(SeamMismatch, match="token 7 is 9 now and was 8") as caught:
        one.feed(Piece(token_ids=[9], text="b"))
    assert not caught.value.text_only


def test_another_text_is_a_mismatch_of_the_text_only() -> None:
    with pytest.raises(SeamMismatch) as caught:
        seam([7], "ab").feed(Piece(token_ids=[7], text="b"))
    assert caught.value.text_only


def test_an_end_before_the_seam_is_a_mismatch() -> None:
    with pytest.raises(SeamMismatch, match="after 1 of the 2 tokens"):
        seam([7, 8], "ab").feed(Piece(token_ids=[7], text="a", finish_reason="stop"))


def test_text_that_had_been_held_back_comes_when_it_is_whole() -> None:
    one = seam([7, 8], "a")
    assert fresh(one, [7], "a") == ([], "")
    assert fresh(one, [8], "") == ([], "")
    assert one.closed
    assert fresh(one, [9], "é") == ([9], "é")


def test_ids_that_nobody_reported_are_not_compared_and_are_counted() -> None:
    one = seam([UNREPORTED, 8], "é")
    assert fresh(one, [8], "é", position=2) == ([], "")
    found = one.feed(Piece(token_ids=[9], text="→", position=5))
    assert found.position == 10


def test_an_empty_overlap_is_closed_from_the_beginning() -> None:
    one = seam([], "")
    assert one.closed
    assert fresh(one, [1], "x") == ([1], "x")


# ---- the voice ---------------------------------------------------------------------------------------

CHAT = Ask(kind=AskKind.CHAT, path="/v1/chat/completions", fields={"stream_options": {"include_usage": True}})
TEXT = Ask(kind=AskKind.COMPLETIONS, path="/v1/completions", fields={})
BASE = {"id": "one", "object": "chat.completion.chunk", "created": 5, "model": "m", "system_fingerprint": "f"}


def heard(ask: Ask, choice: dict[str, Any]) -> Voice:
    voice = Voice(ask)
    opening = {**BASE, "choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1]}
    voice.hear(Piece(event=opening, opening=True))
    logprobs = [{"tokens": " be", "text_offset": 4}] if ask.kind is AskKind.COMPLETIONS else None
    event = {**BASE, "choices": [choice], "usage": None}
    voice.hear(Piece(event=event, token_ids=[3], text="be", logprobs=logprobs))
    return voice


def test_a_later_incarnation_speaks_as_the_first() -> None:
    voice = heard(CHAT, {"index": 0, "delta": {"content": "be"}, "logprobs": None, "finish_reason": None})
    said = voice.say(Fresh([4], "c"), Piece(token_ids=[4], text="c"))
    assert said == {
        **BASE,
        "choices": [{"index": 0, "delta": {"content": "c"}, "logprobs": None, "finish_reason": None}],
    }
    end = voice.say(Fresh([], ""), Piece(finish_reason="stop", stop_detail={"stop_reason": 2}))
    assert end is not None
    assert end["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": 2,
    }  # fmt: skip
    assert voice.say(Fresh([], ""), Piece()) is None


def test_usage_is_of_the_whole_answer() -> None:
    voice = heard(CHAT, {"index": 0, "delta": {"content": "be"}})
    usage = voice.usage(EngineUsage(prompt_tokens=12, completion_tokens=3, cached_tokens=9), 2)
    assert usage == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    assert voice.usage_event(usage, Piece()) == {**BASE, "choices": [], "usage": usage}


def test_text_offsets_go_on_where_they_ended() -> None:
    voice = heard(TEXT, {"index": 0, "text": "be", "logprobs": {"tokens": [" be"], "text_offset": [4]}})
    entries = [{"tokens": "x", "text_offset": 1, "token_logprobs": -1.0}, {"tokens": "yz", "text_offset": 2}]
    said = voice.say(Fresh([4, 5], "xyz", entries), Piece(token_ids=[4, 5], text="xyz"))
    assert said is not None
    assert said["choices"][0]["logprobs"]["text_offset"] == [7, 8]
    more = voice.say(Fresh([6], "w", [{"tokens": "w", "text_offset": 4}]), Piece(token_ids=[6], text="w"))
    assert more is not None
    assert more["choices"][0]["logprobs"]["text_offset"] == [10]


def test_an_answer_of_which_nothing_was_heard_is_learnt_from_the_continuation() -> None:
    voice = Voice(CHAT)
    event = {**BASE, "choices": [{"index": 0, "delta": {"content": "ab"}, "finish_reason": None}]}
    said = voice.say(Fresh([2], "b"), Piece(event=event, token_ids=[1, 2], text="ab"))
    assert said == {**BASE, "choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": None}]}
