"""How five engines stop: data, and a small function where data is not enough.

Sources: vLLM 0.32.0, SGLang 0.5.23, llama.cpp server (build 10068 and the server in xllamacpp
2026.10), TensorRT-LLM (`py_executor.py`, `openai_server.py`) and DeepInfer 0.1.0 (its C++ scheduler),
by running them on a CPU or, for TensorRT-LLM, by reading them.

A policy says nothing about *what* is released: every way out of the engine goes through the same
function (`Core.end`). It says when an abort is read, when it takes effect, what becomes of the tokens
in flight, when resources come back, who is preempted, how a closed connection is noticed and what the
doors answer. All five settle every request; some are slow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from stopguard.errors import ConfigurationError
from stopguard.refengine.interface import AbortAnswer, Door, FinishReason, PauseMode
from stopguard.refengine.request import State

if TYPE_CHECKING:
    from stopguard.refengine.request import Request

__all__ = ["DEFAULT_POLICY", "POLICIES", "Policy", "Watch", "policy_named"]

#: The order in which the scheduler reads commands. `aborts_first`: before it processes a step's output;
#: `head`: after the output, before other commands; `fifo`: in the order of arrival; `at_call`: in the call.
Intake = Literal["aborts_first", "head", "fifo", "at_call"]

#: `boundary`: applied when read. `marked`: a running request ends with its next step. `loop`: whatever its
#: state, after the next forward pass. `beat`: taken out at once, cleaned up at the next boundary.
Effect = Literal["boundary", "marked", "loop", "beat"]


class Watch(msgspec.Struct):
    """What the front end knows about the connection of one request; times in seconds."""

    request_id: str
    stream: bool
    started_at: float
    first_output_at: float | None = None
    gone_at: float | None = None
    noticed: bool = False


#: When a closed connection is noticed: (watch, when anything was last delivered, own setting) -> seconds.
Detection = Callable[[Watch, float, float | None], float]
#: Who is preempted among the running (in queue order, never empty).
VictimRule = Callable[[Sequence["Request"]], "Request"]
#: What the engine's own route answers, and whether the abort is sent on: (request id, live requests).
ApiDoor = Callable[[str, Sequence["Request"]], tuple[AbortAnswer, bool]]
#: The internal id of child `index` of `n`: (the caller's id, index, the engine's random numbers).
ChildNames = Callable[[str, int, random.Random], str]


class Policy(msgspec.Struct, frozen=True):
    """One engine's way to stop. See the module for what each group decides."""

    name: str
    summary: str
    # When an abort is read and when it acts.
    intake: Intake
    effect: Effect
    #: A request in the queue ends when the abort is read, whatever `effect` says for running ones.
    waiting_at_once: bool
    #: What an abort does while the KV comes from another instance: give up the blocks behind a fence, wait, refuse.
    in_transfer: Literal["fence", "wait", "refuse", "unsupported"]
    prefix_match: bool
    # The tokens in flight.
    output: Literal["stale", "discard", "deliver"]
    #: From the moment that the front end has sent the abort, it delivers nothing.
    front_gate: bool
    abort_reason: FinishReason
    # Release.
    #: The last response goes out before resources are freed.
    response_first: bool
    #: How many boundaries after the release the final output is handed out.
    final_output_beats: int
    #: Blocks that are not full are kept for reuse as well.
    keeps_partial_blocks: bool
    # Preemption.
    preempts: bool
    victim: VictimRule
    victim_goes: Literal["front", "back", "paused"]
    retract_evicts_cache: bool
    finishes_structured_victims: bool
    #: Admit only what fits to its very end, so that nothing ever has to be preempted.
    admits_whole: bool
    preempts_at_admission: bool
    #: A named request can be preempted on command and held (`preempt`, `resume`).
    holds: bool
    # Doors and detection.
    api_door: ApiDoor
    detection: Detection
    child_names: ChildNames
    pause_modes: tuple[PauseMode, ...] = ()
    pipeline_depth: int = 1


# Detection ------------------------------------------------------------------------------------------


def _gone_at(watch: Watch) -> float:
    if watch.gone_at is None:
        raise ConfigurationError(f"the client of {watch.request_id} has not gone")
    return watch.gone_at


def _next_tick(start: float, period: float, after: float) -> float:
    """The first of `start` + k x `period` (k >= 1) that is not before `after`."""
    return start + max(1, math.ceil((after - start) / period - 1e-9)) * period


