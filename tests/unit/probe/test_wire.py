from __future__ import annotations

import msgspec
import pytest

from stopguard.probe import wire

ONE_OF_EACH: list[wire.Event] = [
    wire.Added("r1", 1.0, 7, "parent"),
    wire.Moved("r1", 1.0, "transferring"),
    wire.BlocksHeld("r1", 1.0, 4),
    wire.BlocksFenced("r1", 1.0, 4, 9),
    wire.BlocksReturned("r1", 1.0, 4, fenced=True),
    wire.HostHeld("r1", 1.0, 4),
    wire.HostReturned("r1", 1.0, 4),
    wire.SlotTaken("r1", 1.0, "lora"),
    wire.SlotReturned("r1", 1.0, "speculative", 2),
    wire.TokensComputed("r1", 1.0, 3),
    wire.TokensEmitted("r1", 1.0, 3),
    wire.TokensDropped("r1", 1.0, 3, stale=True),
    wire.AbortArrived("r1", 1.0),
    wire.AbortApplied("r1", 1.0),
    wire.AbortNoop("r1", 1.0),
    wire.AbortRefused("r1", 1.0, 0.5),
    wire.Preempted("r1", 1.0, 12),
    wire.Resumed("r1", 1.0),
    wire.Finished("r1", 1.0, "length"),
]


def frame(events: list[wire.Event]) -> wire.Frame:
    return wire.Frame(7, 70, 1.5, events, 3, 2, 100, 5)


def test_every_kind_of_event_arrives_as_it_was_sent() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(wire.Event.__args__)
    sent = frame(ONE_OF_EACH)
    assert wire.decode_frame(wire.encode_frame(sent)) == sent


def test_a_busy_step_stays_small() -> None:
    busy: list[wire.Event] = [wire.TokensComputed(f"sg-{'x' * 22}{n:02}", 123456.789, 1) for n in range(32)]
    assert len(wire.encode_frame(frame(busy))) < 2048


def test_a_newer_sender_may_add_a_field_at_the_end() -> None:
    data = msgspec.msgpack.encode(["frame", 1, 1, 1.0, [["aar", "r1", 1.0, "new"]], 0, 0, 0, 0, "new"])
    assert wire.decode_frame(data).events == [wire.AbortArrived("r1", 1.0)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        wire.encode_frame(frame(ONE_OF_EACH))[:-3],
        msgspec.msgpack.encode(["frame", 1, 1, 1.0, [["mov", "r1", 1.0, "limbo"]], 0, 0, 0, 0]),
        msgspec.msgpack.encode(["frame", 1, 1, 1.0, [["cmp", "r1", 1.0, "three"]], 0, 0, 0, 0]),
        msgspec.msgpack.encode(["frame", 1, 1, 1.0, [["???", "r1", 1.0]], 0, 0, 0, 0]),
        msgspec.msgpack.encode(["other", 1]),
    ],
)
def test_what_is_no_frame(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_frame(data)
