"""Who may call the admin API: those with the token, or, without one, programs of this machine.

Loopback without a token is not open to web pages: a page may make its reader's browser call
``http://127.0.0.1:9090``, also under a name of its own (DNS rebinding). So without a token the `Host` must be a
loopback address or `localhost`, and a request that a browser marks as coming from another site is refused.
Orders (POST) must say `application/json`, which a page cannot send to another site unasked.

`/healthz` and `/readyz` need no token: probes of an orchestrator have none, and they say nothing but words. Where there
is a token the live page at `/` needs none either: a browser that opens a page sends none, and the page itself asks.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

from stopguard.config import Address, parse_address

__all__ = ["OPEN_PATHS", "Guard"]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
_PAGE_PATH = "/"
_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_BODY_BYTES_MAX = 256 * 1024

Application = Callable[[Any, Any, Any], Awaitable[None]]


class Guard:
    """A pure ASGI layer around the admin app."""

    def __init__(self, app: Application, token: str | None) -> None:
        self._app = app
        # Equal lengths for the comparison, whatever was sent.
        self._digest = None if token is None else sha256(token.encode()).digest()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], scope["method"], headers)
        if refusal is not None:
            await _refuse(send, *refusal)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, path: str, method: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """(status, why) for a call that must not go on."""
        if not _small_enough(headers):
            return 413, f"the body must have a content-length of at most {_BODY_BYTES_MAX} bytes"
        if path in OPEN_PATHS and method in ("GET", "HEAD"):
            return None
        if self._digest is not None:
            if path == _PAGE_PATH and method in ("GET", "HEAD"):
                return None
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            right = hmac.compare_digest(sha256(given.strip()).digest(), self._digest)
            if scheme.lower() != b"bearer" or not right:
                return 401, "this needs the admin token: send Authorization: Bearer TOKEN"
            return None
        if not _is_loopback_name(headers.get(b"host", b"").decode("latin-1")):
            return 403, "without a token only 127.0.0.1, [::1] and localhost are answered: set admin.token_file"
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return 403, "a page of another site may not call this"
        return None


def _small_enough(headers: dict[bytes, bytes]) -> bool:
    if b"transfer-encoding" in headers:
        return False
    length = headers.get(b"content-length", b"0")
    return length.isdigit() and int(length) <= _BODY_BYTES_MAX


def _is_loopback_name(host: str) -> bool:
    try:
        return parse_address(host).is_loopback
    except ValueError:
        pass
    return Address(host.removeprefix("[").removesuffix("]"), 0).is_loopback


async def _refuse(send: Any, status: int, why: str) -> None:
    body = json.dumps({"detail": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *_HEADERS]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
