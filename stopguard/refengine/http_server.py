"""Serving the face on a real socket: uvicorn with httptools, on uvloop where there is one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from stopguard.errors import ConfigurationError
from stopguard.listening import open_listener
from stopguard.refengine.http_app import Application
from stopguard.refengine.http_face import Face

__all__ = ["run", "serving"]

#: Requests that still run when the server is told to end get an error and this long to hear of it.
_GOODBYE_SECONDS = 2


class _Server(uvicorn.Server):
    """Signals are the caller's business: the server may be one of several things in the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(face: Face, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `face` in the running loop; gives the URL. At the end open requests get an error, and all is closed."""
    listener = open_listener(host, port)
    name = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        Application(face),
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        timeout_graceful_shutdown=_GOODBYE_SECONDS,
        backlog=4096,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="reference engine HTTP")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise ConfigurationError(f"the HTTP server on {host}:{port} ended before it had started")
            await asyncio.sleep(0.005)
        yield f"http://{name}:{listener.getsockname()[1]}"
    finally:
        face.close()
        server.should_exit = True
        await task
        listener.close()


def run(face: Face, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is called once, with the URL, when requests are taken."""

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        async with serving(face, host, port) as url:
            ready(url)
            await ended.wait()

    try:
        import uvloop  # noqa: PLC0415 (absent on some platforms)
    except ImportError:
        asyncio.run(main())
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
