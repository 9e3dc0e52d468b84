"""Reading replies: streamed and whole, in pieces, broken off, and with errors."""

from __future__ import annotations

import pytest

from stopguard.audit.world import Answer, Reply


def stream(*parts: bytes) -> Reply:
    reply = Reply(stream=True)
    reply.head(200, 1.0)
    for number, part in enumerate(parts):
        reply.data(part, 2.0 + number)
    return reply


def test_events_are_read_however_they_are_cut() -> None:
    body = (
        b'data: {"id":"c-1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"id":"c-1","choices":[{"index":0,"delta":{"content":"one "}}]}\n\n'
        b'data: {"id":"c-1","choices":[{"index":1,"delta":{"content":"other"}}]}\r\n\r\n'
        b'data: {"id":"c-1","choices":[{"index":0,"delta":{"content":"two"},"finish_reason":"length"}],'
        b'"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 7, len(body)):
        reply = stream(*(body[start : start + size] for start in range(0, len(body), size)))
        reply.end(9.0)
        assert (reply.text, reply.texts[1], reply.events) == ("one two", "other", 3)
        assert reply.reasons == {0: "length"}
        assert (reply.response_id, reply.completion_tokens, reply.complete) == ("c-1", 2, True)


def test_the_first_byte_is_the_first_text_not_the_first_event() -> None:
    reply = stream(
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    )
    assert (reply.head_at, reply.first_at, reply.last_at) == (1.0, 3.0, 3.0)


def test_a_whole_answer_and_an_error() -> None:
    whole = Reply(stream=False)
    whole.head(200, 1.0)
    whole.data(b'{"id":"x","choices":[{"index":0,"text":"all of it","finish_reason":"stop"}]}', 2.0)
    whole.end(2.0)
    assert (whole.text, whole.reasons[0]) == ("all of it", "stop")
    refused = Reply(stream=True)
    refused.head(404, 1.0)
    refused.data(b'{"object":"error","message":"no such model"}', 1.0)
    refused.end(1.0)
    assert refused.errors == ["no such model"]


def test_the_end_comes_once() -> None:
    reply = stream(b"data: [DONE]\n\n")
    reply.end(4.0)
    reply.fail("reset", 5.0)
    assert (reply.ended_at, reply.failure, reply.complete) == (4.0, "", True)
    broken = stream(b"data: {")
    broken.fail("reset", 5.0)
    broken.end(6.0)
    assert (broken.ended_at, broken.failure, broken.complete) == (5.0, "reset", False)


@pytest.mark.parametrize("body", [b"", b"not json", b"\xff"])
def test_an_answer_that_is_no_json(body: bytes) -> None:
    assert Answer(status=200, body=body).json() is None
