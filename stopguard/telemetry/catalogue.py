"""The catalogue: every metric that StopGuard exposes, with its labels, their closed sets, and where it is read.

Rule 1: a metric that is not in this file does not exist; the reference page is written from it.
Rule 2: every label is a closed set. `engine` is a configured name (or ``none`` before a request was sent
anywhere), `model` is listed by an engine or ``other``. Nothing that a client chooses becomes a label.

Two origins. *books*: read from the ledgers when a scrape comes, so that no gauge can drift from what it counts.
*event*: observed once, when the controller says so, because a latency is gone when its request is.

No engine's own metrics can stand in for these: vLLM's abort counter stays 0 (vllm-project/vllm#31503), aborted
requests are in `prompt_tokens_total` and in no metric per request (vllm-project/vllm#55634), and SGLang counts
cancels by clients as successes (sgl-project/sglang#32456).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stopguard.ledger import Evidence, Ledger
from stopguard.stops import Semantics

__all__ = ["CATALOGUE", "LATENCY_BOUNDS", "PROBE_LAG_BOUNDS", "TOKEN_BOUNDS", "Label", "Metric", "metric"]

LATENCY_BOUNDS: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds in seconds, from one engine step to the patience of an operator."""

PROBE_LAG_BOUNDS: tuple[float, ...] = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

