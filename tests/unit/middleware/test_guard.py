"""Each window in which a client can leave, against a server by hand. No test sleeps: the loop only turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stopguard.middleware import DisconnectGuard, GuardStatistics
from tests.unit.middleware.driver import Server, body, serve, start, turns

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
async def _nothing_stays() -> AsyncIterator[None]:
    """No test leaves a task of the guard behind."""
    yield
    await asyncio.sleep(0)
    left = [task.get_name() for task in asyncio.all_tasks() if "guard" in task.get_name()]
    assert left == []


class Handler:
    """Answers after `go`; keeps what happened to it."""

    def __init__(self, *, stream: bool = False, read_body: bool = False, cleanup: int = 0) -> None:
        self.go = asyncio.Event()
        self.stream = stream
        self.read_body = read_body
        self.cleanup = cleanup
        self.reached = asyncio.Event()
        self.events: list[str] = []
        self.received: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            if self.read_body:
                while True:
                    message = await receive()
                    self.received.append(message)
                    if message["type"] == "http.disconnect":
                        self.events.append("told")
                        return
                    if not message["more_body"]:
                        break
            if self.stream:
                await send(start())
                await send(body(b"half", more=True))
            self.reached.set()
            await self.go.wait()
            if not self.stream:
                await send(start())
            await send(body(b"done"))
            self.events.append("answered")
        except asyncio.CancelledError:
            self.events.append("cancelled")
            for _ in range(self.cleanup):
                await asyncio.sleep(0)
                self.events.append("cleaned")
            raise


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_stays_is_served(stream: bool) -> None:
    server, handler = Server(), Handler(stream=stream)
    server.uploads(b"{}")
    guard, task = serve(handler, server)
    await handler.reached.wait()
    handler.go.set()
    await task
    assert server.body == (b"halfdone" if stream else b"done")
    assert handler.events == ["answered"]
    assert guard.statistics() == GuardStatistics(0, 0, finished_total=1, listened_total=0, cancelled_total=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_handler_that_does_not_listen_is_cancelled(stream: bool) -> None:
    server, handler = Server(), Handler(stream=stream, cleanup=3)
    server.uploads(b"{}")
    guard, task = serve(handler, server)
    await handler.reached.wait()
    assert guard.statistics().watchers_open == 1
    server.client_leaves()
    await task  # ends without an error: the server has nothing to report
    assert handler.events == ["cancelled", "cleaned", "cleaned", "cleaned"]
    assert task.cancelling() == 0
    assert guard.statistics() == GuardStatistics(0, 0, finished_total=0, listened_total=0, cancelled_total=1)


async def test_it_left_before_the_handler_began() -> None:
    server, handler = Server(), Handler()
    server.client_leaves()
    _, task = serve(handler, server)
    await task
    assert handler.events == ["cancelled"]
    assert server.sent == []


async def test_one_who_waits_for_the_body_is_told() -> None:
    server, handler = Server(), Handler(read_body=True)
    server.uploads(b"first", more=True)
    guard, task = serve(handler, server, listener_seconds=60)
    await turns(lambda: len(handler.received) == 1)
    server.client_leaves()
    await task
    assert handler.events == ["told"]
    assert [message["type"] for message in handler.received] == ["http.request", "http.disconnect"]
    assert guard.statistics().listened_total == 1


async def test_a_body_arrives_whole_and_in_order() -> None:
    server, handler = Server(), Handler(read_body=True)
    for number in range(50):
        server.uploads(b"%d," % number, more=number < 49)
    _, task = serve(handler, server, read_ahead_bytes=16)
    await handler.reached.wait()
    handler.go.set()
    await task
    assert b"".join(message["body"] for message in handler.received) == b"".join(b"%d," % n for n in range(50))


async def test_an_upload_is_read_ahead_only_so_far() -> None:
    server, handler = Server(), Handler()  # it never reads the body
    for _ in range(100):
        server.uploads(b"x" * 10, more=True)
    guard, task = serve(handler, server, read_ahead_bytes=100)
    await handler.reached.wait()
    await turns(lambda: server.asked == 11)
    for _ in range(20):
        await asyncio.sleep(0)
    assert server.asked == 11
    handler.go.set()
    await task
    assert guard.statistics().watchers_open == 0


async def test_it_leaves_while_its_body_waits_for_the_handler() -> None:
    """Within the read-ahead a disconnect is seen although nobody has read what came before it."""
    server, handler = Server(), Handler()
    server.uploads(b"x" * 10, more=True)
    _, task = serve(handler, server)
    await handler.reached.wait()
    server.client_leaves()
    await task
    assert handler.events == ["cancelled"]


# ---- who listens -------------------------------------------------------------------------------------


async def listens_beside(receive: Any, work: asyncio.Event, events: list[str]) -> None:
    """What vLLM's `with_cancellation` does: the handler and a listener side by side, the loser cancelled."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def handle() -> None:
        try:
            await work.wait()
            events.append("answered")
        except asyncio.CancelledError:
            events.append("aborted at the engine")
            raise

    handling = asyncio.create_task(handle(), name="handling")
    listening = asyncio.create_task(listen(), name="listening")
    _, pending = await asyncio.wait([handling, listening], return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


async def test_one_who_listens_ends_in_its_own_way() -> None:
    events: list[str] = []
    server, work = Server(), asyncio.Event()
    server.uploads(b"{}")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await listens_beside(receive, work, events)

    guard, task = serve(application, server, listener_seconds=60)
    await turns(lambda: any(other.get_name() == "listening" for other in asyncio.all_tasks()))
    for _ in range(5):
        await asyncio.sleep(0)
    server.client_leaves()
    await task
    await turns(lambda: bool(events))
    assert events == ["aborted at the engine"]
    assert guard.statistics() == GuardStatistics(0, 0, finished_total=0, listened_total=1, cancelled_total=0)
    assert not [other for other in asyncio.all_tasks() if other.get_name() in {"handling", "listening"}]


async def test_one_who_listens_and_does_nothing_is_cancelled_all_the_same() -> None:
    server, handler, told = Server(), Handler(), []
    server.uploads(b"{}")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async def listen() -> None:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    told.append(message)
                    return

        listener = asyncio.create_task(listen(), name="listener")
        try:
            await handler(scope, receive, send)
        finally:
            await listener

    guard, task = serve(application, server, listener_seconds=0)
    await handler.reached.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    server.client_leaves()
    await task
    assert handler.events == ["cancelled"]
    assert len(told) == 1
    assert guard.statistics().cancelled_total == 1


async def test_everybody_who_waits_is_told() -> None:
    server, told = Server(), []
    server.uploads(b"{}")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()

        async def listen() -> None:
            told.append((await receive())["type"])

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(listen())

    _, task = serve(application, server, listener_seconds=60)
    for _ in range(10):
        await asyncio.sleep(0)
    server.client_leaves()
    await task
    assert told == ["http.disconnect"] * 3


async def test_a_poll_that_gives_up_at_once_is_no_listener() -> None:
    """`Request.is_disconnected()` asks in a scope that is already cancelled; nobody waits when the client leaves."""
    import anyio

    server, handler, polls = Server(), Handler(), []
    server.uploads(b"{}")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        with anyio.CancelScope() as scope_of_the_poll:
            scope_of_the_poll.cancel()
            polls.append(await receive())
        await handler(scope, receive, send)

    guard, task = serve(application, server, listener_seconds=60)
    await handler.reached.wait()
    assert polls == []
    server.client_leaves()
    await task
    assert handler.events == ["cancelled"]
    assert guard.statistics().cancelled_total == 1


# ---- finished beats gone -----------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [False, True])
async def test_a_disconnect_after_the_end_is_none(silent: bool) -> None:
    """Servers say ``http.disconnect`` after a normal end; background work of the request goes on all the same."""
    server, background, done = Server(silent_after_end=silent), asyncio.Event(), []
    server.uploads(b"{}")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start())
        await send(body(b"answer"))
        done.append((await receive())["type"])  # answered, whether the server says anything or not
        await background.wait()
        done.append("background")

    guard, task = serve(application, server)
    await turns(lambda: len(done) == 1)
    await turns(lambda: guard.statistics().watchers_open == 0)  # nobody watches a request that has ended
    server.client_leaves()
    for _ in range(10):
        await asyncio.sleep(0)
    background.set()
    await task
    assert done == ["http.disconnect", "background"]
    assert guard.statistics() == GuardStatistics(0, 0, finished_total=1, listened_total=0, cancelled_total=0)


