"""The sender: an engine is never slowed, never stopped and never made to fail, whatever the other end does."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stopguard.errors import ConfigurationError
from stopguard.probe import wire
from stopguard.probe.collector import OrderResult
from stopguard.probe.sender import Guarded, Sender, guard, parse_address
from tests.unit.probe.rig import HELLO, TOKEN, collecting, frame, sender_to

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "address", ["", "x", "tcp://", "tcp://host", "tcp://host:0", "tcp://:9", "http://x:9", "unix:x"]
)
def test_addresses_that_cannot_work(address: str) -> None:
    with pytest.raises(ConfigurationError, match="probe address"):
        parse_address(address)


def test_addresses() -> None:
    assert parse_address("tcp://127.0.0.1:9") == ("127.0.0.1", 9)
    assert parse_address("tcp://[::1]:9") == ("::1", 9)
    assert parse_address("/run/x.sock") == parse_address("unix:/run/x.sock") == "/run/x.sock"


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({}, ""),
        ({"STOPGUARD_COLLECTOR_TOKEN": TOKEN}, ""),
        ({"STOPGUARD_COLLECTOR": "/x"}, "STOPGUARD_COLLECTOR_TOKEN is not"),
        ({"STOPGUARD_COLLECTOR": "x", "STOPGUARD_COLLECTOR_TOKEN": TOKEN}, "probe address"),
        ({"STOPGUARD_COLLECTOR": "/x", "STOPGUARD_COLLECTOR_TOKEN": "short"}, "at least 16 characters"),
    ],
)
def test_an_environment_without_a_probe(
    environment: dict[str, str], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert Sender.from_environment("x", "1", environment=environment) is None
    assert [record.levelname for record in caplog.records] == (["WARNING"] if line else [])
    assert line in caplog.text


def test_an_environment_with_a_probe() -> None:
    environment = {
        "STOPGUARD_COLLECTOR": "/x",
        "STOPGUARD_COLLECTOR_TOKEN": TOKEN,
        "STOPGUARD_ENGINE_NAME": "left",
    }
    sender = Sender.from_environment("x", "1", rank=2, ranks=4, commands=("abort",), environment=environment)
    assert sender is not None
    hello = sender._hello
    assert (hello.name, hello.rank, hello.ranks, hello.process) == ("left", 2, 4, os.getpid())
    assert hello.instance


@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_frames_arrive_in_order_and_whole(family: str, tmp_path: Path) -> None:
    address = "tcp://127.0.0.1:1" if family == "tcp" else str(tmp_path / "probe.sock")
    async with collecting(address=address) as (collector, audience):
        sender = sender_to(collector.addresses[0])
        for number in range(1, 101):
            sender.send(frame(number, wire.Moved("r", 1.0, "gone")))
        sender.start()
        for number in range(101, 201):
            sender.send(frame(number, wire.Moved("r", 1.0, "gone")))
        await audience.hears("frame 200")
        assert audience.frames == [frame(number, wire.Moved("r", 1.0, "gone")) for number in range(1, 201)]
        assert not [text for text in audience.said if text.startswith("gap")]
        last = 200
        while audience.sources[0].link.clock.seconds is None:  # the pong comes between two frames
            last += 1
            sender.send(frame(last))
            await audience.hears(f"frame {last}")
        clock = audience.sources[0].link.clock
        assert clock.seconds is not None
        assert abs(clock.seconds) <= clock.error_seconds, "both read one clock: the truth is 0, and within the error"
        sender.close()
        assert (sender.frames_sent, sender.frames_dropped) == (last, 0)


async def test_what_was_dropped_is_told_and_seen() -> None:
    async with collecting() as (collector, audience):
        sender = sender_to(collector.addresses[0], frames_max=4)
        for number in range(1, 11):
            sender.send(frame(number))
        assert sender.frames_dropped == 6
        sender.start()
        await audience.hears("frame 10")
        assert audience.said.index("gap 6") < audience.said.index("frame 7")
        assert audience.sources[0].frames_dropped == 6
        sender.close()


async def test_a_later_drop_is_told_by_a_message() -> None:
    async with collecting() as (collector, audience):
        sender = sender_to(collector.addresses[0])
        sender.start()
        sender.send(frame(1))
        await audience.hears("frame 1")
        sender.frames_dropped += 3
        sender.send(frame(5))
        await audience.hears("frame 5")
        assert audience.sources[0].frames_dropped == 3
        sender.close()


def test_a_full_queue_without_a_collector() -> None:
    sender = sender_to("/nowhere/at.all", frames_max=4)
    sender.start()
    for number in range(10):
        sender.send(frame(number))
    assert sender.frames_dropped == 6
    sender.close()
    assert sender.frames_dropped == 10
    assert sender._thread is not None
    assert not sender._thread.is_alive()


def test_sending_costs_next_to_nothing() -> None:
    """The target is a microsecond; ten times that is still noise beside a step, and fails on no busy machine."""
    sender = sender_to("/nowhere/at.all")
    one = frame(1)
    best = min(_seconds(sender, one) for _ in range(5))
    assert best / 1000 < 10e-6


def _seconds(sender: Sender, one: wire.Frame) -> float:
    began = time.perf_counter()
    for _ in range(1000):
        sender.send(one)
    return time.perf_counter() - began


class FakeCollector:
    """A listener that answers each connection with a function, in threads, as badly as a test wants."""

    def __init__(self, behave: Any) -> None:
        self.behave = behave
        self.connections = 0
        self.seen = threading.Semaphore(0)
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeCollector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()
        self._thread.join(5)

    def wait_for(self, connections: int) -> None:
        for _ in range(connections):
            assert self.seen.acquire(timeout=10)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            self.connections += 1
            try:
                self.behave(connection)
            except OSError:
                connection.close()
            self.seen.release()


def _read(connection: socket.socket) -> wire.FromEngine:
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    return wire.decode_from_engine(connection.recv(size, socket.MSG_WAITALL))


def _challenge(connection: socket.socket, *, token: str = TOKEN, schema: int = wire.SCHEMA_VERSION) -> None:
    greeting = _read(connection)
    assert isinstance(greeting, wire.Greeting)
    nonce = b"c" * wire.NONCE_BYTES
    connection.sendall(wire.encode(wire.Challenge(schema, nonce, wire.collector_proof(token, greeting.nonce, nonce))))


def _welcome(connection: socket.socket) -> None:
    _challenge(connection)
    _read(connection)
    connection.sendall(wire.encode(wire.Welcome()))


def _impostor(connection: socket.socket) -> None:
    """Does not know the token, and orders all the same."""
    _challenge(connection, token="another-token-altogether")
    connection.sendall(wire.encode(wire.Welcome()) + wire.encode(wire.Command(1, "abort", "victim")))


def _web_server(connection: socket.socket) -> None:
    connection.recv(64)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


def _silent_goodbye(connection: socket.socket) -> None:
    connection.close()


@pytest.mark.parametrize(
    ("behave", "line"),
    [
        (lambda connection: _challenge(connection, schema=wire.SCHEMA_VERSION + 1), "same version of StopGuard"),
        (lambda connection: _challenge(connection, token="another-token-altogether"), "has another token"),
        (lambda c: c.sendall(wire.encode(wire.Refused("token", "wrong token"))), "the collector refuses: wrong token"),
        (_impostor, "has another token"),
        (_web_server, "no collector of StopGuard's"),
        (_silent_goodbye, "no collector"),
    ],
    ids=["schema", "token", "refused", "impostor", "web-server", "closes"],
)
def test_the_wrong_other_end_costs_one_line(behave: Any, line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stopguard.probe"), FakeCollector(behave) as fake:
        sender = sender_to(fake.address)
        sender.start()
        for number in range(1, 20):
            sender.send(frame(number))
        fake.wait_for(4)
        assert not sender.connected
        assert list(sender.commands()) == []
        sender.close()
    assert sender.frames_sent == 0
    assert [line in record.getMessage() for record in caplog.records] == [True], caplog.text
    assert "the engine runs on" in caplog.text


def test_nobody_there_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    sender = sender_to("/nowhere/at.all", retry_seconds=(0.001,))
    tried = threading.Semaphore(0)
    connect = sender._connect

    def counted() -> socket.socket:
        tried.release()
        return connect()

    sender._connect = counted  # type: ignore[method-assign]
    sender.start()
    for _ in range(5):
        assert tried.acquire(timeout=10)
    sender.close()
    assert len(caplog.records) == 1, caplog.text


def test_a_collector_that_does_not_read_holds_nobody_up() -> None:
    with FakeCollector(_welcome) as fake:
        sender = sender_to(fake.address, frames_max=64)
        sender.start()
        fake.wait_for(1)
        big = frame(1, wire.Moved("r" * 50_000, 1.0, "gone"))
        began = time.perf_counter()
        for _ in range(2000):
            sender.send(big)
        assert time.perf_counter() - began < 2.0
        assert sender.frames_dropped > 0
        sender.close(timeout=0.05)
        assert sender._thread is not None
        sender._thread.join(10)
        assert not sender._thread.is_alive()


def test_more_commands_than_an_engine_takes_are_refused() -> None:
    answers: list[wire.CommandAnswer] = []

    def flood(connection: socket.socket) -> None:
        _welcome(connection)
        connection.sendall(b"".join(wire.encode(wire.Command(number, "abort", "r")) for number in range(1100)))
        while len(answers) < 76:
            message = _read(connection)
            if isinstance(message, wire.CommandAnswer):
                answers.append(message)

    with FakeCollector(flood) as fake:
        sender = sender_to(fake.address)
        sender.start()
        fake.wait_for(1)
        assert {answer.answer for answer in answers} == {"refused"}
        assert len(sender.commands()) == 1024
        assert sender.commands() == ()
        sender.close()


async def test_commands_come_and_answers_go_back() -> None:
    async with collecting() as (collector, audience):
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        sender = sender_to(collector.addresses[0], on_command=lambda: loop.call_soon_threadsafe(woken.set))
        sender.start()
        await audience.hears("attached")
        result: asyncio.Future[OrderResult] = loop.create_future()
        taken: list[wire.Command] = []
        await audience.until(lambda: collector.sources)
        collector.order("e", "abort", "r1", result.set_result, reason="eof")
        async with asyncio.timeout(10):
            while not any(command.action == "abort" for command in taken):
                await woken.wait()
                woken.clear()
                taken += sender.commands()
        abort = next(command for command in taken if command.action == "abort")
        assert (abort.request_id, abort.reason) == ("r1", "eof")
        sender.send(wire.CommandAnswer(abort.command_id, "applied"))
        assert (await result).answer == "applied"
        sender.close()


async def test_it_comes_back_to_a_collector_that_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    async with collecting() as (collector, audience):
        address = collector.addresses[0]
        sender = sender_to(address)
        sender.start()
        sender.send(frame(1))
        await audience.hears("frame 1")
    caplog.clear()
    for number in range(2, 8):
        sender.send(frame(number))
    async with collecting(address=address) as (_, again):
        await again.hears("attached")
        sender.send(frame(8))
        await again.hears("frame 8")
        assert again.said[0] == "attached"
        numbers = [one.sequence for one in again.frames]
        assert numbers == sorted(numbers)
        # A collector that is new does not know what an older one has seen.
        assert again.said[1].startswith("gap")
        sender.close()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1, caplog.text


async def test_a_change_of_what_it_is_reaches_the_collector() -> None:
    async with collecting() as (collector, audience):
        sender = sender_to(collector.addresses[0])
        sender.start()
        await audience.hears("attached")
        sender.describe(hooks_missing=("schedule",))
        await audience.hears("described ('schedule',)")
        sender.close()


async def test_what_is_no_message_is_counted_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with collecting() as (collector, audience):
        sender = sender_to(collector.addresses[0])
        sender.send(wire.Frame(1, 1, 1.0, [object()], 0, 0, 0, 0))  # type: ignore[list-item]
        sender.send(frame(2))
        sender.start()
        await audience.hears("frame 2")
        assert (sender.broken_messages, sender.frames_dropped) == (1, 1)
        assert "cannot be sent" in caplog.text
        sender.close()


async def test_a_forked_child_has_no_sender() -> None:
    async with collecting() as (collector, audience):
        sender = sender_to(collector.addresses[0])
        sender.start()
        sender.send(frame(1))
        await audience.hears("frame 1")
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is what is tested
            child = os.fork()
        if child == 0:  # pragma: no cover (another process)
            sender.send(frame(2))
            sender.start()
            sender.close()
            os.write(writing, b"inert" if sender._inert and sender._connection is None else b"alive")
            os._exit(0)
        assert os.read(reading, 5) == b"inert"
        await asyncio.to_thread(os.waitpid, child, 0)
        os.close(reading)
        os.close(writing)
        sender.send(frame(2))
        await audience.hears("frame 2")
        assert not [text for text in audience.said if text.startswith(("gap", "detached"))]
        sender.close()


# ---- hooks ------------------------------------------------------------------------------------


def test_a_hook_that_throws_is_counted_and_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    off: list[str] = []
    calls = 0

    @guard("schedule", limit=3, on_off=off.append)
    def hook(number: int) -> int:
        nonlocal calls
        calls += 1
        if number:
            raise ValueError("no")
        return 7

    assert isinstance(hook, Guarded)
    assert hook(0) == 7
    assert [hook(1) for _ in range(5)] == [None] * 5
    assert (calls, hook.failures, hook.off, off) == (4, 3, True, ["schedule"])
    assert hook(0) is None
    assert len(caplog.records) == 2, "one line for the first time, one for the last"
    assert "is off" in caplog.records[-1].getMessage()


def test_an_interrupt_is_not_the_hooks_business() -> None:
    @guard("x")
    def hook() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hook()


def test_a_guarded_method_is_bound() -> None:
    class Thing:
        @guard("x")
        def twice(self, number: int) -> tuple[Thing, int]:
            return self, 2 * number

    thing = Thing()
    assert thing.twice(2) == (thing, 4)


def test_a_token_that_is_too_short() -> None:
    with pytest.raises(ConfigurationError, match="at least 16"):
        Sender("/x", "short", HELLO)


def test_integers_of_an_engine_are_integers() -> None:
    class Number:
        def __index__(self) -> int:
            return 5

    data = wire.encode_frame(wire.Frame(1, 1, 1.0, [wire.BlocksHeld("r", 1.0, Number())], 0, 0, 0, 0))  # type: ignore[arg-type]
    assert wire.decode_frame(data).events == [wire.BlocksHeld("r", 1.0, 5)]
    assert msgspec.structs.asdict(wire.Ping(1)) == {"ping_id": 1}
