"""The routes beside generation: who is there, is it well, and the abort doors, as each imitated server has them.

A route exists only for the style whose server has it, so that a client which identifies an engine by its
routes finds what it would find there. `/v1/models` and `/health` exist everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from stopguard.errors import LimitReached
from stopguard.refengine.http_driver import Inbox
from stopguard.refengine.http_face import Face
from stopguard.refengine.http_message import Request, Response, json_response
from stopguard.refengine.http_metrics import (
    CONTENT_TYPE,
    IterationRecords,
    LateGauges,
    SlotBoard,
    llama_metrics,
    loads,
    sglang_metrics,
    vllm_metrics,
)
from stopguard.refengine.http_openai import BodyReader, chat_prompt, prompts_of, token_ids
from stopguard.refengine.http_styles import HttpProblem
from stopguard.refengine.interface import (
    EngineCrashed,
    NotSupported,
    PauseMode,
    RequestRejected,
    RequestSpec,
    SamplingParameters,
)
from stopguard.refengine.model import decode, encode

__all__ = ["Handler", "Routes", "routes_for"]

Handler = Callable[[Request], Response]
Routes = dict[tuple[str, str], Handler]

_IDS_MAX: Final = 4096


def routes_for(face: Face) -> Routes:
    """(method, path) -> handler for the face's style."""
    routes: Routes = {("GET", "/v1/models"): lambda _: json_response(_models(face))}
    match face.style.policy:
        case "vllm":
            routes |= _vllm(face)
        case "sglang":
            routes |= _sglang(face)
        case "llamacpp":
            routes |= _llamacpp(face)
        case "trtllm":
            routes |= _trtllm(face)
        case "deepinfer":
            routes |= _deepinfer(face)
    return routes


def _models(face: Face) -> dict[str, Any]:
    entry = {
        "id": face.options.defaults.model,
        "object": "model",
        "created": int(face.clock.wall()),
        "owned_by": face.style.owned_by,
        "root": face.options.defaults.model,
        "parent": None,
        "max_model_len": face.engine.config.max_model_tokens,
    }
    return {"object": "list", "data": [entry]}


def _empty_health(face: Face) -> Response:
    return Response(face.health().status)


def _text(body: bytes) -> Response:
    return Response(200, body, CONTENT_TYPE)


# vLLM -----------------------------------------------------------------------------------------------

_VLLM_PAUSES: Final[dict[str, PauseMode]] = {"abort": "abort", "wait": "wait", "keep": "hold"}


def _vllm(face: Face) -> Routes:
    routes: Routes = {
        ("GET", "/health"): lambda _: _empty_health(face),
        ("GET", "/ping"): lambda _: _empty_health(face),
        ("GET", "/version"): lambda _: json_response({"version": face.style.version}),
        ("GET", "/load"): lambda _: json_response({"server_load": len(face.exchanges)}),
        ("GET", "/metrics"): lambda _: _text(vllm_metrics(face)),
        ("POST", "/tokenize"): lambda request: _tokenize(face, request),
        ("POST", "/detokenize"): lambda request: json_response(
            {"prompt": decode(token_ids(request.json().get("tokens") or []))}
        ),
    }
    if face.options.dev_mode:
        pausing = _Pausing(face)
        routes |= {
            ("POST", "/abort_requests"): lambda request: _abort_requests(face, request),
            ("POST", "/pause"): lambda request: pausing.pause(_VLLM_PAUSES, request.query.get("mode", "abort")),
            ("POST", "/resume"): lambda _: pausing.resume(),
            ("GET", "/is_paused"): lambda _: json_response({"is_paused": pausing.paused}),
            ("GET", "/server_info"): lambda _: json_response({"vllm_config": repr(face.engine.config)}),
        }
    return routes


def _tokenize(face: Face, request: Request) -> Response:
    reader = BodyReader(request.json())
    if "messages" in reader.body:
        prompts = prompts_of(chat_prompt(reader)[0], add_special_tokens=True)
    else:
        prompts = prompts_of(reader.text("prompt"), add_special_tokens=reader.boolean("add_special_tokens", True))
    return json_response(
        {"count": len(prompts[0]), "max_model_len": face.engine.config.max_model_tokens, "tokens": list(prompts[0])}
    )


