"""Request smuggling: a corpus of known vectors, and a fuzzer with a second parser as the judge.

The rule: whatever a client sends, each exchange writes exactly one well-formed request to the engine, and
requests that two parsers could read differently write none.
"""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.gateway.bench import Bench, parse

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
SECRET = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"

#: name: (bytes, status). Nothing of them may reach an engine.
REFUSED: dict[str, tuple[bytes, int]] = {
    "CL.CL, different": (POST + b"Content-Length: 0\r\nContent-Length: 36\r\n\r\n" + SECRET, 400),
    "CL.CL, equal": (POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx", 400),
    "CL as a list": (POST + b"Content-Length: 1, 1\r\n\r\nx", 400),
    "CL with a plus": (POST + b"Content-Length: +1\r\n\r\nx", 400),
    "CL negative": (POST + b"Content-Length: -1\r\n\r\nx", 400),
    "CL empty": (POST + b"Content-Length: \r\n\r\nx", 400),
    "CL in hexadecimal": (POST + b"Content-Length: 0x1\r\n\r\nx", 400),
    "CL with an underscore": (POST + b"Content-Length: 1_0\r\n\r\n" + b"x" * 10, 400),
    "CL with a space inside": (POST + b"Content-Length: 1 0\r\n\r\n" + b"x" * 10, 400),
    "CL that overflows": (POST + b"Content-Length: 18446744073709551616\r\n\r\n", 400),
    "CL with wide digits": (POST + "Content-Length: \uff11\r\n\r\nx".encode(), 400),
    "CL.TE": (POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", 400),
    "TE.CL": (CHUNKED + b"Content-Length: 3\r\n\r\n8\r\nSMUGGLED\r\n0\r\n\r\n", 400),
    "TE.TE, second hidden": (CHUNKED + b"Transfer-Encoding: x\r\n\r\n0\r\n\r\n", 400),
    "TE unknown": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "TE identity": (POST + b"Transfer-Encoding: identity\r\n\r\n", 400),
    "TE gzip, chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "TE chunked, chunked": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    "TE with a tab": (POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "TE space before the colon": (POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    "TE folded": (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
    "TE in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "bare LF after the request line": (b"GET / HTTP/1.1\nHost: a\r\n\r\n", 400),
    "bare LF after a header": (b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", 400),
    "bare LF at the end": (b"GET / HTTP/1.1\r\nHost: a\r\n\n" + SECRET, 400),
    "bare CR in a value": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
    "folded header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400),
    "NUL in a value": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
    "control character in a value": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x01b\r\n\r\n", 400),
    "space in a name": (b"GET / HTTP/1.1\r\nHost: a\r\nX y: z\r\n\r\n", 400),
    "empty name": (b"GET / HTTP/1.1\r\nHost: a\r\n: z\r\n\r\n", 400),
    "no colon": (b"GET / HTTP/1.1\r\nHost: a\r\nxyz\r\n\r\n", 400),
    "not ASCII in a name": ("GET / HTTP/1.1\r\nHost: a\r\nX-\u00e9: z\r\n\r\n".encode(), 400),
    "space before the first header": (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "space in the target": (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "fragment in the target": (b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "target that is no path": (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n" + SECRET, 501),
    "unknown method": (b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "method of another protocol": (b"PROPFIND / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "chunk size with a sign": (CHUNKED + b"\r\n+1\r\nx\r\n0\r\n\r\n", 400),
    "chunk size with 0x": (CHUNKED + b"\r\n0x1\r\nx\r\n0\r\n\r\n", 400),
    "chunk size with a space": (CHUNKED + b"\r\n1 \r\nx\r\n0\r\n\r\n", 400),
    "chunk size that overflows": (CHUNKED + b"\r\nfffffffffffffffff\r\nx\r\n0\r\n\r\n", 400),
    "chunk size with bare LF": (CHUNKED + b"\r\n1\nx\r\n0\r\n\r\n", 400),
    "chunk extension with bare LF": (CHUNKED + b"\r\n1;a\nb\r\nx\r\n0\r\n\r\n", 400),
    "chunk longer than it says": (CHUNKED + b"\r\n1\r\nxy\r\n0\r\n\r\n", 400),
    "chunk without CRLF": (CHUNKED + b"\r\n1\r\nx0\r\n\r\n", 400),
    "websocket": (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n" + SECRET, 501),
    "unknown expectation": (POST + b"Expect: 200-ok\r\nContent-Length: 0\r\n\r\n", 417),
    "too many headers": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
    "too large a head": (b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 70_000, 431),
    "too long a target": (b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    "odd group": (POST + b"X-StopGuard-Group: a b\r\nContent-Length: 0\r\n\r\n", 400),
    "odd timeout": (POST + b"X-StopGuard-Timeout: nan\r\nContent-Length: 0\r\n\r\n", 400),
    "timeout of zero": (POST + b"X-StopGuard-Timeout: 0\r\nContent-Length: 0\r\n\r\n", 400),
}


@pytest.mark.parametrize("whole", [True, False], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", REFUSED)
def test_known_vectors_reach_no_engine(name: str, whole: bool) -> None:
    raw, status = REFUSED[name]
    bench = Bench()
    reached, transport = bench.feed([raw] if whole else [raw[at : at + 1] for at in range(len(raw))])
    assert reached == []
    assert transport.sent.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in transport.sent
    assert transport.ended
    assert bench.gateway.statistics().buffered_body_bytes == 0


@pytest.mark.parametrize("seen", [0, 1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_known_vectors_behind_a_good_request(name: str, seen: int) -> None:
    """The good one is served, also when its head is found among those seen before; the bad one never is."""
    bench = Bench()
    good = POST + b"Content-Length: 2\r\n\r\n{}"
    for _ in range(seen):
        bench.feed([good])
    reached, transport = bench.feed([good + REFUSED[name][0]])
    assert [parse(each)[1] for each in reached] == [b"{}"]
    assert transport.sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"HTTP/1.1 %d " % REFUSED[name][1] in transport.sent


ACCEPTED: dict[str, bytes] = {
    "leading empty lines": b"\r\n\r\n" + POST + b"Content-Length: 2\r\n\r\n{}",
    "spaces around a length": POST + b"Content-Length: \t2 \t\r\n\r\n{}",
    "chunk extension and trailer": CHUNKED + b"\r\n2;a=b\r\n{}\r\n0\r\nX-Request-Id: evil\r\nContent-Type: x\r\n\r\n",
    "absolute target": b"POST http://elsewhere/v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
    "upper case": b"POST /v1/completions HTTP/1.1\r\nHOST: a\r\nTRANSFER-ENCODING: Chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "offer of HTTP/2": POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n"
    b"Content-Length: 2\r\n\r\n{}",
    "headers of ours and of the engine": POST + b"X-StopGuard-Id: sg-0\r\nX-Request-Id: neighbour\r\n"
    b"X-Conversation-Id: x\r\nX-Data-Parallel-Rank: 1\r\nrid: x\r\nX_Request_Id: x\r\nContent_Length: 9\r\n"
    b"Connection: keep-alive, X-Secret\r\nX-Secret: y\r\nKeep-Alive: 5\r\nTE: trailers\r\nProxy-Authorization: z\r\n"
    b"Content-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("whole", [True, False], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_legal_reaches_the_engine_in_our_words(name: str, whole: bool) -> None:
    raw = ACCEPTED[name]
    bench = Bench()
    reached, _ = bench.feed([raw] if whole else [raw[at : at + 1] for at in range(len(raw))])
    assert len(reached) == 1
    request, body = parse(reached[0])
    assert body == b"{}"
    assert bytes(request.target) == b"/v1/completions"
    headers = dict(request.headers)
    assert headers[b"host"] == b"engine.test:8000"
    assert headers[b"content-length"] == b"2"
    assert headers[b"x-request-id"].startswith(b"sg-")
    assert set(headers) <= {b"host", b"content-length", b"x-request-id"}


PARTS = st.sampled_from(
    [
        *(raw for raw, _ in REFUSED.values() if len(raw) < 5000),
        *ACCEPTED.values(),
        *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"0\r\n\r\n", b"5\r\n", b"Content-Length: 5\r\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"GET / HTTP/1.1\r\n", b"Host: a\r\n", b"HTTP/1.1", b"x" * 40),
    ]
)


@st.composite
def hostile(draw: st.DrawFn) -> list[bytes]:
    """Pieces of vectors, glued, mutated and cut at random places."""
    raw = bytearray(b"".join(draw(st.lists(PARTS, min_size=1, max_size=4))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(raw) - 1)) if raw else 0
        match draw(st.integers(0, 2)):
            case 0 if raw:
                raw[at] = draw(st.integers(0, 255))
            case 1:
                raw[at:at] = draw(st.sampled_from([b"\r\n", b"\n", b" ", b"\0", b"0", b":", b"\r\n\r\n"]))
            case _:
                del raw[at : at + draw(st.integers(1, 9))]
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    edges = [0, *cuts, len(raw)]
    return [bytes(raw[start:end]) for start, end in itertools.pairwise(edges)]


BENCH = Bench()


@given(hostile())
@example([ACCEPTED["offer of HTTP/2"], SECRET])
@example([ACCEPTED["offer of HTTP/2"] * 2])
@example([b"\r\n\r\n" + POST + b"Content-Length: 0\r\n\r\n"])
def test_nothing_crashes_and_only_whole_requests_get_through(pieces: list[bytes]) -> None:
    """With a warm memory of heads (the bench is kept) and with a cold one: the same requests, in our words."""
    warm, warm_transport = BENCH.feed(pieces)
    cold, cold_transport = Bench().feed([b"".join(pieces)[at : at + 7] for at in range(0, len(b"".join(pieces)), 7)])
    seen = []
    for reached in (warm, cold):
        parsed = [parse(each) for each in reached]
        for request, _ in parsed:
            names = [bytes(name) for name, _ in request.headers]
            assert names.count(b"x-request-id") == 1
            assert not any(name.startswith(b"x-stopguard") or b"_" in name for name in names)
            assert not {b"transfer-encoding", b"upgrade", b"x-conversation-id", b"te"} & set(names)
        seen.append([(bytes(request.method), bytes(request.target), body) for request, body in parsed])
    assert seen[0] == seen[1], "how a request was cut, or whether it was seen before, changed its meaning"
    responses = [len(re.findall(rb"HTTP/1\.1 \d{3} ", each.sent)) for each in (warm_transport, cold_transport)]
    assert responses[0] == responses[1]
    statistics = BENCH.gateway.statistics()
    assert statistics.connections == statistics.requests == statistics.buffered_body_bytes == 0
