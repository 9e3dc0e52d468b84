"""The patch for TensorRT-LLM's server: when it watches, when it aborts, and servers that it does not know."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stopguard_trtllm import patch
from stopguard_trtllm.patch import watching

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def nothing_stays() -> AsyncIterator[None]:
    yield
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if task.get_name() in {"stopguard departure", "watcher"}] == []


class Log:
    """TensorRT-LLM's logger joins what it is given; so one ready string is all that may come."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, line: str) -> None:
        self.lines.append(line)

    warning = info


class Request:
    """Starlette's `Request` as far as it matters; a server that has one disconnect to give, once, to one asker."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"type": "http"}
        self.client = "127.0.0.1:1"
        self.messages: deque[dict[str, Any]] = deque()
        self.news = asyncio.Event()
        self.askers = 0

    async def receive(self) -> dict[str, Any]:
        self.askers += 1
        try:
            while not self.messages:
                self.news.clear()
                await self.news.wait()
            return self.messages.popleft()
        finally:
            self.askers -= 1

    def says(self, kind: str) -> None:
        self.messages.append({"type": kind})
        self.news.set()


class Promise:
    """`GenerationResult`: `finished` turns true in `_handle_response`."""

    def __init__(self, request_id: int = 1) -> None:
        self.request_id = request_id
        self.finished = False
        self.aborts = 0

    def _handle_response(self, final: bool = True) -> str:
        self.finished = final
        return "handled"

    def abort(self) -> None:
        self.aborts += 1


class Opaque:
    """A promise of another kind: no method tells of its end, and its attributes are fixed."""

    __slots__ = ("aborts", "finished", "request_id")

    def __init__(self) -> None:
        self.request_id, self.finished, self.aborts = 7, False, 0

    def abort(self) -> None:
        self.aborts += 1


async def stock(self: Any, raw_request: Any, promise: Any) -> None:
    raise AssertionError("the stock poll")


def watch(request: Any, promise: Any, log: Log | None = None) -> asyncio.Task[None]:
    method = watching.replacement(stock, log or Log())
    return asyncio.get_running_loop().create_task(method(object(), request, promise), name="watcher")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("nothing_stays")
async def test_it_aborts_when_the_client_leaves() -> None:
    request, promise, log = Request(), Promise(), Log()
    task = watch(request, promise, log)
    await settle()
    assert not task.done()
    request.says("http.disconnect")
    await task
    assert promise.aborts == 1
    assert log.lines == ["127.0.0.1:1 is disconnected, abort 1"]
    assert "_handle_response" not in vars(promise)
    assert request.scope == {"type": "http"}


@pytest.mark.usefixtures("nothing_stays")
async def test_it_ends_with_the_promise_although_the_connection_lives() -> None:
    request, promise, log = Request(), Promise(), Log()
    task = watch(request, promise, log)
    await settle()
    assert promise._handle_response(final=False) == "handled"
    await settle()
    assert not task.done()
    assert promise._handle_response() == "handled"
    await task
    await settle()
    assert (promise.aborts, request.askers, log.lines) == (0, 0, [])
    assert "_handle_response" not in vars(promise)
    assert request.scope == {"type": "http"}


@pytest.mark.usefixtures("nothing_stays")
async def test_finished_beats_gone() -> None:
    """The end and the disconnect in one turn of the loop."""
    request, promise = Request(), Promise()
    task = watch(request, promise)
    await settle()
    request.says("http.disconnect")
    promise._handle_response()
    await task
    assert promise.aborts == 0


@pytest.mark.usefixtures("nothing_stays")
async def test_a_promise_that_has_ended_is_not_watched() -> None:
    request, promise = Request(), Promise()
    promise.finished = True
    await watch(request, promise)
    assert (promise.aborts, request.askers) == (0, 0)


@pytest.mark.usefixtures("nothing_stays")
async def test_without_a_client_there_is_nothing_to_watch() -> None:
    promise = Promise()
    await watch(None, promise)
    assert promise.aborts == 0
    assert "_handle_response" not in vars(promise)


@pytest.mark.usefixtures("nothing_stays")
async def test_many_prompts_of_one_request_share_one_asker() -> None:
    request, promises = Request(), [Promise(number) for number in range(5)]
    tasks = [watch(request, promise) for promise in promises]
    await settle()
    assert request.askers == 1
    promises[0]._handle_response()
    await tasks[0]
    assert not any(task.done() for task in tasks[1:])
    request.says("http.disconnect")
    await asyncio.gather(*tasks)
    assert [promise.aborts for promise in promises] == [0, 1, 1, 1, 1]


@pytest.mark.usefixtures("nothing_stays")
async def test_a_prompt_that_begins_after_its_client_has_left_is_aborted() -> None:
    request, first, second = Request(), Promise(1), Promise(2)
    task = watch(request, first)
    await settle()
    request.says("http.disconnect")
    await settle()
    # The watcher of the first prompt is done; the second prompt's begins only now.
    assert task.done()
    request.says("http.disconnect")  # uvicorn says it as often as it is asked
    await watch(request, second)
    assert (first.aborts, second.aborts) == (1, 1)


@pytest.mark.usefixtures("nothing_stays")
async def test_the_rest_of_the_body_is_no_disconnect() -> None:
    request, promise = Request(), Promise()
    task = watch(request, promise)
    request.says("http.request")
    await settle()
    assert not task.done()
    promise._handle_response()
    await task


@pytest.mark.usefixtures("nothing_stays")
async def test_a_cancelled_watcher_leaves_nothing_and_aborts_nothing() -> None:
    request, promise = Request(), Promise()
    task = watch(request, promise)
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert (promise.aborts, request.askers) == (0, 0)
    assert "_handle_response" not in vars(promise)


@pytest.mark.usefixtures("nothing_stays")
async def test_results_that_a_thread_takes_end_it_too() -> None:
    request, promise = Request(), Promise()
    task = watch(request, promise)
    await settle()
    await asyncio.to_thread(promise._handle_response)
    await task
    assert promise.aborts == 0


@pytest.mark.usefixtures("nothing_stays")
async def test_an_error_in_the_last_response_ends_it_too() -> None:
    request, promise = Request(), Promise()

    def fails() -> None:
        promise.finished = True
        raise RuntimeError("the engine is broken")

    promise._handle_response = fails  # type: ignore[assignment,method-assign]
    task = watch(request, promise)
    await settle()
    with pytest.raises(RuntimeError, match="broken"):
        promise._handle_response()
    await task
    assert vars(promise)["_handle_response"] is fails


@pytest.mark.usefixtures("nothing_stays")
async def test_a_promise_of_another_kind_is_asked_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_ASK_SECONDS", 0.0)
    log = Log()
    method = watching.replacement(stock, log)
    for leaves in (True, False):
        request, promise = Request(), Opaque()
        task = asyncio.get_running_loop().create_task(method(object(), request, promise), name="watcher")
        await settle()
        assert not task.done()
        if leaves:
            request.says("http.disconnect")
        else:
            promise.finished = True
        await task
        assert promise.aborts == leaves
    assert log.lines == [
        "StopGuard: the end of a Opaque is no event, it is asked for each second",
        "127.0.0.1:1 is disconnected, abort 7",
    ]


@pytest.mark.usefixtures("nothing_stays")
async def test_an_end_that_comes_by_another_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_BACKSTOP_SECONDS", 0.0)
    request, promise = Request(), Promise()
    task = watch(request, promise)
    await settle()
    promise.finished = True
    await task
    assert promise.aborts == 0


async def test_a_request_of_another_kind_is_left_to_the_stock_poll() -> None:
    polled = []

    async def poll(self: Any, raw_request: Any, promise: Any) -> None:
        polled.append((raw_request, promise))

    request, promise = object(), Promise()
    await watching.replacement(poll, Log())(object(), request, promise)
    assert polled == [(request, promise)]


# ---- putting it in -----------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Log]:
    """A `tensorrt_llm` whose server is made anew for each test."""

    class Response:
        def __init__(self) -> None:
            self.headers: dict[str, str] = {}

    class OpenAIServer:
        async def await_disconnected(self, raw_request: Any, promise: Any) -> None:
            raise AssertionError("the stock poll")

        async def version(self) -> Response:
            return Response()

    log = Log()
    root, serve = types.ModuleType("tensorrt_llm"), types.ModuleType("tensorrt_llm.serve")
    logger, server = types.ModuleType("tensorrt_llm.logger"), types.ModuleType("tensorrt_llm.serve.openai_server")
    logger.logger = log  # type: ignore[attr-defined]
    server.OpenAIServer = OpenAIServer  # type: ignore[attr-defined]
    for module in (root, serve, logger, server):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return server, log


async def test_it_replaces_the_poll_and_says_so(installed: tuple[Any, Log]) -> None:
    module, log = installed
    assert patch.apply()
    server, promise, request = module.OpenAIServer(), Promise(), Request()
    task = asyncio.get_running_loop().create_task(server.await_disconnected(request, promise))
    await settle()
    request.says("http.disconnect")
    await task
    assert promise.aborts == 1
    assert (await server.version()).headers == {"x-stopguard-disconnects": "event-driven"}
    assert log.lines[0] == "StopGuard: disconnects are found by event, no longer by a poll each second"


async def test_twice_is_once(installed: tuple[Any, Log]) -> None:
    module, log = installed
    assert patch.apply()
    method, version = module.OpenAIServer.await_disconnected, module.OpenAIServer.version
    assert patch.apply()
    assert (module.OpenAIServer.await_disconnected, module.OpenAIServer.version) == (method, version)
    assert len(log.lines) == 1


async def _renamed(self: Any, request: Any, promise: Any) -> None: ...


def _plain(self: Any, raw_request: Any, promise: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (None, "has no await_disconnected"),
        (_renamed, "has the arguments self, request, promise"),
        (_plain, "is no coroutine function"),
    ],
)
async def test_a_server_that_it_does_not_know_is_left_alone(installed: tuple[Any, Log], method: Any, says: str) -> None:
    module, log = installed
    if method is None:
        del module.OpenAIServer.await_disconnected
    else:
        module.OpenAIServer.await_disconnected = method
    version = module.OpenAIServer.version
    assert not patch.apply()
    assert getattr(module.OpenAIServer, "await_disconnected", None) is method
    assert module.OpenAIServer.version is version
    (line,) = log.lines
    assert says in line
    assert "own poll" in line


async def test_a_server_without_version_is_patched_without_a_word_there(installed: tuple[Any, Log]) -> None:
    module, _ = installed
    del module.OpenAIServer.version
    assert patch.apply()
    assert not hasattr(module.OpenAIServer, "version")


def test_an_import_that_fails_never_ends_the_servers_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    assert not patch.apply()
    (record,) = caplog.records
    assert "cannot be replaced (ModuleNotFoundError" in record.getMessage()


def test_it_imports_only_the_standard_library() -> None:
    """It is loaded by its folder's name, as `--custom_module_dirs` does it, in an environment without StopGuard."""
    from stopguard_trtllm.adapter import PATCH

    code = (
        f"import sys; sys.path.insert(0, {str(PATCH.parent)!r}); before = set(sys.modules); import patch; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['patch']"


def test_the_folder_for_custom_modules_can_be_asked_for() -> None:
    from stopguard_trtllm.adapter import PATCH

    ran = subprocess.run([sys.executable, "-m", "stopguard_trtllm"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{PATCH}\n"
