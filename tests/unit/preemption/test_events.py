"""Server-sent events, in whatever pieces they come."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopguard.errors import LimitReached
from stopguard.preemption.events import EventSplitter, data_of, event_of

STREAM = b': hello\n\ndata: {"a": "\\n\\n"}\r\n\r\nevent: x\ndata: 1\ndata: 2\n\ndata:[DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_the_pieces_do_not_matter(cuts: list[int]) -> None:
    splitter = EventSplitter()
    edges = [0, *sorted(cuts), len(STREAM)]
    events: list[bytes] = []
    for start, end in itertools.pairwise(edges):
        events += splitter.feed(STREAM[start:end])
    assert b"".join(events) == STREAM
    assert [data_of(event) for event in events] == [None, b'{"a": "\\n\\n"}', b"1\n2", b"[DONE]"]
    assert splitter.rest == b""


def test_an_event_without_end_has_a_limit() -> None:
    splitter = EventSplitter(limit=10)
    splitter.feed(b"data: 1234")
    with pytest.raises(LimitReached):
        splitter.feed(b"5")


def test_an_event_of_ours_is_read_back() -> None:
    assert data_of(event_of(b"[DONE]")) == b"[DONE]"