def _abort_requests(face: Face, request: Request) -> Response:
    """`aborted` counts the ids that were given; without `request_ids` everything is aborted."""
    ids = request.json().get("request_ids")
    if ids is None:
        ids = list(face.driver.by_handle)
    for name in _ids(ids, "request_ids"):
        face.driver.abort(name)
    return json_response({"status": "aborted", "aborted": len(ids)})


def _ids(value: Any, field: str) -> list[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise HttpProblem(400, f"{field} must be a list of ids, none of them empty")
    if len(value) > _IDS_MAX:
        raise HttpProblem(400, f"{field} has {len(value)} ids; at most {_IDS_MAX} are allowed")
    return value


class _Pausing:
    """A paused engine, as its front end knows it."""

    def __init__(self, face: Face) -> None:
        self._face = face
        self.paused = False

    def pause(self, modes: dict[str, PauseMode], name: str) -> Response:
        mode = modes.get(name)
        if mode is None:
            raise HttpProblem(400, f"mode must be one of {', '.join(modes)}, not {name!r}")
        try:
            self._face.driver.command(lambda at: self._face.engine.pause(mode, at))
        except NotSupported as error:
            raise HttpProblem(400, str(error)) from error
        self.paused = True
        return json_response({"status": "paused"})

    def resume(self) -> Response:
        self._face.driver.command(self._face.engine.resume_all)
        self.paused = False
        return json_response({"status": "resumed"})


# SGLang ---------------------------------------------------------------------------------------------

_SGLANG_PAUSES: Final[dict[str, PauseMode]] = {"abort": "abort", "retract": "retract", "in_place": "hold"}


def _sglang(face: Face) -> Routes:
    gauges, published = LateGauges(face, 40), LateGauges(face, 15)
    health = _GeneratingHealth(face)
    pausing = _Pausing(face)
    information = {
        "model_path": face.options.defaults.model,
        "tokenizer_path": face.options.defaults.model,
        "is_generation": True,
        "weight_version": "default",
    }
    server_information = {
        **information,
        "version": face.style.version,
        "served_model_name": face.options.defaults.model,
        "page_size": face.engine.config.block_tokens,
        "max_running_requests": face.engine.config.max_running,
        "max_total_num_tokens": face.engine.config.blocks * face.engine.config.block_tokens,
    }

    def pause(request: Request) -> Response:
        pausing.pause(_SGLANG_PAUSES, BodyReader(request.json()).text("mode", "abort"))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    def go_on(_: Request) -> Response:
        pausing.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    return {
        ("GET", "/health"): lambda _: health.look(),
        ("GET", "/health_generate"): lambda _: health.look(),
        ("GET", "/metrics"): lambda _: _text(sglang_metrics(face, gauges)),
        ("GET", "/v1/loads"): lambda _: json_response(loads(face, published)),
        ("GET", "/model_info"): lambda _: json_response(information),
        ("GET", "/get_model_info"): lambda _: json_response(information),
        ("GET", "/server_info"): lambda _: json_response(server_information),
        ("GET", "/get_server_info"): lambda _: json_response(server_information),
        ("POST", "/abort_request"): lambda request: _abort_rid(face, request),
        ("POST", "/pause_generation"): pause,
        ("POST", "/continue_generation"): go_on,
    }


def _abort_rid(face: Face, request: Request) -> Response:
    """200 with an empty body, before the scheduler has acted; the same for unknown ids."""
    reader = BodyReader(request.json())
    if reader.boolean("abort_all"):
        for handle in list(face.driver.by_handle):
            face.driver.abort(handle)
        return Response(200)
    rid = reader.text("rid")
    if rid:
        face.driver.abort(rid)
    return Response(200)


class _GeneratingHealth:
    """`/health` issues a generation of one token, if none is under way; the answer is what the engine knows."""

    def __init__(self, face: Face) -> None:
        self._face = face
        self._number = 0
        self._live = ""

    def look(self) -> Response:
        face = self._face
        status = face.health().status
        if status == 200 and face.options.health_generates and self._live not in face.driver.tickets:
            self._number += 1
            self._live = f"HEALTH_CHECK_{self._number}"
            spec = RequestSpec(self._live, (0,), SamplingParameters(max_tokens=1), stream=False)
            try:
                ticket = face.driver.submit(spec, "", Inbox())
            except (LimitReached, EngineCrashed, RequestRejected):
                self._live = ""
            else:
                face.driver.forget([ticket])
        return Response(status)


# llama.cpp ------------------------------------------------------------------------------------------


def _llamacpp(face: Face) -> Routes:
    board = SlotBoard(face)

    def health(_: Request) -> Response:
        status = face.health().status
        if status == 200:
            return json_response({"status": "ok"})
        raise HttpProblem(status, face.health().reason)

    def slots(request: Request) -> Response:
        _observe(face)
        shown = board.read()
        if request.query.get("fail_on_no_slot") and all(slot["is_processing"] for slot in shown):
            raise HttpProblem(503, "no slot available")
        return json_response(shown)

    def metrics(_: Request) -> Response:
        _observe(face)
        return _text(llama_metrics(face))

    def cancel(request: Request) -> Response:
        """204 for any id: it is no acknowledgement."""
        name = request.query.get("conv_id") or request.path.removeprefix("/v1/stream").strip("/")
        if not name:
            raise HttpProblem(400, "give the conversation as ?conv_id=")
        face.driver.abort(name)
        return Response(204)

    properties = {
        "default_generation_settings": {"n_ctx": face.engine.config.max_model_tokens},
        "total_slots": face.engine.config.max_running,
        "model_path": face.options.defaults.model,
        "build_info": face.style.version,
    }
    return {
        ("GET", "/health"): health,
        ("GET", "/v1/health"): health,
        ("GET", "/slots"): slots,
        ("GET", "/metrics"): metrics,
        ("GET", "/props"): lambda _: json_response(properties),
        ("DELETE", "/v1/stream"): cancel,
        ("POST", "/tokenize"): lambda request: json_response(
            {"tokens": encode(BodyReader(request.json()).text("content"))}
        ),
        ("POST", "/detokenize"): lambda request: json_response(
            {"content": decode(token_ids(request.json().get("tokens") or []))}
        ),
        ("POST", "/apply-template"): lambda request: json_response(
            {"prompt": chat_prompt(BodyReader(request.json()))[0]}
        ),
    }


def _observe(face: Face) -> None:
    """The status pages go through the task queue, and so restart the waits that notice closed connections."""
    if not face.driver.failure:
        face.driver.command(face.engine.observe)


# TensorRT-LLM, DeepInfer ----------------------------------------------------------------------------


def _trtllm(face: Face) -> Routes:
    records = IterationRecords(face)
    return {
        ("GET", "/health"): lambda _: _empty_health(face),
        ("GET", "/version"): lambda _: json_response({"version": face.style.version}),
        ("GET", "/metrics"): lambda _: json_response(records.drain()),
    }


def _deepinfer(face: Face) -> Routes:
    """The engine ships no server: these are the routes of the face that its adapter package puts around it."""

    def abort(request: Request) -> Response:
        """`aborted` is what `LLMEngine.abort_request` returns: sequences taken out; 0 is "try again" or "none"."""
        name = BodyReader(request.json()).text("request_id")
        if not name:
            raise HttpProblem(400, "request_id must be a text")
        return json_response({"aborted": sum(answer.count for answer in face.driver.abort(name)), "tokens": 0})

    def health(_: Request) -> Response:
        known = face.health()
        return json_response({"status": "ok" if known.status == 200 else known.reason}, known.status)

    def gauges(_: Request) -> Response:
        totals = face.engine.gauges()
        return json_response(
            {
                "running": totals.running + totals.transferring,
                "waiting": totals.waiting + totals.preempted + totals.paused,
                "ending": 0,
                "blocks_used": totals.blocks_held + totals.blocks_fenced,
                "blocks_total": totals.blocks_total,
                "block_tokens": face.engine.config.block_tokens,
                "steps_total": totals.steps_total,
                "generated_tokens_total": totals.generated_tokens_total,
                "aborts_total": totals.aborts_total,
                "preemptions_total": totals.preemptions_total,
            }
        )

    return {
        ("GET", "/health"): health,
        ("GET", "/deepinfer/gauges"): gauges,
        ("POST", "/abort"): abort,
    }
