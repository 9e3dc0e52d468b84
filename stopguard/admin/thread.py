"""A thread and an event loop for the admin app, so that nothing in it can hold up the relay.

Encoding a page of requests takes a millisecond or two of pure Python, the first OpenAPI document fifty. On the
relay's loop that would be time in which no client's leaving is seen. In a thread of its own it competes for
the interpreter's lock only, which it must give up whenever the relay wants it and a switch interval has
passed; `stopguard serve` sets that interval to half a millisecond.

The address is bound by the caller's thread, so that a port that is taken is an error at the start.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from stopguard.config import Address, ServerTls
from stopguard.errors import ConfigurationError
from stopguard.listening import open_listener

__all__ = ["AdminThread"]

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_CONNECTIONS_MAX = 256
_BACKLOG = 128


class AdminThread:
    """The admin port; made by `start`, ended by `stop`."""

    def __init__(self, server: _Server, listening: socket.socket, url: str) -> None:
        self.url = url
        self._server = server
        self._listening = listening
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        app: Any,
        address: Address,
        *,
        tls: ServerTls | None = None,
        background: Callable[[], Awaitable[None]] | None = None,
    ) -> AdminThread:
        """Serve `app` at `address`. `background` runs on the admin loop for as long.

        Raises `ConfigurationError` when the address cannot be had.
        """
        listening = open_listener(address.host, address.port, whose="admin: ")
        listening.listen(_BACKLOG)
        real = Address(*listening.getsockname()[:2])
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=_CONNECTIONS_MAX,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            backlog=_BACKLOG,
            **_tls_options(tls),
        )
        thread = cls(_Server(config), listening, f"{'https' if tls else 'http'}://{real}")
        thread._thread = threading.Thread(target=thread._run, args=(background,), name="admin", daemon=True)
        thread._thread.start()
        if not thread._started.wait(_START_SECONDS) or thread._failure is not None:
            listening.close()
            raise ConfigurationError(f"the admin port on {address} cannot be served: {thread._failure or 'timeout'}")
        return thread

    def stop(self) -> None:
        """Finish the calls that are being answered, for a moment, and end the thread. Harmless twice."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
        self._listening.close()

    def _run(self, background: Callable[[], Awaitable[None]] | None) -> None:
        try:
            asyncio.run(self._serve(background))
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self, background: Callable[[], Awaitable[None]] | None) -> None:
        tasks = [asyncio.ensure_future(background())] if background is not None else []
        self._server.when_started = self._started.set
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Server(uvicorn.Server):
    """uvicorn's server that says when it listens."""

    when_started: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.when_started()


def _tls_options(tls: ServerTls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    options: dict[str, Any] = {
        "ssl_certfile": tls.certificate_file,
        "ssl_keyfile": tls.key_file,
        "ssl_keyfile_password": tls.key_password.get_secret_value() if tls.key_password is not None else "",
    }
    if tls.client_ca_file is not None:
        options |= {"ssl_ca_certs": str(tls.client_ca_file), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options
