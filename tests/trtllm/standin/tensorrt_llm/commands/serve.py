"""`trtllm-serve`, as far as a stop needs it: custom modules are imported before the engine is built."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import socket
import sys

from tensorrt_llm._torch.pyexecutor.py_executor import ExecutorConfig  # type: ignore[import-not-found]
from tensorrt_llm.llmapi.llm import LLM, LlmArgs  # type: ignore[import-not-found]
from tensorrt_llm.serve.openai_server import OpenAIServer  # type: ignore[import-not-found]
from tensorrt_llm.tools.importlib_utils import import_custom_module_from_dir  # type: ignore[import-not-found]

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Serve until the process is told to end. The first line on stdout is the port."""
    parser = argparse.ArgumentParser("trtllm-serve (stand-in)")
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--custom_module_dirs", nargs="*", default=[])
    parser.add_argument("--return_perf_metrics", action="store_true")
    parser.add_argument("--no_iter_perf_stats", action="store_true")
    parser.add_argument("--step_seconds", type=float, default=0.01)
    parser.add_argument("--max_batch_size", type=int, default=4)
    parser.add_argument("--refusals", type=int, default=0)
    parser.add_argument("--middleware", default="", help="dotted name of an ASGI middleware class, put outermost")
    parser.add_argument("--silent_after_end", action="store_true")
    given = parser.parse_args(arguments)
    for folder in given.custom_module_dirs:
        import_custom_module_from_dir(folder)

    stats = not given.no_iter_perf_stats
    config = ExecutorConfig(
        step_seconds=given.step_seconds,
        max_batch_size=given.max_batch_size,
        refusals=given.refusals,
        enable_iter_perf_stats=stats,
    )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((given.host, given.port))
    listener.listen(512)
    print(listener.getsockname()[1], flush=True)

    async def serve() -> None:
        llm = LLM(LlmArgs(return_perf_metrics=given.return_perf_metrics, enable_iter_perf_stats=stats), config)
        server = OpenAIServer(llm, given.model, silent_after_end=given.silent_after_end)
        if given.middleware:
            module, _, name = given.middleware.rpartition(".")
            server.app.add_middleware(getattr(importlib.import_module(module), name))
        await server(given.host, given.port, listener.fileno())

    asyncio.run(serve())


if __name__ == "__main__":
    main(sys.argv[1:])