async def test_it_leaves_while_the_last_message_is_handed_over() -> None:
    server, handler = Server(), Handler(stream=True)
    server.uploads(b"{}")
    guard, task = serve(handler, server)
    await handler.reached.wait()
    server.block_send = asyncio.Event()
    handler.go.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    server.client_leaves()
    for _ in range(10):
        await asyncio.sleep(0)
    server.block_send.set()
    await task
    assert handler.events == ["answered"]
    assert guard.statistics().finished_total == 1


async def test_a_listener_does_not_cut_the_last_message() -> None:
    """Starlette's StreamingResponse cancels its sender as soon as its listener is told: not before the end is out."""
    server, work, order = Server(), asyncio.Event(), []
    server.uploads(b"{}")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            order.append("listener told")

        listener = asyncio.create_task(listen())
        await work.wait()
        await send(start())
        await send(body(b"end"))
        order.append("end sent")
        await listener

    _, task = serve(application, server)
    server.block_send = asyncio.Event()
    work.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert order == []
    server.block_send.set()
    await task
    assert sorted(order) == ["end sent", "listener told"]
    assert server.body == b"end"


@pytest.mark.parametrize(
    ("messages", "ends_with"),
    [
        ([start(), body(b"a", more=True), body()], 2),
        ([start(), {"type": "http.response.body"}], 1),
        ([start(), {"type": "http.response.pathsend", "path": "/file"}], 1),
        ([start(), {"type": "http.response.zerocopysend", "file": 3, "more_body": True}, body()], 2),
        (
            [
                start(trailers=True),
                body(b"a"),
                {"type": "http.response.trailers", "headers": [], "more_trailers": True},
                {"type": "http.response.trailers", "headers": []},
            ],
            3,
        ),
    ],
    ids=["body", "default", "file", "zero-copy", "trailers"],
)
async def test_which_message_is_the_last(messages: list[Any], ends_with: int) -> None:
    """After it leaving is no stop, before it leaving is one."""
    for number in range(len(messages)):
        reached, held = asyncio.Event(), asyncio.Event()
        server = Server(silent_after_end=True)

        async def application(
            scope: Any, receive: Any, send: Any, number: int = number, reached: Any = reached, held: Any = held
        ) -> None:
            for message in messages[: number + 1]:
                await send(message)
            reached.set()
            await held.wait()

        guard, task = serve(application, server)
        await reached.wait()
        server.client_leaves()
        for _ in range(5):
            await asyncio.sleep(0)
        held.set()
        await task
        assert guard.statistics().cancelled_total == (number < ends_with)


