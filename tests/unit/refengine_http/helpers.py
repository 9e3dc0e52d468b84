"""What these tests share: short bodies, a small engine, and how to stop at a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stopguard.refengine.http_face import FaceOptions
from stopguard.refengine.http_virtual import VirtualExchange, VirtualServer
from stopguard.refengine.interface import EngineConfig

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
POLICIES = ("vllm", "sglang", "llamacpp", "trtllm", "deepinfer")


def chat(tokens: int = 8, *, stream: bool = False, words: int = 4, **more: Any) -> dict[str, Any]:
    content = "the river and the stone " * words
    return {
        "model": "base",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "stream": stream,
        **more,
    }


def completion(tokens: int = 8, *, stream: bool = False, words: int = 4, **more: Any) -> dict[str, Any]:
    return {"prompt": "the river and the stone " * words, "max_tokens": tokens, "stream": stream, **more}


def server(policy: str = "vllm", *, faults: tuple[str, ...] = (), **more: Any) -> VirtualServer:
    config = EngineConfig(**{"blocks": 64, "max_running": 8, "max_model_tokens": 900, **more})
    return VirtualServer(policy, config, faults, options=FaceOptions(dev_mode=True))


async def first_token(server: VirtualServer, exchange: VirtualExchange) -> None:
    """Let time pass until the engine has sampled something for the exchange's only request."""
    await server.run_until(lambda: any(view.output_tokens for view in server.snapshot().requests))


async def assert_settled(server: VirtualServer) -> None:
    """Nothing is open in the engine, the driver or the face, and the HTTP gauges say so, too."""
    snapshot = await server.finish()
    assert snapshot.settled, snapshot
    truth = (await server.fetch("GET", "/ref/snapshot")).json()
    assert truth["settled"], truth
    assert truth["face"]["exchanges_open"] == truth["face"]["tickets_open"] == truth["face"]["handles"] == 0
    server.engine.verify()


def all_ended(exchanges: Sequence[VirtualExchange]) -> Callable[[], bool]:
    """For `run_until`."""
    return lambda: all(exchange.ended for exchange in exchanges)


def any_ended(exchanges: Sequence[VirtualExchange]) -> Callable[[], bool]:
    """For `run_until`."""
    return lambda: any(exchange.ended for exchange in exchanges)
