"""What an engine's sender keeps when it cannot send: words before frames, both in the order in which they came."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from typing import Any

import pytest

from stopguard.probe import wire
from stopguard.probe.collector import OrderResult
from stopguard.probe.sender_queue import SendQueue
from tests.unit.probe.rig import TOKEN, collecting, frame, sender_to, snapshot
from tests.unit.probe.test_sender import FakeCollector, _read, _welcome

pytestmark = pytest.mark.anyio


def everything(queue: SendQueue) -> list[Any]:
    taken = []
    while (item := queue.take()) is not None:
        taken.append(item)
    return taken


def answer(number: int) -> wire.CommandAnswer:
    return wire.CommandAnswer(number, "applied")


def test_frames_go_and_words_stay() -> None:
    queue = SendQueue(3)
    queue.put_word(answer(1))
    dropped = [queue.put_frame(frame(number)) for number in range(1, 6)]
    queue.put_word(snapshot(2, 5))
    dropped += [queue.put_frame(frame(number)) for number in range(6, 8)]
    assert dropped == [False] * 3 + [True] * 4
    assert everything(queue) == [answer(1), frame(5), snapshot(2, 5), frame(6), frame(7)]
    assert queue.take() is None


def test_a_word_leaves_between_the_frames_that_it_came_between() -> None:
    choices = random.Random(5)
    queue, put, taken = SendQueue(10_000), [], []
    for number in range(2000):
        item: Any = frame(number) if choices.random() < 0.7 else answer(number)
        put.append(item)
        queue.put_frame(item) if isinstance(item, wire.Frame) else queue.put_word(item)
        if choices.random() < 0.4:
            taken.append(queue.take())
    assert [item for item in taken if item is not None] + everything(queue) == put


def test_there_is_room_for_so_many_words_and_the_newest_is_turned_away() -> None:
    queue = SendQueue(3, words_max=2)
    assert [queue.put_word(answer(number)) for number in range(4)] == [True, True, False, False]
    assert everything(queue) == [answer(0), answer(1)]
    queue.put_word(answer(5))
    queue.put_frame(frame(1))
    queue.forget_words()
    assert everything(queue) == [frame(1)]


def test_cleared_it_says_how_many_frames_that_were() -> None:
    queue = SendQueue(9)
    for item in (1, 2):
        queue.put_word(answer(item))
        queue.put_frame(frame(item))
    assert queue.take() == answer(1)  # the first frame has been looked at already
    assert queue.clear() == 2
    assert queue.take() is None


def test_no_thread_is_left_waiting() -> None:
    """Many put, one waits and takes until it has everything: a wake that got lost would leave it waiting."""
    queue, each, taken = SendQueue(100_000, 100_000), 3000, 0

    def fill(number: int) -> None:
        for _ in range(each):
            if number % 2:
                queue.put_frame(frame(number))
            else:
                queue.put_word(answer(number))

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while taken < 4 * each:
        queue.wait()
        taken += len(everything(queue))
    for thread in threads:
        thread.join()


# ---- in the sender ---------------------------------------------------------------------------------------


def test_an_answer_outlives_a_socket_that_is_full() -> None:
    """The collector asks, then does not read for a while: frames are lost, and said to be; the answer is not."""
    heard: list[wire.FromEngine] = []
    ready, full, done = threading.Event(), threading.Event(), threading.Event()

    def slow(connection: socket.socket) -> None:
        _welcome(connection)
        connection.sendall(wire.encode(wire.Ping(1)))
        assert isinstance(_read(connection), wire.Pong)
        ready.set()
        assert full.wait(10)
        while not isinstance(last := _read(connection), wire.Frame) or last.sequence < 3000:
            heard.append(last)
        done.set()

    big = wire.Moved("r" * 20_000, 1.0, "gone")
    with FakeCollector(slow) as fake:
        sender = sender_to(fake.address, frames_max=64)
        sender.start()
        assert ready.wait(10)
        number = 0
        while not sender.frames_dropped and number < 2000:
            number += 1
            sender.send(frame(number, big))
        sender.send(answer(7))
        sender.send(snapshot(8, number))
        for later in range(number + 1, 3001):
            sender.send(frame(later))
        full.set()
        assert done.wait(10)
        sender.close()
    words = [item for item in heard if not isinstance(item, wire.Frame)]
    assert [type(word) for word in words if not isinstance(word, wire.Gap)] == [wire.CommandAnswer, wire.Snapshot]
    assert any(isinstance(word, wire.Gap) for word in words)
    sequences = [item.sequence for item in heard if isinstance(item, wire.Frame)]
    assert sequences == sorted(sequences)
    after = heard.index(snapshot(8, number))
    assert all(item.sequence > number for item in heard[after:] if isinstance(item, wire.Frame))
    assert sender.answers_dropped == 0


async def test_an_order_whose_answer_is_lost_does_not_wait_for_ever() -> None:
    async with collecting() as (collector, audience):
        sender = sender_to(collector.addresses[0])
        sender.start()
        await audience.until(lambda: collector.sources)
        sender._queue._words_max = 0
        result: asyncio.Future[OrderResult] = asyncio.get_running_loop().create_future()
        collector.order("e", "abort", "r1", result.set_result, seconds=0.05)
        sender.send(answer(collector._command_id))
        assert await result == OrderResult("failed", 0.0, "the probe does not answer")
        assert sender.answers_dropped == 1
        assert not collector._orders
        sender.close()


async def test_words_for_a_collector_that_is_gone_are_not_for_the_next() -> None:
    async with collecting() as (collector, audience):
        sender = sender_to(collector.addresses[0])
        for later in range(1, 6):  # as orders that this collector will give
            sender.send(answer(collector._command_id + later))
        sender.start()
        await audience.until(lambda: collector.sources)
        result: asyncio.Future[OrderResult] = asyncio.get_running_loop().create_future()
        collector.order("e", "abort", "r1", result.set_result, seconds=0.05)
        assert (await result).answer == "failed"
        sender.close()


async def test_two_collectors_do_not_number_their_orders_alike() -> None:
    from stopguard.probe.collector import Collector
    from tests.unit.probe.rig import Audience

    numbers = {Collector([], TOKEN, Audience())._command_id for _ in range(8)}
    assert len(numbers) == 8
