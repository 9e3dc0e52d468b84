"""Inside SGLang's API process (HTTP server, TokenizerManager): clients that leave, early aborts, children.

Facts (sglang 0.5.23)
---------------------
- A non-streaming request, and any request before its first chunk, asks every 4 s whether its client is still there
  (`_stream_one_response`, `SGLANG_REQUEST_STATE_WAIT_TIMEOUT`). `DisconnectGuard` around the whole application learns
  it at once and cancels the handler; SGLang's own clean-up (`_release_req_states_on_failure`) then aborts whatever had
  been sent to the scheduler, children included, and drops what had not.
- An abort that comes while its request is parked here (a pause, the tokenization) finds nothing in the scheduler, but
  marks the request as aborted, and every later abort is then swallowed (`ReqState.abort_sent`). Once the request has
  been sent on, the abort is sent again.
- With `n` > 1 the children get ids of chance (`regenerate_rid`), and an abort of the parent's id does nothing. Here the
  children's ids begin with the parent's, when that is one of ours, and an abort of the parent reaches them.
- A LoRA adapter is kept loaded by references, one a request (`_validate_and_resolve_lora`, `_release_lora_once`).
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from time import monotonic
from typing import Any, Final

from stopguard.middleware import DisconnectGuard
from stopguard.probe import wire
from stopguard.probe.sender import Guarded, Sender
from stopguard_sglang.plugin import KIND, Hook

__all__ = ["FrontWatch", "GenerationGuard", "guard_server", "hooks", "watch"]

logger = logging.getLogger("stopguard.probe")

_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_INPUT: Final = "sglang.srt.managers.io_struct.GenerateReqInput."
_OURS: Final = re.compile(r"(sg-[0-9a-f]{32})([_.].*)?")
#: Both or neither: `_release_lora_once` came with 0.5.22.
_LORA_HOOKS: Final = frozenset({
    "TokenizerManager._validate_and_resolve_lora",
    "TokenizerManager._release_lora_once",
})  # fmt: skip
_NO_LORA: Final = "references to LoRA adapters are not in the books"
#: Routes whose work is for the client that waits. Others (weights, profiling, background responses) run to their end.
_GENERATING: Final = frozenset({
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/v1/classify", "/v1/rerank"),
    *("/v1/score", "/v1/decisions", "/v1/audio/transcriptions", "/generate", "/encode", "/classify"),
    *("/api/chat", "/api/generate", "/invocations", "/vertex_generate"),
})  # fmt: skip
#: Starlette's streaming response listens for the disconnect itself and ends at once.
_LISTENER_SECONDS: Final = 0.1

Application = Callable[[Any, Any, Any], Awaitable[None]]


class GenerationGuard:
    """ASGI: `DisconnectGuard` for the routes that generate, nothing for the others."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self.guard = DisconnectGuard(app, listener_seconds=_LISTENER_SECONDS)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in _GENERATING:
            await self.guard(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def guard_server() -> None:
    """Put the guard around SGLang's HTTP application, when this process has one that has not started yet."""
    try:
        application = importlib.import_module("sglang.srt.entrypoints.http_server").app
        application.add_middleware(GenerationGuard)
    except Exception as error:  # no HTTP server here, or one that runs already
        logger.info("StopGuard's plugin: disconnects are left to SGLang in this process (%s)", error)


class FrontWatch:
    """All that is known of one TokenizerManager. Methods are called in its event loop, but for `nudge`."""

    def __init__(self) -> None:
        self.manager: Any = None
        self.sender: Sender | None = None
        self.loras: dict[str, int] = {}
        self.sequence = 0
        self.repaired = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._version = ""
        self._sees_loras = True

    def greet(self, version: str, attached: Sequence[str], missing: Sequence[str]) -> None:
        """What the greeting to the collector shall say of our hooks."""
        self._version = version
        self._names = (tuple(attached), tuple(missing))
        # A reference that nobody gives back would be called a leak.
        self._sees_loras = _LORA_HOOKS.isdisjoint(missing)

    def start(self, manager: Any) -> None:
        """The manager has its event loop."""
        if self.manager is not None:
            return
        self.manager = manager
        self._loop = manager.event_loop
        attached, missing = self._names
        self.sender = Sender.from_environment(
            KIND,
            self._version,
            role="api",
            commands=("abort",),
            hooks_attached=attached,
            hooks_missing=missing,
            on_command=self.nudge,
        )
        if self.sender is not None:
            self.sender.start()

    # ---- aborts ----------------------------------------------------------------------------------

    def children_of(self, manager: Any, rid: str) -> list[str]:
        """The live children of a request of ours that is not there by its own id."""
        found = _OURS.fullmatch(rid)
        if found is None or found[2] or rid in manager.rid_to_state:
            return []
        return [name for name in manager.rid_to_state if name.startswith(rid)]

    def dispatched(self, manager: Any, rid: str) -> None:
        """The request has been sent to the scheduler: an abort that came before must be sent again."""
        state = manager.rid_to_state.get(rid)
        if state is not None and state.abort_sent:
            state.abort_sent = False
            self.repaired += 1
            manager.abort_request(rid)

    # ---- LoRA references ---------------------------------------------------------------------------

    def lora_taken(self, request: Any) -> None:
        """Its adapters are referenced from now on."""
        if not self._sees_loras or not getattr(request, "lora_id", None):
            return
        single = not isinstance(request.rid, list)
        rids = [request.rid] if single else request.rid
        loras = [request.lora_id] if single else request.lora_id
        count = max(1, int(getattr(request, "parallel_sample_num", 1) or 1))
        for rid, lora in zip(rids, loras, strict=False):
            if lora:
                self._count_lora(rid, 1 if single else count)

    def lora_given_back(self, state: Any) -> None:
        if not self._sees_loras:
            return
        self._count_lora(state.obj.rid, -1)

    def _count_lora(self, rid: str, change: int) -> None:
        found = _OURS.match(rid)
        rid = found[1] if found else rid
        count = self.loras.get(rid, 0) + change
        if count > 0:
            self.loras[rid] = count
        else:
            self.loras.pop(rid, None)
        kind = wire.SlotTaken if change > 0 else wire.SlotReturned
        self._send([kind(rid, monotonic(), "lora", abs(change))])

    def _send(self, events: list[wire.Event]) -> None:
        if self.sender is not None:
            self.sequence += 1
            self.sender.send(wire.Frame(self.sequence, 0, monotonic(), events, 0, 0, 0, 0))

    # ---- commands --------------------------------------------------------------------------------

    def nudge(self) -> None:
        """Commands have come (called by the sender's thread): look at them in the event loop."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_obey)

    def obey(self) -> None:
        """Carry out what has come."""
        sender, manager = self.sender, self.manager
        if sender is None or manager is None:
            return
        for command in sender.commands():
            rid = command.request_id
            if command.action == "abort":
                here = [rid] if rid in manager.rid_to_state else self.children_of(manager, rid)
                for name in here:
                    manager.abort_request(name)
                sender.send(wire.CommandAnswer(command.command_id, "accepted" if here else "unknown"))
            else:
                sender.send(wire.CommandAnswer(command.command_id, "unsupported"))


watch: Final = FrontWatch()

_start = Guarded(watch.start, "start", 5)
_obey = Guarded(watch.obey, "obey", 20)
_children_of = Guarded(watch.children_of, "children", 20)
_dispatched = Guarded(watch.dispatched, "dispatched", 20)
_lora_taken = Guarded(watch.lora_taken, "lora taken", 20)
_lora_given_back = Guarded(watch.lora_given_back, "lora given back", 20)


# ---- hooks -----------------------------------------------------------------------------------------


def begin(_result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    if watch.manager is None:
        _start(manager)


def abort(original: Callable[..., Any], manager: Any, rid: str = "", abort_all: bool = False, **kwargs: Any) -> Any:
    children = None if abort_all or not rid else _children_of(manager, rid)
    for child in children or ():
        original(manager, child, False, **kwargs)
    if children:
        return None
    return original(manager, rid, abort_all, **kwargs)


def dispatched(_result: Any, manager: Any, rid: str, *args: Any, **kwargs: Any) -> None:
    _dispatched(manager, rid)


def new_child_id(original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    before = request.rid
    fresh = original(request, *args, **kwargs)
    if isinstance(before, str) and isinstance(fresh, str):
        found = _OURS.fullmatch(before)
        if found is not None:
            request.rid = fresh = f"{found[1]}.{fresh}"
    return fresh


async def take_lora(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    result = await original(manager, request, *args, **kwargs)
    _lora_taken(request)
    return result


def give_lora_back(result: Any, _manager: Any, state: Any, *args: Any, **kwargs: Any) -> None:
    if result is not None:
        result.add_done_callback(lambda task: None if task.cancelled() or task.exception() else _lora_given_back(state))


def hooks() -> list[Hook]:
    """The hook points of a process that has a TokenizerManager."""
    return [
        Hook(_MANAGER + "auto_create_handle_loop", begin, "after"),
        Hook(_MANAGER + "abort_request", abort, "around"),
        Hook(_MANAGER + "_mark_state_dispatched", dispatched, "after"),
        Hook(_INPUT + "regenerate_rid", new_child_id, "around"),
        Hook(_MANAGER + "_validate_and_resolve_lora", take_lora, "around", instead=_NO_LORA),
        Hook(_MANAGER + "_release_lora_once", give_lora_back, "after", instead=_NO_LORA),
    ]