def _at_once(watch: Watch, _delivered_at: float, _own_seconds: float | None) -> float:
    """`listen_for_disconnect` races the handler: an event."""
    return _gone_at(watch)


def _slept_or_polled(watch: Watch, _delivered_at: float, own_seconds: float | None) -> float:
    """Streams: `create_abort_task` sleeps 2 s. Anything before its first chunk, and all that does not
    stream: the 4 s poll of `_stream_one_response`, counted from the start of the request.

    SGLang 0.5.23 often notices a stream earlier, when a write fails: `stream_detection_seconds` sets that.
    """
    if watch.stream and watch.first_output_at is not None:
        return _gone_at(watch) + (2.0 if own_seconds is None else own_seconds)
    return _next_tick(watch.started_at, 4.0, _gone_at(watch))


def _starved(watch: Watch, delivered_at: float, _own_seconds: float | None) -> float:
    """Streams: the next write. Else `recv_with_timeout`: its 1 s wait starts again with every delivery to
    anybody, and only a wait that runs out looks at the connection: starved while a neighbour streams.
    """
    if watch.stream and watch.first_output_at is not None:
        return _gone_at(watch)
    return _next_tick(max(watch.started_at, delivered_at), 1.0, _gone_at(watch))


def _polled(watch: Watch, _delivered_at: float, _own_seconds: float | None) -> float:
    """`await_disconnected` looks once a second from the start of the request."""
    return _next_tick(watch.started_at, 1.0, _gone_at(watch))


# Victims --------------------------------------------------------------------------------------------


def _least_urgent(running: Sequence[Request]) -> list[Request]:
    lowest = min(request.spec.priority for request in running)
    return [request for request in running if request.spec.priority == lowest]


def _last_of_queue(running: Sequence[Request]) -> Request:
    """`Scheduler.schedule`: `running.pop()`, or with priorities the last of the least urgent."""
    return _least_urgent(running)[-1]


def _fewest_output(running: Sequence[Request]) -> Request:
    """`retract_decode`: fewest output tokens first, then the longest prompt."""
    return min(_least_urgent(running), key=lambda request: (request.outputs, -request.prompt_tokens))


def _longest_output(running: Sequence[Request]) -> Request:
    """`scheduler.hpp`: longest output first."""
    return max(running, key=lambda request: request.outputs)


# Doors ----------------------------------------------------------------------------------------------


def _api_counts_given(_request_id: str, _live: Sequence[Request]) -> tuple[AbortAnswer, bool]:
    """`POST /abort_requests`: `aborted` counts the ids that were *given*."""
    return AbortAnswer("accepted", 200, count=1), True


def _api_always_200(_request_id: str, live: Sequence[Request]) -> tuple[AbortAnswer, bool]:
    """`POST /abort_request`: 200 and an empty body for any id; with n > 1 the children have other names."""
    return AbortAnswer("accepted", 200), not any(request.parent_id for request in live)


def _api_always_204(_request_id: str, live: Sequence[Request]) -> tuple[AbortAnswer, bool]:
    """`DELETE /v1/stream/<id>`: 204 for any id; only a stream that has its slot is cancelled."""
    works = any(request.spec.stream and request.state is State.RUNNING for request in live)
    return AbortAnswer("accepted", 204), works


def _api_missing(_request_id: str, _live: Sequence[Request]) -> tuple[AbortAnswer, bool]:
    """There is no HTTP abort route."""
    return AbortAnswer("no_door", 404), False


def _api_in_process(_request_id: str, live: Sequence[Request]) -> tuple[AbortAnswer, bool]:
    """`LLMEngine.abort_request(ids) -> count`: the engine replaces this answer by what it really did."""
    return AbortAnswer("unknown", 200, count=0), bool(live)


# Names of children ----------------------------------------------------------------------------------


def _child_prefixed(request_id: str, index: int, _numbers: random.Random) -> str:
    return f"{index}_{request_id}"


def _child_uuid(_request_id: str, _index: int, numbers: random.Random) -> str:
    return f"{numbers.getrandbits(128):032x}"


def _child_suffixed(request_id: str, index: int, _numbers: random.Random) -> str:
    return f"{request_id}#{index}"


