"""The proxy that most people write first: FastAPI in front, one shared httpx client behind, bytes streamed through.

Run by uvicorn (``uvicorn fastapi_proxy:app``) in a virtual environment of its own; the engine's
base URL comes from ``RELAY_BENCH_UPSTREAM``. The connection limit is lifted (httpx stops at 100) so that it can carry
the 200 streams of the comparison; everything else is as the two libraries have it by default.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@asynccontextmanager
async def _lifespan(application: FastAPI) -> AsyncIterator[None]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    base_url = os.environ["RELAY_BENCH_UPSTREAM"]
    async with httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False) as client:
        application.state.client = client
        yield


app = FastAPI(lifespan=_lifespan)


@app.api_route("/{path:path}", methods=["GET", "POST"])
async def proxy(path: str, request: Request) -> StreamingResponse:
    """Passes any request on and streams the answer back."""
    client: httpx.AsyncClient = request.app.state.client
    headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
    upstream_request = client.build_request(
        request.method, f"/{path}", headers=headers, params=request.query_params, content=await request.body()
    )
    response = await client.send(upstream_request, stream=True)
    return StreamingResponse(
        response.aiter_raw(),
        status_code=response.status_code,
        headers={name: value for name, value in response.headers.items() if name not in _HOP_BY_HOP},
        background=BackgroundTask(response.aclose),
    )
