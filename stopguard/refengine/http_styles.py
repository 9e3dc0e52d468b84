"""How five servers look from outside: ids, error bodies, stream endings, versions. Data, and three small functions.

Sources: vLLM 0.32.0 (`entrypoints/openai`), SGLang 0.5.23 (`entrypoints/openai/serving_chat.py`,
`http_server.py`), llama.cpp server build 10068 (`tools/server/README.md`), TensorRT-LLM
(`tensorrt_llm/serve/openai_server.py`). DeepInfer 0.1.0 has no server: its face is ours.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from stopguard.errors import ClientError, ConfigurationError

__all__ = ["STYLES", "HttpProblem", "Style", "error_body", "style_named"]

ErrorShape = Literal["nested", "flat", "llama", "plain"]


class HttpProblem(ClientError):
    """The request cannot be served; `status` is the HTTP status that the imitated engine answers with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Style(msgspec.Struct, frozen=True):
    """One server's manners. The stop behaviour is in `policies`; this is only what a client can read."""

    policy: str
    version: str
    owned_by: str
    server: str
    error_shape: ErrorShape
    #: What a full server answers.
    overload_status: int
    #: The response's head goes out before the first token (a Starlette StreamingResponse), or with it.
    headers_first: bool
    #: Chunks whose text is held back are not sent at all.
    skips_empty_text: bool
    #: `finish_reason` comes in a chunk of its own.
    separate_finish: bool
    #: A stream that was aborted just ends: no finish reason, no `[DONE]`.
    cuts_aborted_streams: bool
    #: Times the engine's neutral priority (higher is more urgent): -1 where a lower number goes first, 0 where ignored.
    priority_sign: int
    #: What the id of a response is made of: the header, the body field `rid`, or random only.
    id_from: Literal["header", "rid", "random"]
    #: Two live requests may bear the same id.
    twins: bool
    #: More `max_tokens` than the context has room for are cut to it; else they are an error.
    caps_max_tokens: bool = False


STYLES: Final[dict[str, Style]] = {
    style.policy: style
    for style in (
        Style(
            policy="vllm",
            version="0.32.0",
            owned_by="vllm",
            server="uvicorn",
            error_shape="nested",
            overload_status=503,
            headers_first=True,
            skips_empty_text=False,
            separate_finish=False,
            cuts_aborted_streams=False,
            priority_sign=-1,
            id_from="header",
            twins=True,
        ),
        Style(
            policy="sglang",
            version="0.5.23",
            owned_by="sglang",
            server="uvicorn",
            error_shape="flat",
            overload_status=503,
            headers_first=False,
            skips_empty_text=True,
            separate_finish=True,
            cuts_aborted_streams=False,
            priority_sign=1,
            id_from="rid",
            twins=False,
        ),
        Style(
            policy="llamacpp",
            version="b10068",
            owned_by="llamacpp",
            server="llama.cpp",
            error_shape="llama",
            overload_status=503,
            headers_first=False,
            skips_empty_text=True,
            separate_finish=True,
            cuts_aborted_streams=True,
            priority_sign=0,
            id_from="random",
            twins=False,
            caps_max_tokens=True,
        ),
        Style(
            policy="trtllm",
            version="1.3.0",
            owned_by="tensorrt_llm",
            server="uvicorn",
            error_shape="flat",
            overload_status=503,
            headers_first=True,
            skips_empty_text=False,
            separate_finish=False,
            cuts_aborted_streams=False,
            priority_sign=1,
            id_from="random",
            twins=False,
        ),
        Style(
            policy="deepinfer",
            version="0.1.0",
            owned_by="deepinfer",
            server="deepinfer",
            error_shape="plain",
            overload_status=429,
            headers_first=True,
            skips_empty_text=False,
            separate_finish=False,
            cuts_aborted_streams=False,
            priority_sign=1,
            id_from="header",
            twins=False,
        ),
    )
}

#: Status -> error type, in the words of each shape.
_TYPES: Final[dict[str, dict[int, str]]] = {
    "nested": {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 503: "ServiceUnavailableError"},
    "flat": {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 503: "ServiceUnavailableError"},
    "llama": {
        400: "invalid_request_error",
        404: "not_found_error",
        413: "invalid_request_error",
        501: "not_supported_error",
        503: "unavailable_error",
    },
    "plain": {},
}
_FALLBACK: Final = {
    "nested": "InternalServerError",
    "flat": "InternalServerError",
    "llama": "server_error",
    "plain": "",
}


def style_named(policy: str) -> Style:
    """The style, or `ConfigurationError` with the names that exist."""
    try:
        return STYLES[policy]
    except KeyError:
        raise ConfigurationError(f"no HTTP style for policy {policy!r}; there are: {', '.join(STYLES)}") from None


def error_body(style: Style, status: int, message: str) -> dict[str, object]:
    """The JSON body of an error, in the shape of the imitated server."""
    kind = _TYPES[style.error_shape].get(status, _FALLBACK[style.error_shape])
    match style.error_shape:
        case "nested":
            return {"error": {"message": message, "type": kind, "param": None, "code": status}}
        case "flat":
            return {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        case "llama":
            return {"error": {"code": status, "message": message, "type": kind}}
        case "plain":
            return {"error": message, "code": status}