POLICIES: Final[dict[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy(
            name="vllm",
            summary="event-driven; applied at the next step boundary; late output is stale; release behind the fence",
            intake="aborts_first",
            effect="boundary",
            waiting_at_once=True,
            in_transfer="fence",
            prefix_match=False,
            output="stale",
            front_gate=False,
            abort_reason="abort",
            response_first=False,
            final_output_beats=0,
            keeps_partial_blocks=False,
            preempts=True,
            victim=_last_of_queue,
            victim_goes="front",
            retract_evicts_cache=False,
            finishes_structured_victims=False,
            admits_whole=False,
            preempts_at_admission=False,
            holds=True,
            api_door=_api_counts_given,
            detection=_at_once,
            child_names=_child_prefixed,
            pause_modes=("abort", "wait", "hold"),
            pipeline_depth=2,
        ),
        Policy(
            name="sglang",
            summary="a running request is marked and ends with its next step; streams noticed 2 s late; ids by prefix",
            intake="fifo",
            effect="marked",
            waiting_at_once=True,
            in_transfer="wait",
            prefix_match=True,
            output="discard",
            front_gate=True,
            abort_reason="abort",
            response_first=False,
            final_output_beats=0,
            keeps_partial_blocks=False,
            preempts=True,
            victim=_fewest_output,
            victim_goes="back",
            retract_evicts_cache=True,
            finishes_structured_victims=False,
            admits_whole=False,
            preempts_at_admission=True,
            holds=True,
            api_door=_api_always_200,
            detection=_slept_or_polled,
            child_names=_child_uuid,
            pause_modes=("abort", "retract", "hold"),
        ),
        Policy(
            name="llamacpp",
            summary="cancel task at the queue's head; a running decode is not interrupted; the slot keeps its KV",
            intake="head",
            effect="boundary",
            waiting_at_once=True,
            in_transfer="unsupported",
            prefix_match=False,
            output="discard",
            front_gate=True,
            abort_reason="abort",
            response_first=False,
            final_output_beats=0,
            keeps_partial_blocks=True,
            preempts=False,
            victim=_last_of_queue,
            victim_goes="front",
            retract_evicts_cache=False,
            finishes_structured_victims=False,
            admits_whole=True,
            preempts_at_admission=False,
            holds=False,
            api_door=_api_always_204,
            detection=_starved,
            child_names=_child_suffixed,
        ),
        Policy(
            name="trtllm",
            summary="1 Hz poll, FIFO queue, one loop; may refuse and retries; the last response goes out, then release",
            intake="fifo",
            effect="loop",
            waiting_at_once=False,
            in_transfer="refuse",
            prefix_match=False,
            output="deliver",
            front_gate=False,
            abort_reason="cancelled",
            response_first=True,
            final_output_beats=0,
            keeps_partial_blocks=False,
            preempts=True,
            victim=_last_of_queue,
            victim_goes="paused",
            retract_evicts_cache=False,
            finishes_structured_victims=False,
            admits_whole=False,
            preempts_at_admission=False,
            holds=False,
            api_door=_api_missing,
            detection=_polled,
            child_names=_child_suffixed,
        ),
        Policy(
            name="deepinfer",
            summary="marked in the call, cleaned one beat later; a prefill step in flight cannot be stopped",
            intake="at_call",
            effect="beat",
            waiting_at_once=True,
            in_transfer="refuse",
            prefix_match=False,
            output="deliver",
            front_gate=False,
            abort_reason="abort",
            response_first=False,
            final_output_beats=1,
            keeps_partial_blocks=False,
            preempts=True,
            victim=_longest_output,
            victim_goes="front",
            retract_evicts_cache=False,
            finishes_structured_victims=True,
            admits_whole=False,
            preempts_at_admission=False,
            holds=False,
            api_door=_api_in_process,
            detection=_at_once,
            child_names=_child_prefixed,
        ),
    )
}


DEFAULT_POLICY: Final = "vllm"
"""The policy of a reference engine about which nothing else was said."""


def policy_named(name: str) -> Policy:
    """The policy, or `ConfigurationError` with the names that exist."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigurationError(f"no policy {name!r}; there are: {', '.join(POLICIES)}") from None


def answer_at_door(policy: Policy, request_id: str, live: Sequence[Request], door: Door) -> tuple[AbortAnswer, bool]:
    """What `door` answers, and whether the abort goes on to the scheduler."""
    if door == "api":
        return policy.api_door(request_id, live)
    return AbortAnswer("accepted", 202 if door == "inside" else 200), True
