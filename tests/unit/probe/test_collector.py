"""The collector: numbers kept honest, orders answered once, and peers that cannot make it grow."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from stopguard.errors import ConfigurationError
from stopguard.probe import wire
from stopguard.probe.collector import Collector, OrderResult
from stopguard.probe.link import ClockOffset, ProbeLimits
from tests.unit.probe.rig import TOKEN, Audience, RawProbe, collecting, frame, snapshot

pytestmark = pytest.mark.anyio


# ---- numbers --------------------------------------------------------------------------------------


async def test_a_hole_is_a_gap_until_a_snapshot_has_come() -> None:
    async with collecting() as (collector, audience):
        probe = await RawProbe.attached(collector.addresses[0])
        first = await probe.hear(wire.Command)
        assert first.action == "snapshot", "asked for as soon as it is connected"
        probe.say(snapshot(first.command_id, 0))
        await audience.hears("snapshot closes the gap")
        (source,) = collector.sources
        for number in (1, 2, 5):
            probe.say(frame(number))
        await audience.hears("frame 5")
        assert audience.said[-2:] == ["gap 2", "frame 5"]
        assert (source.gaps, source.frames_missed) == (1, 2)
        assert source.gap_since is not None
        again = await probe.hear(wire.Command)
        assert again.action == "snapshot"
        probe.say(snapshot(again.command_id, 4))
        probe.say(frame(6))
        await audience.hears("frame 6")
        assert source.gap_since is not None, "a snapshot that is older than the hole closes nothing"
        probe.say(snapshot(again.command_id, 6))
        await audience.until(lambda: source.gap_since is None)
        await probe.close()


async def test_frames_that_were_seen_are_not_seen_again() -> None:
    async with collecting() as (collector, audience):
        probe = await RawProbe.attached(collector.addresses[0])
        for number in (1, 2, 2, 1, 3):
            probe.say(frame(number))
        await audience.hears("frame 3")
        assert [one.sequence for one in audience.frames] == [1, 2, 3]
        assert collector.repeated_frames == 2
        await probe.close()


async def test_a_snapshot_beyond_the_last_frame_is_a_gap_and_its_end() -> None:
    async with collecting() as (collector, audience):
        probe = await RawProbe.attached(collector.addresses[0])
        command = await probe.hear(wire.Command)
        probe.say(frame(1))
        probe.say(snapshot(command.command_id, 4))
        probe.say(frame(5))
        await audience.hears("frame 5")
        assert audience.said[-4:] == ["frame 1", "gap 3", "snapshot closes the gap", "frame 5"]
        await probe.close()


async def test_a_process_that_comes_back_goes_on_where_it_was() -> None:
    async with collecting() as (collector, audience):
        first = await RawProbe.attached(collector.addresses[0], "same")
        first.say(frame(1))
        await audience.hears("frame 1")
        second = await RawProbe.attached(collector.addresses[0], "same")
        assert await first.ended(), "the old connection is dead and does not know it"
        await first.close()
        second.say(frame(2))
        await audience.hears("frame 2")
        assert not [text for text in audience.said if text.startswith("gap")]
        assert len(collector.sources) == 1
        await second.close()
        await audience.until(lambda: not collector.sources)


# ---- orders ---------------------------------------------------------------------------------------


async def _ordered(collector: Collector, *probes: RawProbe, seconds: float = 5.0) -> tuple[list[OrderResult], int]:
    results: list[OrderResult] = []
    collector.order("e", "abort", "r1", results.append, seconds=seconds)
    ids = set()
    for probe in probes:
        command = await probe.hear(wire.Command)
        while command.action != "abort":
            command = await probe.hear(wire.Command)
        ids.add(command.command_id)
    (command_id,) = ids
    return results, command_id


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (("unknown", "unknown"), "unknown"),
        (("unknown", "gone"), "gone"),
        (("refused", "unknown"), "refused"),
        (("failed", "unknown"), "failed"),
        (("unknown", "unsupported"), "unsupported"),
        (("unknown", "applied"), "applied"),
    ],
)
async def test_the_answers_of_all_processes_are_one_answer(said: tuple[wire.Answer, ...], answer: str) -> None:
    async with collecting() as (collector, audience):
        probes = [await RawProbe.attached(collector.addresses[0], f"i{number}") for number in range(2)]
        results, command_id = await _ordered(collector, *probes)
        probes[0].say(wire.CommandAnswer(command_id, said[0], 0.25))
        probes[0].say(frame(1))
        await audience.hears("frame 1")
        assert results == [], "the other one has not answered"
        probes[1].say(wire.CommandAnswer(command_id, said[1]))
        probes[1].say(frame(1))
        await audience.until(lambda: audience.said.count("frame 1") == 2)
        assert [result.answer for result in results] == [answer]
        probes[1].say(wire.CommandAnswer(command_id, "applied"))
        probes[1].say(frame(2))
        await audience.hears("frame 2")
        assert len(results) == 1, "an answer after the answer"
        for probe in probes:
            await probe.close()


async def test_one_that_did_it_need_not_wait_for_the_others() -> None:
    async with collecting() as (collector, audience):
        probes = [await RawProbe.attached(collector.addresses[0], f"i{number}") for number in range(2)]
        results, command_id = await _ordered(collector, *probes)
        probes[1].say(wire.CommandAnswer(command_id, "accepted"))
        probes[1].say(frame(1))
        await audience.hears("frame 1")
        assert [result.answer for result in results] == ["accepted"]
        for probe in probes:
            await probe.close()


async def test_an_order_to_nobody_a_dead_one_and_a_silent_one() -> None:
    async with collecting() as (collector, audience):
        results: list[OrderResult] = []
        collector.order("e", "abort", "r1", results.append)
        assert results.pop().answer == "unsupported"
        probe = await RawProbe.attached(collector.addresses[0])
        results, _ = await _ordered(collector, probe)
        await probe.close()
        await audience.until(lambda: not collector.sources)
        assert [(result.answer, result.detail) for result in results] == [("failed", "the probe is gone")]
        probe = await RawProbe.attached(collector.addresses[0])
        done = asyncio.Event()
        late: list[OrderResult] = []

        def noted(result: OrderResult) -> None:
            late.append(result)
            done.set()

        collector.order("e", "abort", "r1", noted, seconds=0.01)
        async with asyncio.timeout(10):
            await done.wait()
        assert [(result.answer, result.detail) for result in late] == [("failed", "the probe does not answer")]
        await probe.close()


async def test_there_is_a_limit_on_orders() -> None:
    async with collecting(limits=ProbeLimits(orders=3)) as (collector, audience):
        probe = await RawProbe.attached(collector.addresses[0])
        results: list[OrderResult] = []
        await audience.until(lambda: collector.sources)
        for _ in range(5):
            collector.order("e", "abort", "r1", results.append)
        assert [result.answer for result in results] == ["failed", "failed"]
        await probe.close()
        await audience.until(lambda: len(results) == 5)


async def test_a_probe_that_does_not_read_is_cut_off() -> None:
    async with collecting(limits=ProbeLimits(write_buffer_bytes=20_000)) as (collector, audience):
        probe = await RawProbe.attached(collector.addresses[0])
        await audience.until(lambda: collector.sources)
        results: list[OrderResult] = []
        for _ in range(8000):
            collector.order("e", "abort", "r" * 2000, results.append)
            if results:
                break
        assert results
        await audience.until(lambda: not collector.sources)
        assert "detached: it does not read" in audience.said
        await probe.close()


# ---- peers that do not belong here -------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        (70_000).to_bytes(4, "big") + b"x" * 10,
        (3).to_bytes(4, "big") + b"\xc1\xc1\xc1",
        wire.encode(wire.CommandAnswer(1, "applied")),
        wire.encode(wire.Greeting(wire.SCHEMA_VERSION, b"short")),
        wire.encode(wire.Greeting(wire.SCHEMA_VERSION + 1, b"n" * wire.NONCE_BYTES)),
        wire.encode(wire.Hello(b"", "x", "1", "i")),
    ],
    ids=["http", "long", "garbage", "frame-first", "nonce", "schema", "hello-first"],
)
async def test_what_is_no_handshake_is_sent_away(data: bytes) -> None:
    async with collecting() as (collector, audience):
        probe = await RawProbe.connect(collector.addresses[0])
        probe.writer.write(data)
        assert await probe.ended()
        assert collector.refusals == 1
        assert audience.said == []
        await probe.close()


async def test_a_wrong_token_is_sent_away_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    async with collecting() as (collector, audience):
        for _ in range(3):
            probe = await RawProbe.connect(collector.addresses[0])
            probe.say(wire.Greeting(wire.SCHEMA_VERSION, b"n" * wire.NONCE_BYTES))
            await probe.hear(wire.Challenge)
            probe.say(wire.Hello(b"p" * 32, "x", "1", "i"))
            refused = await probe.hear(wire.Refused)
            assert refused.refusal == "token"
            assert await probe.ended()
            await probe.close()
        assert audience.said == []
        assert len(caplog.records) == 1, "one line, however often it tries"
        assert TOKEN not in caplog.text


async def test_one_who_says_nothing_is_closed_and_few_can_do_that() -> None:
    async with collecting(limits=ProbeLimits(unproved=2, handshake_seconds=0.05)) as (collector, _):
        silent = [await RawProbe.connect(collector.addresses[0]) for _ in range(4)]
        for probe in silent:
            assert await probe.ended()
            await probe.close()
        assert collector.refusals == 4
        assert not collector._links


async def test_garbage_after_the_handshake_ends_that_connection_only() -> None:
    async with collecting() as (collector, audience):
        good = await RawProbe.attached(collector.addresses[0], "good")
        bad = await RawProbe.attached(collector.addresses[0], "bad")
        bad.writer.write((3).to_bytes(4, "big") + b"\xc1\xc1\xc1")
        assert await bad.ended()
        good.say(frame(1))
        await audience.hears("frame 1")
        assert [source.hello.instance for source in collector.sources] == ["good"]
        await bad.close()
        await good.close()


@pytest.mark.parametrize(("hello", "word"), [({"name": "x" * 200}, "too long"), ({"instance": ""}, "instance")])
async def test_a_hello_that_cannot_be_taken(hello: dict[str, str], word: str) -> None:
    async with collecting() as (collector, _):
        probe = await RawProbe.connect(collector.addresses[0])
        nonce = b"n" * wire.NONCE_BYTES
        probe.say(wire.Greeting(wire.SCHEMA_VERSION, nonce))
        challenge = await probe.hear(wire.Challenge)
        proof = wire.engine_proof(TOKEN, nonce, challenge.nonce)
        fields = {"engine": "x", "engine_version": "1", "instance": "i", **hello}
        probe.say(wire.Hello(proof, **fields))  # type: ignore[arg-type]
        refused = await probe.hear(wire.Refused)
        assert word in refused.detail
        await probe.close()


async def test_a_collector_proves_that_it_knows_the_token() -> None:
    async with collecting() as (collector, _):
        probe = await RawProbe.connect(collector.addresses[0])
        nonce = os.urandom(wire.NONCE_BYTES)
        probe.say(wire.Greeting(wire.SCHEMA_VERSION, nonce))
        challenge = await probe.hear(wire.Challenge)
        assert challenge.proof == wire.collector_proof(TOKEN, nonce, challenge.nonce)
        assert challenge.proof != wire.engine_proof(TOKEN, nonce, challenge.nonce), "it is of no use to a reflector"
        await probe.close()


async def test_a_bug_in_the_books_does_not_cost_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Audience):
        def frame(self, source: object, frame: wire.Frame, at: float) -> None:
            self._note(f"frame {frame.sequence}")
            raise ValueError("a bug")

    async with collecting(Broken()) as (collector, audience):
        probe = await RawProbe.attached(collector.addresses[0])
        for number in (1, 2):
            probe.say(frame(number))
        await audience.hears("frame 2")
        assert collector.failures == 2
        assert "could not book" in caplog.text
        await probe.close()


# ---- addresses ---------------------------------------------------------------------------------------


async def test_a_unix_socket_is_for_this_user_and_goes_with_us(tmp_path: Path) -> None:
    path = tmp_path / "probe.sock"
    left_behind = socket.socket(socket.AF_UNIX)
    left_behind.bind(str(path))
    left_behind.close()
    async with collecting(address=str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigurationError, match="another process listens"):
            await Collector([str(path)], TOKEN, Audience()).start()
        assert path.exists()
    assert not path.exists()


async def test_addresses_that_cannot_be_had(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigurationError, match="is no socket"):
        await Collector([str(file)], TOKEN, Audience()).start()
    assert file.read_text() == "x"
    with pytest.raises(ConfigurationError, match="cannot listen"):
        await Collector([str(tmp_path / "no" / "folder.sock")], TOKEN, Audience()).start()
    async with collecting() as (collector, _):
        with pytest.raises(ConfigurationError, match="cannot listen"):
            await Collector(collector.addresses, TOKEN, Audience()).start()
    with pytest.raises(ConfigurationError, match="at least 16"):
        Collector(["/x"], "short", Audience())


# ---- clocks --------------------------------------------------------------------------------------------


def test_the_shortest_way_says_the_most_about_the_other_clock() -> None:
    clock = ClockOffset()
    assert clock.seconds is None
    # Their clock is 100 s ahead; 3 ms there and 1 ms back, read 0.5 ms later than written.
    clock.add(1.0, 101.003, 101.0035, 1.0045)
    assert clock.seconds == pytest.approx(100.001)
    assert clock.error_seconds == pytest.approx(0.002)
    clock.add(2.0, 102.0001, 102.0001, 2.0002)
    assert clock.seconds == pytest.approx(100.0)
    assert clock.error_seconds == pytest.approx(0.0001)
    clock.add(3.0, 103.05, 103.05, 3.051)
    assert clock.seconds == pytest.approx(100.0), "a slow one adds nothing"


@pytest.mark.parametrize("reading", [(5.0, 1.0, 9.0, 5.1), (5.0, float("nan"), 1.0, 5.1)])
def test_a_clock_that_lies_is_not_believed(reading: tuple[float, float, float, float]) -> None:
    clock = ClockOffset()
    clock.add(*reading)
    assert clock.seconds is None
