"""The scanners find the end of a body however it is cut, and accept nothing that is not exactly chunked."""

from __future__ import annotations

import itertools

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopguard.gateway.framing import ChunkedBody, FramingError, NoBody, SizedBody, UntilCloseBody


def encode(chunks: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    parts = [b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks]
    return b"".join(parts) + b"0\r\n" + trailer + b"\r\n"


def cut(raw: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(at % (len(raw) + 1) for at in cuts), len(raw)]
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


CHUNKS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(
    CHUNKS,
    CUTS,
    st.sampled_from([b"", b";a=b", b" ;x"]),
    st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC: d\r\n"]),
    st.binary(max_size=20),
)
def test_a_chunked_body_ends_where_it_ends(
    chunks: list[bytes], cuts: list[int], extension: bytes, trailer: bytes, after: bytes
) -> None:
    raw = encode(chunks, extension, trailer)
    scanner = ChunkedBody()
    payload: list[bytes] = []
    taken = 0
    for piece in cut(raw + after, cuts):
        if scanner.done:
            break
        belongs = scanner.feed(piece, payload)
        assert 0 <= belongs <= len(piece)
        taken += belongs
        assert belongs == len(piece) or scanner.done
    assert scanner.done
    assert taken == len(raw)
    assert b"".join(payload) == b"".join(chunks)


@given(CHUNKS, CUTS, st.integers(1, 30))
def test_a_truncated_body_is_never_complete(chunks: list[bytes], cuts: list[int], missing: int) -> None:
    raw = encode(chunks)[:-missing]
    scanner = ChunkedBody()
    for piece in cut(raw, cuts):
        assert scanner.feed(piece) == len(piece)
    assert not scanner.done
    assert not scanner.complete_at_end


@given(CHUNKS)
def test_between_pieces_is_exactly_between_two_chunks(chunks: list[bytes]) -> None:
    raw = encode(chunks)
    edges = {0}
    for chunk in chunks:
        edges.add(max(edges) + len(b"%x" % len(chunk)) + len(chunk) + 4)
    scanner = ChunkedBody()
    for at in range(len(raw)):
        assert scanner.between_pieces == (at in edges), at
        scanner.feed(raw[at : at + 1])
    assert not scanner.between_pieces


@pytest.mark.parametrize(
    "raw",
    [
        *(b"g\r\n", b"\r\n\r\n", b"-1\r\n", b"+1\r\n", b"0x1\r\nx\r\n", b"1_0\r\n", b" 1\r\nx\r\n", b"1 \r\nx\r\n"),
        *(b"1\r\nxy\r\n", b"1\r\nx\n0\r\n", b"1\nx\r\n", b"1;a\nb\r\nx\r\n", b"1;\x00\r\nx\r\n", b"f" * 16 + b"\r\n"),
        *(b"1;" + b"x" * 5000, b"0\r\n" + b"a: b\r\n" * 4000),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_not_exactly_chunked_is_refused(raw: bytes, whole: bool) -> None:
    scanner = ChunkedBody()
    pieces = [raw] if whole else [raw[at : at + 1] for at in range(len(raw))]
    with pytest.raises(FramingError):
        list(map(scanner.feed, pieces))


@given(CHUNKS, st.integers(0, 200), st.integers(0, 255), CUTS)
def test_a_second_parser_agrees(chunks: list[bytes], at: int, byte: int, cuts: list[int]) -> None:
    """Whatever h11 refuses is refused, and what both accept has the same payload.

    Not the other way round: h11 takes chunk sizes of up to 20 digits and looser extensions.
    """
    raw = bytearray(encode(chunks))
    raw[at % len(raw)] = byte
    judge = h11.Connection(h11.CLIENT)
    judge.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    judge.send(h11.EndOfMessage())
    judge.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + bytes(raw))
    theirs: bytes | None = b""
    ended = False
    try:
        judge.next_event()
        while (event := judge.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Data):
                assert theirs is not None
                theirs += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                ended = True
                break
    except h11.RemoteProtocolError:
        theirs = None
    scanner = ChunkedBody()
    payload: list[bytes] = []
    try:
        for piece in cut(bytes(raw), cuts):
            if not scanner.done:
                scanner.feed(piece, payload)
    except FramingError:
        return
    if scanner.done:
        assert ended
        assert theirs == b"".join(payload)


@given(st.integers(0, 100), st.binary(max_size=150), CUTS)
def test_a_sized_body_ends_where_it_ends(size: int, data: bytes, cuts: list[int]) -> None:
    scanner = SizedBody(size)
    payload: list[bytes] = []
    for piece in cut(data, cuts):
        if not scanner.done:
            scanner.feed(piece, payload)
    assert scanner.done == (len(data) >= size)
    assert b"".join(payload) == data[:size]
    assert scanner.left == max(0, size - len(data))


def test_the_other_bodies() -> None:
    assert NoBody().done
    assert NoBody().feed(b"x") == 0
    endless = UntilCloseBody()
    payload: list[bytes] = []
    assert endless.feed(b"abc", payload) == 3
    assert not endless.done
    assert endless.complete_at_end
    assert payload == [b"abc"]
