"""Where a stream can be cut, and what is generated again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopguard.errors import LimitReached
from stopguard.preemption.marks import UNREPORTED, Mark, Transcript
from stopguard.refengine.model import TextAssembler, decode, encode


def transcript(*pieces: tuple[list[int], str], limit: int = 1000) -> Transcript:
    made = Transcript(limit)
    for ids, text in pieces:
        made.deliver(ids, text)
    return made


def test_nothing_delivered_begins_at_the_prompt() -> None:
    overlap = Transcript(10).overlap()
    assert (overlap.mark, list(overlap.token_ids), overlap.text) == (Mark(0, 0), [], "")


def test_the_mark_before_the_last_one_leaves_something_to_compare() -> None:
    overlap = transcript(([1], "a"), ([2], "bc"), ([3], "d")).overlap()
    assert (overlap.mark, list(overlap.token_ids), overlap.text) == (Mark(2, 3), [3], "d")


def test_a_token_without_text_is_no_mark() -> None:
    overlap = transcript(([1], "a"), ([2], "b"), ([3], ""), ([4], "é"), ([5], "")).overlap()
    assert (overlap.mark, list(overlap.token_ids), overlap.text) == (Mark(2, 2), [3, 4, 5], "é")


def test_a_chunk_of_several_tokens_is_no_mark() -> None:
    overlap = transcript(([1], "a"), ([2, 3], "bc"), ([4], "d"), ([5, 6], "e")).overlap()
    assert (overlap.mark, list(overlap.token_ids), overlap.text) == (Mark(1, 1), [2, 3, 4, 5, 6], "bcde")


def test_a_replacement_character_is_no_mark() -> None:
    assert transcript(([1], "a"), ([2], "\ufffd")).last_mark == Mark(1, 1)


def test_further_back_and_never_before_the_oldest_mark() -> None:
    made = transcript(*(([number], "x") for number in range(1, 21)))
    assert made.overlap(steps_back=1).mark.tokens == made.overlap().mark.tokens - 1 == 18
    assert made.overlap(steps_back=99).mark.tokens == 13
    assert made.overlap(steps_back=99).text == "x" * 7


def test_the_end_of_the_text_for_what_is_sampled() -> None:
    made = transcript(([1], "a"), ([2, 3], "bc"), ([4], ""))
    assert made.end_of_text().mark == Mark(3, 3)
    assert made.cut_back(Mark(3, 3)) == 1
    assert made.tokens == 3


def test_a_longer_answer_is_not_kept() -> None:
    made = transcript(([1, 2], "ab"), limit=3)
    with pytest.raises(LimitReached):
        made.deliver([3, 4], "cd")
    assert made.tokens == 2


def test_ids_that_were_left_out_are_found_by_the_engines_count() -> None:
    made = transcript(([1], "a"))
    made.deliver([4], "é", position=4)
    made.deliver([5], "b", position=5)
    assert list(made.token_ids) == [1, UNREPORTED, UNREPORTED, 4, 5]
    assert made.gap(1) is None
    assert made.gap(3) == made.gap(5) == (1, 3)
    assert not made.fill(1, [2, 3, 9])
    assert made.gap(5) == (1, 3), "a wrong answer changes nothing"
    assert made.fill(1, [2, 3, 4])
    assert made.gap(5) is None
    assert list(made.token_ids) == [1, 2, 3, 4, 5]


@given(st.text(alphabet="aé→🙂 the", min_size=1, max_size=40), st.data())
def test_a_detokenizer_that_begins_at_a_mark_gives_the_same_text(text: str, data: st.DataObject) -> None:
    """The reference engine's own detokenizer, cut anywhere, characters of several tokens included."""
    ids = encode(text)
    assembler = TextAssembler()
    made = Transcript(10_000)
    cut = data.draw(st.integers(0, len(ids)))
    for token in ids[:cut]:
        made.deliver([token], assembler.add(token))
    overlap = made.overlap()
    again = TextAssembler()
    rest = "".join(again.add(token) for token in ids[overlap.mark.tokens :])
    before = decode(ids[: overlap.mark.tokens])
    assert len(before) == overlap.mark.characters
    assert before + rest + again.flush() == text
    assert rest.startswith(overlap.text)
