"""Heads: what goes on, what is ours, and the memory of heads that were seen before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopguard.gateway.head import HeaderRules, HeadRejected, ResponseHeadError, read_request, read_response
from stopguard.gateway.seen_heads import SeenHeads, cut_length
from stopguard.gateway.settings import Limits
from tests.unit.gateway.bench import Bench, parse

RULES = HeaderRules()
HOST = (b"Host", b"a")


def read(*headers: tuple[bytes, bytes], method: bytes = b"POST", target: bytes = b"/x?y=1", version: str = "1.1"):  # type: ignore[no-untyped-def]
    return read_request(method, target, version, [HOST, *headers], Limits(), RULES)


def test_what_is_the_clients_goes_on_as_it_came() -> None:
    head = read((b"X-Mixed-Case", b"  kept as is\t"), (b"traceparent", b"00-1"), (b"User-Agent", b"\xe9"))
    assert head.forward == b"X-Mixed-Case:   kept as is\t\r\ntraceparent: 00-1\r\nUser-Agent: \xe9\r\n"
    assert head.path == "/x"
    assert head.target == b"/x?y=1"


def test_credentials_are_the_identity() -> None:
    assert read((b"Authorization", b"Bearer  abc ")).credential == b"abc"
    assert read((b"authorization", b"Basic abc")).credential == b"Basic abc"
    assert read((b"X-Api-Key", b"abc")).credential == b"abc"
    both = read((b"Authorization", b"Bearer a"), (b"x-api-key", b"b"))
    assert both.credential == b"a\nb"
    assert both.credential_lines == b"Authorization: Bearer a\r\nx-api-key: b\r\n"
    assert both.forward == b""


@pytest.mark.parametrize("alias", [b"has space", b"a\xe9", b"x" * 129, b"", b'quote"'])
def test_an_odd_alias_is_forgotten_not_refused(alias: bytes) -> None:
    head = read((b"X-Request-Id", alias))
    assert head.alias == ""
    assert head.forward == b""


def test_keep_alive_by_version_and_wish() -> None:
    assert read().keep_alive
    assert not read((b"Connection", b"close")).keep_alive
    assert not read(version="1.0").keep_alive
    assert read((b"connection", b"Keep-Alive"), version="1.0").keep_alive
    assert not read((b"Connection", b"keep-alive"), (b"Connection", b"Close")).keep_alive


def test_engines_may_own_more_headers() -> None:
    rules = HeaderRules(["X-Priority", "Authorization"])
    head = read_request(
        b"GET", b"/", "1.1", [HOST, (b"x-priority", b"9"), (b"Authorization", b"Bearer a")], Limits(), rules
    )
    assert head.forward == b""
    # What identifies the client is still read.
    assert head.credential == b"a"


def test_the_memory_of_names_is_bounded() -> None:
    rules = HeaderRules()
    limits = Limits(header_count=10_000)
    for start in range(0, 9000, 1000):
        names = [(b"x-%d" % number, b"") for number in range(start, start + 1000)]
        read_request(b"GET", b"/", "1.1", [HOST, *names], limits, rules)
    assert len(rules.request_names) <= 4096


def test_methods_with_a_body_always_say_its_length() -> None:
    assert read().ending(0) == b"content-length: 0\r\n\r\n"
    assert read(method=b"GET").ending(0) == b"\r\n"
    assert read(method=b"GET").ending(3) == b"content-length: 3\r\n\r\n"


def test_a_response_keeps_what_is_the_engines() -> None:
    head = read_response(
        200,
        b"Fine",
        [
            *((b"Content-Type", b"text/event-stream; charset=utf-8"), (b"X-A", b"1"), (b"Connection", b"close, X-B")),
            *((b"X-B", b"2"), (b"X-Request-Id", b"theirs"), (b"X-StopGuard-Id", b"forged"), (b"Set-Cookie", b"c")),
            (b"Content-Length", b"5"),
        ],
        RULES,
        keep_alive=True,
    )
    assert head.opening == (
        b"HTTP/1.1 200 Fine\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-A: 1\r\nSet-Cookie: c\r\n"
    )
    assert head.event_stream
    assert not head.keep_alive
    assert head.length == 5


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Content-Length", b"1"), (b"Content-Length", b"1")],
        [(b"Content-Length", b"x")],
        [(b"Transfer-Encoding", b"gzip, chunked")],
        [(b"Transfer-Encoding", b"chunked"), (b"Content-Length", b"1")],
        [(b"Bad Name", b"1")],
    ],
)
def test_a_response_that_two_could_read_differently_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(ResponseHeadError):
        read_response(200, b"OK", headers, RULES, keep_alive=True)


# ---- heads seen before ---------------------------------------------------------------------------


@given(st.integers(0, 10**14), st.integers(0, 10**14), st.sampled_from([b"Content-Length", b"content-length"]))
def test_only_the_digits_are_cut(first: int, second: int, name: bytes) -> None:
    raw = b"POST / HTTP/1.1\r\nHost: a\r\n%b: %d\r\nX: y\r\n\r\n"
    key, length = cut_length(raw % (name, first))
    other, other_length = cut_length(raw % (name, second))
    assert key == other
    assert (length, other_length) == (first, second)


@pytest.mark.parametrize("value", [b"", b"+1", b"1 ", b" 1", b"0x1", b"1_0", b"\xb2", b"9" * 16, b"1,1"])
def test_an_odd_length_must_be_parsed(value: bytes) -> None:
    raw = b"POST / HTTP/1.1\r\nContent-Length: %b\r\n\r\n" % value
    assert cut_length(raw) == (raw, -2)


def test_the_memory_of_heads_is_bounded_and_forgets_the_oldest() -> None:
    seen: SeenHeads[int] = SeenHeads(limit=3)
    heads = [b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(5)]
    for number, raw in enumerate(heads):
        seen.keep(raw, 1, number)
        seen.keep(raw, 1, number)
        seen.keep(raw, 1, 99)
    assert len(seen) == 3
    assert [seen.find(raw) for raw in heads] == [None, None, 2, 3, 4]


def test_heads_that_never_come_again_do_not_push_out_those_that_do() -> None:
    seen: SeenHeads[int] = SeenHeads(limit=3)
    often = b"GET /often HTTP/1.1\r\nHost: a\r\n\r\n"
    seen.keep(often, 1, 0)
    seen.keep(often, 1, 0)
    for number in range(100):
        seen.keep(b"GET / HTTP/1.1\r\nTraceparent: %d\r\n\r\n" % number, 1, number)
    assert seen.find(often) == 0
    assert len(seen) == 1
    assert len(seen._once) <= 3 * 4


def test_bytes_that_the_parser_read_otherwise_are_not_kept() -> None:
    seen: SeenHeads[int] = SeenHeads()
    for _ in range(3):
        seen.keep(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 2, 1)
        seen.keep(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 5000 + b"\r\n\r\n", 2, 1)
    assert len(seen) == 0


def test_a_head_that_was_seen_means_the_same_with_another_body() -> None:
    bench = Bench()
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer k\r\nContent-Length: %d\r\n\r\n%b"
    pieces = [raw % (len(body), body) for body in (b"{}", b'{"model":"m"}', b"", b"x" * 1000)]
    reached, transport = bench.feed(pieces)
    assert len(bench.gateway.seen_heads._heads) == 1
    assert [parse(each)[1] for each in reached] == [b"{}", b'{"model":"m"}', b"", b"x" * 1000]
    ids = [dict(parse(each)[0].headers)[b"x-request-id"] for each in reached]
    assert len(set(ids)) == 4
    assert transport.sent.count(b"HTTP/1.1 200") == 4


def test_heads_that_differ_in_a_credential_are_different_heads() -> None:
    bench = Bench()
    raw = b"GET /x HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %b\r\n\r\n"
    reached, _ = bench.feed([raw % b"one", raw % b"two", raw % b"one"])
    sent = [dict(parse(each)[0].headers)[b"authorization"] for each in reached]
    assert sent == [b"Bearer one", b"Bearer two", b"Bearer one"]


def test_a_rejected_head_is_not_kept() -> None:
    bench = Bench()
    for _ in range(2):
        _, transport = bench.feed([b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"])
        assert transport.sent.startswith(b"HTTP/1.1 400")
    assert len(bench.gateway.seen_heads._heads) == 0
    with pytest.raises(HeadRejected):
        read((b"Host", b"b"))
