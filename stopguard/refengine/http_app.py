"""The ASGI application: finds the route, reads the body, and turns every failure into the style's error.

Raw ASGI, no framework: the application must own `receive()`, since how servers watch it (or fail to) is
what the reference engine is about.
"""

from __future__ import annotations

from typing import Any, Final

from stopguard import __version__
from stopguard.errors import StopGuardError
from stopguard.refengine.http_exchange import Exchange
from stopguard.refengine.http_face import Face
from stopguard.refengine.http_message import Receive, Request, Response, Scope, Send, json_response, read_request
from stopguard.refengine.http_native import GenerateShape, LlamaShape, parse_generate, parse_llama
from stopguard.refengine.http_openai import Call, ChatShape, CompletionShape, Shape, parse_call
from stopguard.refengine.http_routes import routes_for
from stopguard.refengine.http_styles import HttpProblem, error_body
from stopguard.refengine.http_truth import truth_routes

__all__ = ["Application"]

_OPENAI_ROUTES: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
}
_NATIVE_ROUTES: Final = {
    ("sglang", "/generate"): "generate",
    ("llamacpp", "/completion"): "llama",
    ("llamacpp", "/completions"): "llama",
    ("llamacpp", "/chat/completions"): "chat",
}


class Application:
    """`app(scope, receive, send)` for one face. Its lifespan starts and stops the real-time driver."""

    def __init__(self, face: Face) -> None:
        self.face = face
        style = face.style
        self._routes = routes_for(face)
        if face.options.truth:
            self._routes |= truth_routes(face)
        self._generations = dict(_OPENAI_ROUTES)
        for (policy, path), kind in _NATIVE_ROUTES.items():
            if policy == style.policy:
                self._generations[path] = kind
        self._shapes: dict[str, Shape] = {
            "chat": ChatShape(style),
            "completions": CompletionShape(style),
            "generate": GenerateShape(style),
            "llama": LlamaShape(style),
        }
        self._paths = {path for _, path in self._routes} | set(self._generations)
        self._headers = (
            (b"server", style.server.encode()),
            (b"x-reference-engine", f"{style.policy}; stopguard {__version__}".encode()),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case kind:
                raise NotImplementedError(f"the reference engine does not speak {kind}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.face.driver.start()
                for begin in self.face.on_start:
                    begin()
                await send({"type": "lifespan.startup.complete"})
            else:
                self.face.close()
                await self.face.driver.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = await read_request(scope, receive, self.face.options.body_bytes_max)
            if request is None:
                return
            if request.method == "POST" and request.path in self._generations:
                kind = self._generations[request.path]
                exchange = Exchange(self.face, self._call(kind, request), self._shapes[kind], self._headers)
                await exchange.run(receive, send)
                return
            response = self._answer(request)
        except StopGuardError as error:
            response = self._problem(error)
        await send(response.start(self._headers))
        await send({"type": "http.response.body", "body": response.body})

    def _call(self, kind: str, request: Request) -> Call:
        face = self.face
        common: dict[str, Any] = {
            "style": face.style,
            "defaults": face.options.defaults,
            "numbers": face.numbers,
            "created": int(face.clock.wall()),
        }
        body = request.json()
        match kind:
            case "generate":
                call = parse_generate(body, **common)
            case "llama":
                call = parse_llama(body, headers=request.headers, config=face.engine.config, **common)
            case _:
                chat = kind == "chat"
                call = parse_call(body, chat=chat, headers=request.headers, config=face.engine.config, **common)
        rid = body.get("rid")
        call.owner = request.headers.get("x-request-id", "") or (rid if isinstance(rid, str) else "")
        return call

    def _answer(self, request: Request) -> Response:
        self.face.driver.catch_up()
        handler = self._routes.get((request.method, request.path))
        if handler is None and request.path.startswith("/v1/stream/"):
            handler = self._routes.get((request.method, "/v1/stream"))
        if handler is not None:
            return handler(request)
        if request.path in self._paths:
            raise HttpProblem(405, "Method Not Allowed")
        raise HttpProblem(404, "Not Found")

    def _problem(self, error: StopGuardError) -> Response:
        status = error.status if isinstance(error, HttpProblem) else error.status_hint
        response = json_response(error_body(self.face.style, status, str(error)), status)
        if status == 413:
            response.headers = ((b"connection", b"close"),)
        return response