TOKEN_BOUNDS: tuple[float, ...] = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class Label(msgspec.Struct, frozen=True):
    """One label: its values, or where the closed set of them comes from."""

    name: str
    values: tuple[str, ...] = ()
    source: str = ""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `name` is complete (a counter's ends in `_total`); `bounds` are a histogram's upper bounds."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    labels: tuple[Label, ...] = ()
    origin: Literal["books", "event"]
    bounds: tuple[float, ...] = ()
    note: str = ""


ENGINE = Label("engine", source="the configured engines; `none` before a request was sent to one")
MODEL = Label("model", source="the models that the engines list; `other` for all else")
METHOD = Label("method", ("eof", "reset", "write_error", "keepalive", "stall", "api"))
SEMANTICS = Label("semantics", tuple(word.value for word in Semantics))
OUTCOME = Label("outcome", ("confirmed", "unconfirmed", "raced_finish", "failed"))
EVIDENCE = Label("evidence", tuple(grade.label for grade in Evidence if grade > Evidence.ACCEPTED))
LEDGER = Label("ledger", tuple(ledger.label for ledger in Ledger))
COMPARED = Label("ledger", (Ledger.QUEUE.label, Ledger.KV.label))
UNIT = Label("unit", ("places", "blocks", "slots"))
STATE = Label("state", ("queued", "running", "preempted", "draining", "stopping", "overdue", "settling"))
DISPOSITION = Label("disposition", ("delivered", "discarded", "stale"))
PREEMPTED_BY = Label("reason", ("engine", "ordered"))
MODE = Label("mode", ("inside", "gateway"))
RETRY_REASON = Label("reason", ("refused", "unknown", "failed", "unanswered", "appeared"))
KIND = Label("kind", source="the adapters that are installed")
ENGINE_VERSION = Label("version", source="what the engine says, at most 64 characters")
CLASS = Label("class", source="the configured classes")
PRESSURE = Label("pressure", ("places", "kv", "waiting", "slow"))
NOT_PREEMPTED = Label(
    "reason", ("unpreemptible", "inexact", "too_often", "cool_down", "nearly_done", "guard", "not_running", "gone")
)
CONTINUED = Label("reason", ("preempted", "engine_lost"))
NOT_CONTINUED = Label("reason", ("mismatch", "failed"))
VERSION = Label("version", source="the installed version")

_OWN = (ENGINE, MODEL)

CATALOGUE: tuple[Metric, ...] = (
    Metric(
        name="stopguard_disconnect_detection_seconds",
        kind="histogram",
        help="From the moment a client left to the moment that was known.",
        labels=(METHOD,),
        origin="event",
        bounds=LATENCY_BOUNDS,
        note=(
            "Only where the moment of leaving is known: `eof` and `keepalive` by the kernel's clock (Linux, TCP, to "
            "the millisecond), `stall` from when the client stopped reading. A reset does not say when it came."
        ),
    ),
    Metric(
        name="stopguard_stop_to_abort_sent_seconds",
        kind="histogram",
        help="Step 1, notify: from the observation of a stop to the first abort that left for the engine.",
        labels=(*_OWN, SEMANTICS),
        origin="event",
        bounds=LATENCY_BOUNDS,
    ),
    Metric(
        name="stopguard_abort_to_ack_seconds",
        kind="histogram",
        help="From the first abort to the engine's own word that the request left its scheduler.",
        labels=(*_OWN, SEMANTICS, EVIDENCE),
        origin="event",
        bounds=LATENCY_BOUNDS,
        note="For `preempt`: from the order to the engine's word that the request was set aside.",
    ),
    Metric(
        name="stopguard_ack_to_released_seconds",
        kind="histogram",
        help="Step 3, release: from the ack to the moment at which the request held no KV.",
        labels=(*_OWN, EVIDENCE),
        origin="event",
        bounds=LATENCY_BOUNDS,
        note="Without a probe the release is concluded from the ack itself, and takes no time of its own.",
    ),
    Metric(
        name="stopguard_stop_to_settled_seconds",
        kind="histogram",
        help="Step 4, settle: from the observation of a stop to five closed ledgers. The objective.",
        labels=(*_OWN, SEMANTICS),
        origin="event",
        bounds=LATENCY_BOUNDS,
        note="A stop that never settles is not in it: see the outcome `unconfirmed`, and leaks.",
    ),
    Metric(
        name="stopguard_wasted_tokens",
        kind="histogram",
        help="Tokens that one stopped request computed for nobody.",
        labels=(*_OWN, SEMANTICS),
        origin="event",
        bounds=TOKEN_BOUNDS,
        note="Only of stops whose output could be watched to its end (evidence `stream_closed` or `probe`).",
    ),
    Metric(
        name="stopguard_wasted_gpu_seconds_total",
        kind="counter",
        help="Wasted tokens x the engine's measured step time, shared by the requests of the step.",
        labels=_OWN,
        origin="event",
        note="Of the same stops as `stopguard_wasted_tokens`, while `stopguard_engine_step_seconds` is known.",
    ),
    Metric(
        name="stopguard_tokens_total",
        kind="counter",
        help="Tokens by where they ended: with the client, dropped, or late after a stop.",
        labels=(*_OWN, DISPOSITION),
        origin="books",
        note="Without a probe a token is one event of the stream; what a closed connection hides is not in it.",
    ),
    Metric(
        name="stopguard_leaks_total",
        kind="counter",
        help="Accounts that were still open at their deadline.",
        labels=(*_OWN, LEDGER),
        origin="event",
        note="A leak stays counted when it closes late.",
    ),
    Metric(
        name="stopguard_ledger_open",
        kind="gauge",
        help="Requests that have this ledger open.",
        labels=(*_OWN, LEDGER),
        origin="books",
    ),
    Metric(
        name="stopguard_requests",
        kind="gauge",
        help="Requests whose books are open, by where they stand.",
        labels=(*_OWN, STATE),
        origin="books",
    ),
    Metric(
        name="stopguard_stops_total",
        kind="counter",
        help="Requests that ended, by meaning and outcome; a request that ran to its end is finish, confirmed.",
        labels=(*_OWN, SEMANTICS, OUTCOME),
        origin="event",
        note="`preempt` counts preemptions that were ordered: confirmed when they took place, failed when not.",
    ),
    Metric(
        name="stopguard_preemptions_total",
        kind="counter",
        help="Preemptions that took place, by who wanted them and who keeps the request meanwhile.",
        labels=(*_OWN, PREEMPTED_BY, MODE),
        origin="books",
        note="`engine`: its own scheduler did it. `inside`: it stays in the engine; `gateway`: it was shelved here.",
    ),
    Metric(
        name="stopguard_recomputed_tokens_total",
        kind="counter",
        help="Tokens that must be computed again because of preemptions.",
        labels=_OWN,
        origin="books",
    ),
    Metric(
        name="stopguard_preempted_seconds_total",
        kind="counter",
        help="Seconds that requests were away from their engine because they made room.",
        labels=(ENGINE,),
        origin="event",
        note="Only of preemptions that StopGuard ordered; counted when the request goes on or ends.",
    ),
    Metric(
        name="stopguard_parked_longest_seconds",
        kind="gauge",
        help="How long the one has been away that has been away longest; 0 when nobody is.",
        origin="books",
    ),
    Metric(
        name="stopguard_preemption_victims_total",
        kind="counter",
        help="Requests that made room, by their class and by why room was wanted.",
        labels=(CLASS, PRESSURE),
        origin="event",
        note="`places`: our limit of requests there; `kv`, `waiting`: the engine's word; `slow`: it says nothing.",
    ),
    Metric(
        name="stopguard_preemption_refusals_total",
        kind="counter",
        help="Requests that did not make room although it was wanted, by why.",
        labels=(NOT_PREEMPTED,),
        origin="event",
        note="Each request counts once a reason. `guard` counts those that wanted the room.",
    ),
    Metric(
        name="stopguard_streams_continued_total",
        kind="counter",
        help="Streams that the gateway had cut and that went on from their token ids, by why they were cut.",
        labels=(CONTINUED,),
        origin="event",
        note="Absent where no stream is ever cut: without preemption and without failover.",
    ),
    Metric(
        name="stopguard_streams_not_continued_total",
        kind="counter",
        help="Continuations that came out differently, and streams given up because no engine could continue them.",
        labels=(NOT_CONTINUED,),
        origin="event",
        note="Such a stream ends with an error. A `mismatch` says that an engine does not repeat itself: look at it.",
    ),
    Metric(
        name="stopguard_preemption_guard_closed",
        kind="gauge",
        help="1 while nothing is preempted because too much would be computed again.",
        origin="books",
    ),
    Metric(
        name="stopguard_preemption_recomputed_ratio",
        kind="gauge",
        help="Recomputed tokens for each computed one, lately: what the guard looks at.",
        origin="books",
    ),
    Metric(
        name="stopguard_queued_requests",
        kind="gauge",
        help="Requests that wait with us for room, by class.",
        labels=(CLASS,),
        origin="books",
        note="Absent while classes are off; see the state `queued` of `stopguard_requests`.",
    ),
    Metric(
        name="stopguard_classes_lowered_total",
        kind="counter",
        help="Requests that asked for a more urgent class than their tenant may have.",
        origin="event",
    ),
    Metric(
        name="stopguard_hopeless_deadlines_total",
        kind="counter",
        help="Requests refused at once because one of their deadlines could not be met.",
        origin="event",
    ),
    Metric(
        name="stopguard_abort_retries_total",
        kind="counter",
        help="Aborts beyond the first of their stop, by what became of the one before.",
        labels=(*_OWN, RETRY_REASON),
        origin="event",
        note="`appeared`: the request came to the engine's scheduler, or back to it, after the abort.",
    ),
    Metric(
        name="stopguard_orphans",
        kind="gauge",
        help="What the engine has and no known request owns, at the last comparison.",
        labels=(ENGINE, COMPARED, UNIT),
        origin="books",
        note="Absent while the engine or the books cannot say. One comparison may err; a lasting one does not.",
    ),
    Metric(
        name="stopguard_phantoms",
        kind="gauge",
        help="What the books believe in and the engine does not have, at the last comparison.",
        labels=(ENGINE, COMPARED, UNIT),
        origin="books",
        note="As for orphans.",
    ),
    Metric(
        name="stopguard_probe_gaps_total",
        kind="counter",
        help="Holes in the numbered frames of an engine's probe.",
        labels=(ENGINE,),
        origin="event",
    ),
    Metric(
        name="stopguard_probes",
        kind="gauge",
        help="Probes inside the engine that are connected.",
        labels=(ENGINE,),
        origin="event",
        note="Absent where nobody listens for probes.",
    ),
    Metric(
        name="stopguard_probes_in_gap",
        kind="gauge",
        help="Connected probes of which something was missed, and whose snapshot has not come.",
        labels=(ENGINE,),
        origin="event",
        note="While it is not 0 the books of that engine's requests may be wrong.",
    ),
    Metric(
        name="stopguard_probe_frames_dropped_total",
        kind="counter",
        help="Frames that probes dropped because they could not be sent.",
        labels=(ENGINE,),
        origin="event",
    ),
    Metric(
        name="stopguard_probe_lag_seconds",
        kind="histogram",
        help="From an engine's step to the arrival of the frame that reports it.",
        origin="event",
        bounds=PROBE_LAG_BOUNDS,
    ),
    Metric(
        name="stopguard_engine_up",
        kind="gauge",
        help="1 while the engine answers, 0 while it is ejected.",
        labels=(ENGINE,),
        origin="books",
    ),
    Metric(
        name="stopguard_engine_info",
        kind="info",
        help="What each engine says it is.",
        labels=(ENGINE, KIND, ENGINE_VERSION),
        origin="event",
        note="Absent until the engine has answered.",
    ),
    Metric(
        name="stopguard_engine_step_seconds",
        kind="gauge",
        help="The engine's measured step time, a moving average.",
        labels=(ENGINE,),
        origin="event",
        note="From the probe's frames; without a probe from the pace of finished streams. Absent until measured.",
    ),
    Metric(
        name="stopguard_book_errors_total",
        kind="counter",
        help="Statements of engines that the books cannot hold, like a second release.",
        origin="books",
    ),
    Metric(
        name="stopguard_spans_dropped_total",
        kind="counter",
        help="Spans that were not exported, because the receiver was slower or away.",
        origin="event",
    ),
    Metric(
        name="stopguard_build_info",
        kind="info",
        help="Which StopGuard this is.",
        labels=(VERSION,),
        origin="books",
    ),
)

_BY_NAME = {entry.name: entry for entry in CATALOGUE}


def metric(name: str) -> Metric:
    """The metric called `name`; `KeyError` when the catalogue has none."""
    return _BY_NAME[name]
