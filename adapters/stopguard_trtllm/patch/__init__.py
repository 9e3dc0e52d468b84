"""The event-driven watcher for TensorRT-LLM's server, put in when this package is imported.

    trtllm-serve MODEL --custom_module_dirs "$(python -m stopguard_trtllm)"

`tensorrt_llm/serve/openai_server.py: OpenAIServer.await_disconnected` asks once a second whether the client has left.
This replaces that one method by one that is told (see `watching`), and has `/version` say so in a header, by which the
adapter knows that connections to this server may be used again.

It looks for what it needs and not for version numbers. What it does not find it leaves alone, with one line in the log,
and whatever goes wrong here never ends the server's start. Only the standard library is imported: the package lies in
an environment that is TensorRT-LLM's, and is loaded under the name of its folder.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
from typing import Any

from . import watching

__all__ = ["HEADER", "HEADER_VALUE", "apply"]

#: What `/version` answers with when the watcher is in place.
HEADER = "x-stopguard-disconnects"
HEADER_VALUE = "event-driven"

_MODULE = "tensorrt_llm.serve.openai_server"
_MARK = "__stopguard__"


def apply() -> bool:
    """Replace the poll; whether it is replaced now. Called by the import of this package, and harmless again."""
    log: Any = logging.getLogger("stopguard")
    with contextlib.suppress(Exception):
        # Its own logger joins its arguments and formats nothing, so messages are made beforehand.
        log = importlib.import_module("tensorrt_llm.logger").logger
    try:
        server = importlib.import_module(_MODULE).OpenAIServer
        problem = _problem_with(server)
        if problem:
            line = f"StopGuard: {problem}; disconnects are still found by this server's own poll"
            log.warning(line)
            return False
        if not hasattr(server.await_disconnected, _MARK):
            _replace(server, log)
            log.info("StopGuard: disconnects are found by event, no longer by a poll each second")
    except Exception as error:
        line = f"StopGuard: the disconnect poll cannot be replaced ({type(error).__name__}: {error}); it stays"
        log.warning(line)
        return False
    return True


def _problem_with(server: Any) -> str:
    """What is missing in this server's class; empty when nothing is."""
    method = getattr(server, "await_disconnected", None)
    if method is None:
        return "OpenAIServer has no await_disconnected"
    if hasattr(method, _MARK):
        return ""
    if not inspect.iscoroutinefunction(method):
        return "OpenAIServer.await_disconnected is no coroutine function"
    names = list(inspect.signature(method).parameters)
    if names != ["self", "raw_request", "promise"]:
        return f"OpenAIServer.await_disconnected has the arguments {', '.join(names)}"
    return ""


def _replace(server: Any, log: Any) -> None:
    replacement = watching.replacement(server.await_disconnected, log)
    setattr(replacement, _MARK, True)
    server.await_disconnected = replacement
    told = getattr(server, "version", None)
    if not inspect.iscoroutinefunction(told):
        return  # nothing depends on it: the adapter then opens a connection for each request, as without the patch

    @functools.wraps(told)
    async def version(self: Any) -> Any:
        response = await told(self)
        response.headers[HEADER] = HEADER_VALUE
        return response

    server.version = version


apply()
