"""`/ref/…`: the truth, for tests and for people. No engine has these routes; gateways must not need them.

`GET /ref/snapshot` everything that is open; `GET /ref/gauges` the totals; `GET /ref/health` what is behind
`/health`; `GET /ref/log?limit=&after=&request_id=` what happened; `POST /ref/abort {"request_id", "door"}`;
`POST /ref/preempt` and `POST /ref/resume {"request_id"}` for one request; `POST /ref/pause {"mode"}` and
`POST /ref/resume {}` for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, get_args

import msgspec

from stopguard.refengine.http_face import Face
from stopguard.refengine.http_message import Request, Response, json_response
from stopguard.refengine.http_openai import BodyReader
from stopguard.refengine.http_routes import Routes
from stopguard.refengine.http_styles import HttpProblem
from stopguard.refengine.interface import Door, NotSupported, PauseMode

__all__ = ["truth_routes"]


def truth_routes(face: Face) -> Routes:
    """(method, path) -> handler."""
    return {
        ("GET", "/ref/snapshot"): lambda _: json_response(snapshot(face)),
        ("GET", "/ref/gauges"): lambda _: json_response(face.engine.gauges()),
        ("GET", "/ref/health"): lambda _: json_response(face.health()),
        ("GET", "/ref/log"): lambda request: _log(face, request),
        ("POST", "/ref/abort"): lambda request: _abort(face, request),
        ("POST", "/ref/preempt"): lambda request: _preempt(face, request),
        ("POST", "/ref/pause"): lambda request: _pause(face, request),
        ("POST", "/ref/resume"): lambda request: _resume(face, request),
    }


def snapshot(face: Face) -> dict[str, object]:
    """The engine's snapshot, and what the face and the driver hold open beside it."""
    driver = face.driver
    taken = face.engine.snapshot(driver.catch_up())
    return {
        **msgspec.to_builtins(taken),
        "settled": taken.settled and not driver.tickets and not face.exchanges,
        "policy": face.engine.policy.name,
        "matches_by_prefix": face.engine.policy.prefix_match,
        "faults": [repr(fault) for fault in face.engine.faults],
        "face": {
            "exchanges_open": len(face.exchanges),
            "tickets_open": len(driver.tickets),
            "handles": len(driver.by_handle),
            "outputs_unclaimed": driver.outputs_unclaimed,
            "slipped_seconds": driver.slipped_seconds,
        },
    }


def _log(face: Face, request: Request) -> Response:
    def number(name: str, default: int) -> int:
        value = request.query.get(name, str(default))
        if not value.isdecimal():
            raise HttpProblem(400, f"{name} must be a number, not {value!r}")
        return int(value)

    entries = face.log(number("limit", 200) or 1, number("after", 0), request.query.get("request_id", ""))
    return json_response({"entries": entries, "entries_kept_max": face.options.log_entries_max})


def _abort(face: Face, request: Request) -> Response:
    reader = BodyReader(request.json())
    name, door = reader.text("request_id"), reader.text("door", "api")
    if not name or door not in get_args(Door):
        raise HttpProblem(400, f"give request_id, and a door of {', '.join(get_args(Door))}")
    return json_response(face.driver.abort(name, cast("Door", door)))


def _preempt(face: Face, request: Request) -> Response:
    name = BodyReader(request.json()).text("request_id")
    return _command(face, lambda at: face.engine.preempt(name, at))


def _pause(face: Face, request: Request) -> Response:
    mode = BodyReader(request.json()).text("mode", "hold")
    if mode not in get_args(PauseMode):
        raise HttpProblem(400, f"mode must be one of {', '.join(get_args(PauseMode))}, not {mode!r}")
    return _command(face, lambda at: face.engine.pause(cast("PauseMode", mode), at))


def _resume(face: Face, request: Request) -> Response:
    name = BodyReader(request.json()).text("request_id")
    return _command(face, (lambda at: face.engine.resume(name, at)) if name else face.engine.resume_all)


def _command(face: Face, call: Callable[[float], None]) -> Response:
    try:
        face.driver.command(call)
    except NotSupported as error:
        raise HttpProblem(400, str(error)) from error
    return json_response({"status": "ok"})
