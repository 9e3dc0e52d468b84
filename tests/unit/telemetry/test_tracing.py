"""Spans as an OTLP receiver gets them: parents, events, status; and what happens without a receiver."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from stopguard.errors import ConfigurationError
from stopguard.ledger import Evidence
from stopguard.stops import AbortAnswer, Semantics, Source, StopCause, Tracked
from stopguard.telemetry import create_tracer, endpoint_from, tracer_from
from stopguard.telemetry.trace_context import find, parse
from tests.unit.telemetry.helpers import BLIND, PROBED, Edge, value
from tests.unit.telemetry.otlp import Receiver, attributes, receiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEAD = b"accept: */*\r\nTraceparent: 00-" + TRACE.encode() + b"-" + PARENT.encode() + b"-01\r\ntracestate: a=b\r\n"


class Traced(Edge):
    """An edge with a tracer that sends to `received`."""

    def __init__(self, received: Receiver, ratio: float = 1.0) -> None:
        super().__init__()
        self.tracer = create_tracer(received.url, ratio=ratio)
        self.telemetry.tracer = self.tracer
        self.at = time.monotonic()

    def begin(self, request_id: str = "sg-1", head: bytes = HEAD, operation: str = "chat") -> Tracked:
        tracked = self.controller.admit(request_id, self.at, model="small")
        self.telemetry.admitted(tracked, head, operation)
        return tracked

    def close(self) -> None:
        assert self.tracer is not None
        self.tracer.close()


def test_a_confirmed_cancel_is_a_span_with_five_steps_and_no_error() -> None:
    with receiver() as received:
        edge = Traced(received)
        controller, at = edge.controller, edge.at
        tracked = edge.begin()
        controller.dispatch(tracked, at + 0.1, PROBED)
        controller.output_started(tracked, at + 0.2)
        tracked.events = 5
        edge.see(controller.client_left(tracked, at + 0.5, "eof"), at + 0.5)
        tracked.events = 8
        edge.see(controller.acknowledged(tracked, at + 0.6, Evidence.PROBE), at + 0.6)
        edge.close()
    server, stop = received.spans
    assert (server.name, server.kind) == ("chat small", Span.SPAN_KIND_SERVER)
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    assert (stop.name, stop.parent_span_id) == ("stopguard.stop", server.span_id)
    assert stop.trace_id == server.trace_id
    assert [event.name for event in stop.events] == [
        *("disconnect_detected", "abort_sent", "engine_ack", "released", "settled")
    ]
    assert stop.events[2].time_unix_nano - stop.events[0].time_unix_nano == pytest.approx(0.1e9, rel=1e-3)
    assert abs(server.start_time_unix_nano / 1e9 - time.time()) < 30
    assert (server.end_time_unix_nano - server.start_time_unix_nano) == pytest.approx(0.6e9, rel=1e-3)
    for span in (server, stop):
        assert span.status.code == Status.STATUS_CODE_UNSET
        assert attributes(span)["stopguard.outcome"] == "cancelled"
    assert attributes(stop)["stopguard.stop.semantics"] == "cancel"
    assert attributes(stop)["stopguard.wasted_tokens"] == 3
    assert attributes(server)["gen_ai.request.model"] == "small"
    assert attributes(server)["gen_ai.usage.output_tokens"] == 5


def test_a_request_that_ran_to_its_end_has_no_stop() -> None:
    with receiver() as received:
        edge = Traced(received)
        tracked = edge.begin(operation="completions", head=b"")
        edge.controller.dispatch(tracked, edge.at, PROBED)
        edge.see(edge.controller.engine_finished(tracked, edge.at + 1), edge.at + 1)
        edge.see(edge.controller.client_served(tracked, edge.at + 1), edge.at + 1)
        edge.close()
    (server,) = received.spans
    assert server.name == "text_completion small"
    assert server.parent_span_id == b""
    assert int.from_bytes(server.trace_id, "big")
    assert attributes(server)["stopguard.outcome"] == "finished"
    assert server.status.code == Status.STATUS_CODE_UNSET


def _unconfirmed(edge: Traced) -> None:
    tracked = edge.begin()
    edge.controller.dispatch(tracked, edge.at, BLIND)
    edge.see(edge.controller.client_left(tracked, edge.at, "eof"), edge.at)
    edge.see(edge.controller.abort_answered(tracked, edge.at, "close", AbortAnswer.SENT), edge.at)


def _leaked(edge: Traced) -> None:
    tracked = edge.begin()
    edge.controller.dispatch(tracked, edge.at, PROBED)
    edge.see(edge.controller.client_left(tracked, edge.at, "eof"), edge.at)
    edge.see(edge.controller.advance(edge.at + 11), edge.at + 11)
    edge.see(edge.controller.acknowledged(tracked, edge.at + 12, Evidence.PROBE), edge.at + 12)


def _stopped(edge: Traced, semantics: Semantics, source: Source) -> None:
    tracked = edge.begin()
    edge.controller.dispatch(tracked, edge.at, PROBED)
    cause = StopCause(semantics=semantics, source=source, reason="why", observed_at=edge.at)
    edge.see(edge.controller.stop(tracked, edge.at, cause), edge.at)
    edge.see(edge.controller.acknowledged(tracked, edge.at, Evidence.PROBE), edge.at)
    edge.see(edge.controller.client_told(tracked, edge.at), edge.at)


def _overdue_deadline(edge: Traced) -> None:
    _stopped(edge, Semantics.CANCEL, Source.DEADLINE)


def _shutdown(edge: Traced) -> None:
    _stopped(edge, Semantics.FAIL, Source.GATEWAY)


@pytest.mark.parametrize(
    ("play", "error", "of_the_stop"),
    [
        (_unconfirmed, "stop_unconfirmed", True),
        (_leaked, "leak", True),
        (_overdue_deadline, "watchdog", True),
        (_shutdown, "request_failed", False),
    ],
)
def test_what_went_wrong_is_an_error_with_its_type(play: object, error: str, of_the_stop: bool) -> None:
    with receiver() as received:
        edge = Traced(received)
        play(edge)  # type: ignore[operator]
        edge.close()
    server, stop = received.spans
    assert server.status.code == Status.STATUS_CODE_ERROR
    assert attributes(server)["error.type"] == error
    assert (stop.status.code == Status.STATUS_CODE_ERROR) is of_the_stop
    assert attributes(stop).get("error.type") == (error if of_the_stop else None)


def test_the_clients_word_on_sampling_counts() -> None:
    with receiver() as received:
        edge = Traced(received, ratio=0.0)
        quiet = HEAD.replace(b"-01\r\n", b"-00\r\n")
        for number, head in enumerate((HEAD, quiet, b"")):
            tracked = edge.begin(f"sg-{number}", head)
            edge.see(edge.controller.client_left(tracked, edge.at, "eof"), edge.at)
        edge.close()
    assert {span.trace_id.hex() for span in received.spans} == {TRACE}
    assert [span.name for span in received.spans] == ["chat small", "stopguard.stop"]


def test_a_trace_that_nobody_began_is_the_exemplar_of_its_own_stop() -> None:
    with receiver() as received:
        edge = Traced(received)
        tracked = edge.controller.admit("sg-1", edge.at, model="small")
        # Without the hook at admission the head is still there when a stop begins.
        tracked.owner = SimpleNamespace(head=SimpleNamespace(forward=HEAD))
        edge.see(edge.controller.client_left(tracked, edge.at, "eof"), edge.at)
        body, _ = edge.telemetry.render("application/openmetrics-text; version=1.0.0")
        edge.close()
    assert f'# {{trace_id="{TRACE}"}}'.encode() in body
    assert received.spans[0].trace_id.hex() == TRACE


def test_a_receiver_that_is_away_costs_spans_and_nothing_else() -> None:
    with receiver() as received:
        received.status = 400
        edge = Traced(received)
        tracked = edge.begin()
        edge.see(edge.controller.client_left(tracked, edge.at, "eof"), edge.at)
        edge.close()
        assert received.spans == []
    assert value(edge.samples(), "stopguard_spans_dropped_total") == 1


def test_the_queue_has_a_limit() -> None:
    with receiver() as received:
        edge = Edge()
        tracer = create_tracer(received.url, queue_max=3)
        assert tracer is not None
        edge.telemetry.tracer = tracer
        at = time.monotonic()
        for number in range(10):
            tracked = edge.controller.admit(f"sg-{number}", at, model="small")
            edge.telemetry.admitted(tracked, b"", "chat")
            edge.see(edge.controller.client_left(tracked, at, "eof"), at)
        tracer.close()
        tracer.close()
        sent = {attributes(span)["stopguard.request.id"] for span in received.spans if span.kind == 2}
    assert len(sent) + tracer.dropped == 10
    assert tracer.dropped > 0


def test_without_an_endpoint_there_is_no_tracer_and_no_import() -> None:
    assert create_tracer(None) is None
    assert create_tracer("") is None
    code = (
        "import sys; from stopguard.telemetry import create_tracer; assert create_tracer(None) is None;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x"])
def test_an_endpoint_that_is_none_says_so(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="OTLP endpoint"):
        create_tracer(endpoint)
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        create_tracer("http://127.0.0.1:1/v1/traces", ratio=2)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"stopguard\[otel\]"):
        create_tracer("http://127.0.0.1:1/v1/traces")


def test_the_usual_variables_name_the_endpoint() -> None:
    assert endpoint_from({}) == ""
    assert endpoint_from({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}) == "http://c:4318/v1/traces"
    both = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}
    assert endpoint_from(both) == "http://t/x"
    assert endpoint_from({**both, "OTEL_SDK_DISABLED": "true"}) == ""


@pytest.mark.parametrize(
    "line",
    [
        b"traceparent: 00-" + b"0" * 32 + b"-b7ad6b7169203331-01\r\n",
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-" + b"0" * 16 + b"-01\r\n",
        b"traceparent: ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
        b"traceparent: 00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01\r\n",
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-extra\r\n",
        b"traceparent: \xff\xfe\r\n",
        b"x-traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
        b"",
    ],
)
def test_what_is_no_trace_context_is_left_alone(line: bytes) -> None:
    assert find(line) == ""


def test_a_trace_context_is_found_in_any_spelling() -> None:
    context = parse(find(HEAD))
    assert context is not None
    assert (context.trace_id, context.span_id, context.sampled) == (TRACE, PARENT, True)


@pytest.mark.parametrize(
    ("sampler", "argument", "traced"),
    [(None, None, 20), ("always_off", None, 0), ("parentbased_traceidratio", "0", 0), ("traceidratio", "1.0", 20)],
)
def test_the_usual_variables_choose_the_share(sampler: str | None, argument: str | None, traced: int) -> None:
    given = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument}
    environment = {name: text for name, text in given.items() if text is not None}
    assert tracer_from(environment) is None
    tracer = tracer_from({**environment, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    assert tracer is not None
    noted: list[dict[str, str]] = [{} for _ in range(20)]
    for labels in noted:
        tracer.admitted(labels, "", "chat")
    tracer.close()
    assert sum("trace_id" in labels for labels in noted) == traced


@pytest.mark.parametrize(
    ("name", "text"), [("OTEL_TRACES_SAMPLER", "jaeger_remote"), ("OTEL_TRACES_SAMPLER_ARG", "some")]
)
def test_a_sampler_that_cannot_be_says_so(name: str, text: str) -> None:
    environment = {"OTEL_TRACES_SAMPLER": "traceidratio", name: text, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}
    with pytest.raises(ConfigurationError, match=name):
        tracer_from(environment)