# ---- cancels, errors, and what passes through --------------------------------------------------------


async def test_a_handler_may_refuse_to_be_cancelled() -> None:
    server, reached, go = Server(), asyncio.Event(), asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached.set()
        try:
            await go.wait()
        except asyncio.CancelledError:
            await go.wait()
        await send(start())
        await send(body(b"all the same"))

    guard, task = serve(application, server)
    await reached.wait()
    server.client_leaves()
    await turns(lambda: guard.statistics().watchers_open == 0)
    go.set()
    await task
    assert task.cancelling() == 0
    assert server.body == b"all the same"


async def test_a_cancel_from_the_server_is_not_swallowed() -> None:
    server, handler = Server(), Handler()
    server.uploads(b"{}")
    _, task = serve(handler, server)
    await handler.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancel_from_the_server_on_top_of_ours_is_not_swallowed() -> None:
    server, handler = Server(), Handler(cleanup=20)
    server.uploads(b"{}")
    _, task = serve(handler, server)
    await handler.reached.wait()
    server.client_leaves()
    await turns(lambda: "cancelled" in handler.events)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_handler_passes() -> None:
    server = Server()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("broken")

    guard, task = serve(application, server)
    with pytest.raises(ValueError, match="broken"):
        await task
    assert guard.statistics().requests_open == 0


async def test_an_error_of_the_server_reaches_whoever_reads() -> None:
    server, handler = Server(), Handler(read_body=True)
    server.uploads(b"a", more=True)
    _, task = serve(handler, server)
    await turns(lambda: len(handler.received) == 1)
    server.breaks(OSError("the socket broke"))
    with pytest.raises(OSError, match="the socket broke"):
        await task


async def test_nobody_asks_before_the_handler_when_the_client_expects_to_be_asked() -> None:
    """The first question makes the server say 100 Continue, which a handler that refuses by the head must not do."""
    server, handler = Server(), Handler()
    _, task = serve(handler, server, headers=((b"Expect", b"100-continue"),))
    await handler.reached.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert server.asked == 0
    handler.go.set()
    await task


async def test_a_server_that_repeats_itself_cannot_keep_the_loop_busy() -> None:
    server, handler = Server(), Handler()
    for _ in range(1000):
        server.uploads(b"")
    _, task = serve(handler, server)
    await handler.reached.wait()
    for _ in range(500):
        await asyncio.sleep(0)
    assert server.asked < 100
    handler.go.set()
    await task


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_other_scopes_pass_through(kind: str) -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    server = Server()
    scope: Any = {"type": kind}
    receive, send = server.receive, server.send
    await DisconnectGuard(application)(scope, receive, send)
    assert seen == [(scope, receive, send)]


async def test_a_path_that_drains_runs_to_its_end() -> None:
    server, handler = Server(), Handler()
    _, task = serve(handler, server, drain_paths=["/v1/chat/completions"])
    await handler.reached.wait()
    server.client_leaves()
    for _ in range(5):
        await asyncio.sleep(0)
    handler.go.set()
    await task
    assert handler.events == ["answered"]
