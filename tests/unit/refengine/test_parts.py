"""Slots, the tokenizer and its text, the transition table, the waiting queue."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopguard.errors import ConfigurationError
from stopguard.refengine import EngineConfig, RequestSpec, decode, encode
from stopguard.refengine.interface import SlotCorrupted
from stopguard.refengine.model import EOS, VOCABULARY, TextAssembler, next_token
from stopguard.refengine.queue import WaitingQueue
from stopguard.refengine.request import PLACES, TRANSITIONS, Event, IllegalMove, Request, State
from stopguard.refengine.slots import SlotPool, SlotPools


def request(name: str = "r", priority: int = 0) -> Request:
    return Request(RequestSpec(name, (300, 301), priority=priority), name, 0, "", 0.0)


class TestSlots:
    def test_a_slot_comes_back_once(self) -> None:
        pool = SlotPool("encoder", 3)
        pool.take("a", 2)
        assert pool.held == pool.places_used == 2
        assert not pool.fits(2)
        with pytest.raises(SlotCorrupted):
            pool.take("b", 2)
        with pytest.raises(SlotCorrupted):
            pool.take("a", 1)
        assert pool.give("a") == 2
        with pytest.raises(SlotCorrupted):
            pool.give("a")
        assert pool.held == pool.places_used == 0

    def test_requests_with_one_adapter_share_its_place(self) -> None:
        pool = SlotPool("lora", 1)
        pool.take("a", 1, "french")
        assert pool.fits(1, "french")
        assert not pool.fits(1, "german")
        pool.take("b", 1, "french")
        assert (pool.held, pool.places_used) == (2, 1)
        pool.give("a")
        assert not pool.fits(1, "german")
        pool.give("b")
        assert pool.fits(1, "german")

    def test_the_pools_have_the_configured_sizes(self) -> None:
        pools = SlotPools(EngineConfig(lora_slots=1, encoder_slots=2, grammar_slots=3, speculative_slots=4))
        assert [pools[kind].size for kind in ("lora", "encoder", "grammar", "speculative")] == [1, 2, 3, 4]
        assert pools.held() == {"lora": 0, "encoder": 0, "grammar": 0, "speculative": 0}


class TestText:
    @given(st.text())
    def test_any_text_survives_its_tokens(self, text: str) -> None:
        ids = encode(text)
        assert decode(ids) == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")

    def test_known_words_are_one_token(self) -> None:
        assert len(encode("the water of the river")) == 5
        assert len(encode("xylophone")) == len("xylophone")

    def test_the_model_speaks_valid_utf8_of_several_lengths(self) -> None:
        tokens = [300]
        for step in range(3000):
            tokens.append(next_token(step * 7919, len(tokens), tokens[-1], 0, 0, structured=False))
        while VOCABULARY[tokens[-1]] in {b"\xc3", b"\xe2", b"\x86", b"\xf0", b"\x9f", b"\x99"}:
            tokens.append(next_token(0, len(tokens), tokens[-1], 0, 0, structured=False))
        text = decode(tokens[1:])
        assert "\ufffd" not in text
        assert {"é", "→", "🙂"} <= set(text)
        assert len(set(tokens)) > 200

    def test_structured_output_keeps_to_its_alphabet(self) -> None:
        said = {decode([next_token(value * 31, 5, 300, 0, 0, structured=True)]) for value in range(500)}
        assert said <= set("0123456789,")

    def test_the_end_comes_as_often_as_asked(self) -> None:
        ends = sum(next_token(value * 104729, 9, 300, 0, 6554, structured=False) == EOS for value in range(4000))
        assert 300 < ends < 500  # 10 %

    def test_bytes_of_an_unfinished_character_are_held_back(self) -> None:
        assembler = TextAssembler()
        pieces = [assembler.add(token) for token in encode("🙂")]
        assert pieces == ["", "", "", "🙂"]
        cut = TextAssembler()
        assert [cut.add(token) for token in encode("é")[:1]] == [""]
        assert cut.flush() == "\ufffd"

    def test_what_may_become_a_stop_string_is_held_back(self) -> None:
        assembler = TextAssembler((" of the",))
        released = [assembler.add(token) for token in encode("the water of stone of the river")]
        assert "".join(released) == "the water of stone"
        assert assembler.stopped
        assert assembler.flush() == ""
        unfinished = TextAssembler((" of the",))
        released = [unfinished.add(token) for token in encode("the water of")]
        assert "".join(released) + unfinished.flush() == "the water of"


class TestTransitions:
    def test_every_state_has_a_row_and_a_place(self) -> None:
        assert set(TRANSITIONS) == set(State) == set(PLACES)
        assert TRANSITIONS[State.GONE] == {}

    @pytest.mark.parametrize("state", State)
    @pytest.mark.parametrize("event", Event)
    def test_what_the_table_lacks_raises_and_changes_nothing(self, state: State, event: Event) -> None:
        subject = request()
        subject.state = state
        following = TRANSITIONS[state].get(event)
        if following is None:
            with pytest.raises(IllegalMove):
                subject.move(event)
            assert subject.state is state
        else:
            assert subject.move(event) is following

    def test_every_state_can_end(self) -> None:
        assert all(Event.END in row for state, row in TRANSITIONS.items() if state is not State.GONE)


class TestQueue:
    def test_front_back_and_priority(self) -> None:
        queue = WaitingQueue(by_priority=True)
        first, second, urgent, back_again = request("1"), request("2"), request("u", 5), request("b")
        for item in (first, second, urgent):
            queue.push_back(item)
        queue.push_front(back_again)
        assert list(queue) == [urgent, back_again, first, second]
        queue.remove(first)
        assert list(queue) == [urgent, back_again, second]
        with pytest.raises(ValueError, match="not waiting"):
            queue.remove(first)

    def test_without_priorities_only_arrival_counts(self) -> None:
        queue = WaitingQueue(by_priority=False)
        first, urgent = request("1"), request("u", 5)
        queue.push_back(first)
        queue.push_back(urgent)
        assert list(queue) == [first, urgent]


@pytest.mark.parametrize(
    "wrong", [{"blocks": 0}, {"pipeline_depth": 0}, {"pipeline_depth": 99}, {"max_batch_tokens": 3}]
)
def test_an_impossible_configuration_is_refused_with_its_name(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        msgspec.structs.replace(EngineConfig(), **wrong).check()
