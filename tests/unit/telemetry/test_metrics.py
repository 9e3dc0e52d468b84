"""What is exposed equals the books; what is unknown is not exposed; strangers add no series."""

from __future__ import annotations

import re
import threading

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics

from stopguard.ledger import Account, EngineGauges, Evidence, reconcile
from stopguard.probe.wire import Frame
from stopguard.stops import AbortAnswer, Semantics, Source, StopCause, preemptions
from stopguard.telemetry import CATALOGUE
from stopguard.telemetry.preemption import ContinuationNumbers, PreemptionNumbers
from tests.unit.telemetry.helpers import BLIND, PROBED, Edge, Samples, present, run_storm, samples, value

ACCEPT_OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@pytest.fixture(scope="module")
def storm_samples() -> tuple[object, Samples]:
    storm = run_storm()
    storm.telemetry.preemption = lambda: PREEMPTION
    storm.telemetry.continuation = lambda: ContinuationNumbers(preempted=9, engine_lost=3, mismatch=0, failed=1)
    return storm, samples(storm.telemetry.render()[0])


PREEMPTION = PreemptionNumbers(
    away_seconds={"alpha": 2.5},
    longest_away_seconds=1.5,
    victims={("background", "kv"): 3, ("standard", "places"): 1},
    refusals={"guard": 2, "grammar": 4, "no engine has room": 1, "cool_down": 5},
    queued={"background": 7, "urgent": 0},
    guard_closed=True,
    recomputed_share=0.12,
    lowered=6,
    hopeless=8,
)


def test_preemption_comes_out_in_numbers_and_what_ways_say_is_folded(storm_samples: tuple[object, Samples]) -> None:
    _, found = storm_samples
    assert value(found, "stopguard_preempted_seconds_total", engine="alpha") == 2.5
    assert value(found, "stopguard_parked_longest_seconds") == 1.5
    victims = {"class": "background", "pressure": "kv"}
    assert value(found, "stopguard_preemption_victims_total", **victims) == 3
    assert value(found, "stopguard_preemption_refusals_total", reason="guard") == 2
    assert value(found, "stopguard_preemption_refusals_total", reason="inexact") == 5
    assert value(found, "stopguard_preemption_refusals_total", reason="too_often") == 0
    assert value(found, "stopguard_queued_requests", **{"class": "background"}) == 7
    assert value(found, "stopguard_preemption_guard_closed") == 1
    assert value(found, "stopguard_preemption_recomputed_ratio") == 0.12
    assert value(found, "stopguard_classes_lowered_total") == 6
    assert value(found, "stopguard_hopeless_deadlines_total") == 8


def test_streams_that_were_cut_are_counted_by_how_they_fared(storm_samples: tuple[object, Samples]) -> None:
    _, found = storm_samples
    assert value(found, "stopguard_streams_continued_total", reason="preempted") == 9
    assert value(found, "stopguard_streams_continued_total", reason="engine_lost") == 3
    assert value(found, "stopguard_streams_not_continued_total", reason="failed") == 1
    assert value(found, "stopguard_streams_not_continued_total", reason="mismatch") == 0


def test_without_classes_there_is_nothing_about_them() -> None:
    found = samples(run_storm(requests=10).telemetry.render()[0])
    assert not any(
        name.startswith(("stopguard_preemption_", "stopguard_queued", "stopguard_parked", "stopguard_streams_"))
        for name, _ in found
    )


def test_a_storm_comes_out_as_its_books_say() -> None:
    storm = run_storm()
    found = samples(storm.telemetry.render()[0])
    counts, report = storm.book.statistics(), storm.report
    assert value(found, "stopguard_leaks_total") == counts.leaks_found == 0
    assert value(found, "stopguard_requests") == counts.open_requests == 0
    assert value(found, "stopguard_ledger_open") == 0
    for disposition, tokens in report.tokens.items():
        assert value(found, "stopguard_tokens_total", disposition=disposition) == tokens
    for (semantics, outcome), number in report.endings.items():
        assert value(found, "stopguard_stops_total", semantics=semantics, outcome=outcome) == number
    ended = sum(value(found, "stopguard_stops_total", semantics=one) for one in ("cancel", "finish", "fail"))
    assert ended == counts.settled
    assert value(found, "stopguard_preemptions_total") == report.preemptions > 0
    assert value(found, "stopguard_recomputed_tokens_total") == report.tokens_recomputed > 0
    stopped = sum(number for (semantics, _), number in report.endings.items() if semantics != "finish")
    assert value(found, "stopguard_stop_to_settled_seconds_count") == stopped
    assert value(found, "stopguard_wasted_tokens_sum") == report.tokens_wasted > 0
    assert value(found, "stopguard_disconnect_detection_seconds_count") > 0


def test_leaks_and_unconfirmed_stops_of_a_faulty_engine() -> None:
    storm = run_storm(faults=("blocks-leaked-on-abort",))
    found = samples(storm.telemetry.render()[0])
    counts = storm.book.statistics()
    assert value(found, "stopguard_leaks_total") == counts.leaks_found > 0
    assert value(found, "stopguard_leaks_total", ledger="kv") == counts.leaks_found
    assert value(found, "stopguard_leaks_total", ledger="queue") == 0


def test_states_and_open_ledgers_follow_the_books_while_requests_run() -> None:
    edge = Edge()
    controller = edge.controller
    waiting = controller.admit("sg-1", 1.0, model="small")
    running = controller.admit("sg-2", 1.0, model="small")
    leaving = controller.admit("sg-3", 1.0, model="small")
    for each in (running, leaving):
        controller.dispatch(each, 1.1, PROBED)
        controller.output_started(each, 1.2)
    running.events = 7
    edge.see(controller.client_left(leaving, 1.5, "eof"), 1.5)
    found = edge.samples()
    assert value(found, "stopguard_requests", state="queued", engine="none") == 1
    assert value(found, "stopguard_requests", state="running", engine="alpha") == 1
    assert value(found, "stopguard_requests", state="stopping", engine="alpha") == 1
    assert value(found, "stopguard_requests") == 3
    open_ledgers = edge.book.statistics().open_ledgers
    for ledger, number in open_ledgers.items():
        assert value(found, "stopguard_ledger_open", ledger=ledger.label) == number
    # The seven tokens that passed are not booked yet, and are shown.
    assert edge.book.total(Account.OUTPUT_DELIVERED) == 0
    assert value(found, "stopguard_tokens_total", disposition="delivered") == 7
    edge.see(controller.client_left(waiting, 2.0, "eof"), 2.0)
    edge.see(controller.acknowledged(leaving, 2.0, Evidence.PROBE), 2.0)
    edge.see(controller.engine_finished(running, 2.0), 2.0)
    edge.see(controller.client_served(running, 2.0), 2.0)
    found = edge.samples()
    assert value(found, "stopguard_requests") == 0
    assert value(found, "stopguard_tokens_total", disposition="delivered") == 7
    assert value(found, "stopguard_stops_total", engine="none", semantics="cancel", outcome="confirmed") == 1
    # It never was at an engine, so no abort left for one.
    assert value(found, "stopguard_stop_to_abort_sent_seconds_count", engine="none") == 0


def test_a_step_that_nobody_saw_is_not_observed() -> None:
    edge = Edge()
    controller = edge.controller
    tracked = controller.admit("sg-1", 1.0, model="small")
    controller.dispatch(tracked, 1.0, BLIND)
    controller.output_started(tracked, 1.1)
    tracked.events = 4
    edge.see(controller.client_left(tracked, 2.0, "eof"), 2.0)
    edge.see(controller.abort_answered(tracked, 2.0, "close", AbortAnswer.SENT), 2.0)
    found = edge.samples()
    assert value(found, "stopguard_stops_total", engine="beta", outcome="unconfirmed") == 1
    assert value(found, "stopguard_stop_to_abort_sent_seconds_count", engine="beta") == 1
    # No ack, no release, no settlement, no known waste, and nobody knows when the client really left.
    assert not present(found, "stopguard_abort_to_ack_seconds_count", engine="beta")
    assert value(found, "stopguard_stop_to_settled_seconds_count", engine="beta") == 0
    assert value(found, "stopguard_wasted_tokens_count", engine="beta") == 0
    assert value(found, "stopguard_disconnect_detection_seconds_count") == 0


def test_the_steps_of_one_stop() -> None:
    edge = Edge()
    controller = edge.controller
    tracked = controller.admit("sg-1", 1.0, model="small")
    controller.dispatch(tracked, 1.0, PROBED)
    edge.see(controller.client_left(tracked, 2.0, "reset", occurred_at=1.5), 2.0)
    edge.see(controller.acknowledged(tracked, 2.25, Evidence.PROBE), 2.25)
    found = edge.samples()
    own = {"engine": "alpha", "model": "small"}
    assert value(found, "stopguard_disconnect_detection_seconds_sum", method="reset") == 0.5
    assert value(found, "stopguard_stop_to_abort_sent_seconds_sum", **own, semantics="cancel") == 0
    assert value(found, "stopguard_abort_to_ack_seconds_sum", **own, evidence="probe") == 0.25
    assert value(found, "stopguard_stop_to_settled_seconds_sum", **own, semantics="cancel") == 0.25
    assert value(found, "stopguard_stop_to_settled_seconds_bucket", **own, semantics="cancel", le="0.25") == 1
    assert value(found, "stopguard_stop_to_settled_seconds_bucket", **own, semantics="cancel", le="0.1") == 0


def test_retries_are_counted_by_what_became_of_the_abort_before() -> None:
    edge = Edge()
    controller = edge.controller
    tracked = controller.admit("sg-1", 1.0, model="small")
    controller.dispatch(tracked, 1.0, PROBED)
    edge.see(controller.client_left(tracked, 2.0, "eof"), 2.0)
    edge.see(controller.abort_answered(tracked, 2.01, "abort", AbortAnswer.REFUSED, 0.05), 2.01)
    edge.see(controller.advance(2.2), 2.2)
    edge.see(controller.advance(2.6), 2.6)  # nobody answered the second knock
    edge.see(controller.abort_answered(tracked, 2.61, "abort", AbortAnswer.UNKNOWN), 2.61)
    edge.see(controller.advance(3.5), 3.5)
    found = edge.samples()
    assert value(found, "stopguard_abort_retries_total", reason="refused") == 1
    assert value(found, "stopguard_abort_retries_total", reason="unanswered") == 1
    assert value(found, "stopguard_abort_retries_total", reason="unknown") == 1


def test_preemptions_are_read_from_open_and_closed_requests_and_never_fall() -> None:
    edge = Edge()
    controller = edge.controller
    tracked = controller.admit("sg-1", 1.0, model="small")
    controller.dispatch(tracked, 1.0, PROBED)
    cause = StopCause(semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="urgent", observed_at=2.0)
    edge.see(preemptions.preempt(controller, tracked, 2.0, cause), 2.0)
    edge.see(preemptions.preempted(controller, tracked, 2.1), 2.1)
    tracked.ledgers.tokens_recomputed += 40
    found = edge.samples()
    assert value(found, "stopguard_preemptions_total", reason="ordered", mode="inside") == 1
    assert value(found, "stopguard_recomputed_tokens_total") == 40
    assert value(found, "stopguard_requests", state="preempted") == 1
    edge.see(preemptions.resume(controller, tracked, 2.2), 2.2)
    edge.see(preemptions.resumed(controller, tracked, 2.3), 2.3)
    # Its own scheduler preempts it as well, and a second order comes to nothing.
    edge.see(preemptions.preempted(controller, tracked, 2.4), 2.4)
    edge.see(preemptions.resume(controller, tracked, 2.5), 2.5)
    edge.see(preemptions.resumed(controller, tracked, 2.5), 2.5)
    edge.see(preemptions.preempt(controller, tracked, 2.6, cause), 2.6)
    edge.see(controller.preempt_refused(tracked, 2.7), 2.7)
    edge.see(controller.engine_finished(tracked, 3.0), 3.0)
    edge.see(controller.client_served(tracked, 3.0), 3.0)
    found = edge.samples()
    assert value(found, "stopguard_preemptions_total", reason="ordered", mode="inside") == 1
    assert value(found, "stopguard_preemptions_total", reason="engine", mode="inside") == 1
    assert value(found, "stopguard_recomputed_tokens_total") == 40
    assert value(found, "stopguard_stops_total", semantics="preempt", outcome="confirmed") == 1
    assert value(found, "stopguard_stops_total", semantics="preempt", outcome="failed") == 1
    assert value(found, "stopguard_abort_to_ack_seconds_sum", semantics="preempt") == pytest.approx(0.1)


def test_a_counter_does_not_fall_when_a_request_closes_during_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge()
    controller = edge.controller
    tracked = controller.admit("sg-1", 1.0, model="small")
    controller.dispatch(tracked, 1.0, PROBED)
    edge.see(preemptions.preempted(controller, tracked, 2.0), 2.0)
    tracked.ledgers.tokens_recomputed += 40
    tracked.events += 7
    totals = edge.book.totals

    def close_meanwhile() -> dict[tuple[str, str], dict[Account, int]]:
        read = totals()
        if tracked.request_id in controller.tracked:
            edge.see(controller.client_left(tracked, 3.0, "eof"), 3.0)
            edge.see(controller.acknowledged(tracked, 3.0, Evidence.PROBE), 3.0)
        return read

    seen = [edge.samples()]
    monkeypatch.setattr(edge.book, "totals", close_meanwhile)
    seen += [edge.samples(), edge.samples()]
    for found in seen:
        assert value(found, "stopguard_preemptions_total") == 1
        assert value(found, "stopguard_recomputed_tokens_total") == 40
        assert value(found, "stopguard_tokens_total", disposition="delivered") == 7


def test_a_hostile_client_adds_no_series() -> None:
    edge = Edge()
    controller = edge.controller
    before = len(edge.samples())
    for number in range(300):
        tracked = controller.admit(f"sg-{number}", 1.0 + number, model=f"invented-{number % 200}")
        edge.see(controller.client_left(tracked, 1.5 + number, "eof"), 1.5 + number)
    found = edge.samples()
    models = {dict(pairs)["model"] for _, pairs in found if "model" in dict(pairs)}
    assert models == {"small", "other"}
    assert value(found, "stopguard_stops_total", engine="none", model="other", outcome="confirmed") == 300
    assert len(edge.telemetry.cells) == 3
    grown = len(found) - before
    for number in range(300, 400):
        tracked = controller.admit(f"sg-{number}", 1.0 + number, model=f"invented-{number % 200}")
        edge.see(controller.client_left(tracked, 1.5 + number, "eof"), 1.5 + number)
    assert len(edge.samples()) - before == grown


def test_series_are_there_at_zero_before_anything_happens() -> None:
    found = Edge().samples()
    for ledger in ("queue", "kv", "output", "link", "stream"):
        assert value(found, "stopguard_leaks_total", engine="alpha", model="small", ledger=ledger) == 0
    for outcome in ("confirmed", "unconfirmed", "raced_finish", "failed"):
        assert value(found, "stopguard_stops_total", engine="beta", semantics="cancel", outcome=outcome) == 0
    assert value(found, "stopguard_stop_to_settled_seconds_count", engine="alpha", semantics="cancel") == 0
    assert value(found, "stopguard_probe_gaps_total", engine="alpha") == 0


def test_what_an_engine_says_of_itself() -> None:
    edge = Edge()
    assert not [name for name, _ in edge.samples() if name == "stopguard_engine_info"]
    edge.telemetry.identities = lambda: {"alpha": ("some", "1.2" + "x" * 100)}
    version = "1.2" + "x" * 61
    assert value(edge.samples(), "stopguard_engine_info", engine="alpha", kind="some", version=version) == 1


def test_probes_are_counted_by_whoever_listens_for_them() -> None:
    edge = Edge()
    edge.telemetry.probes = lambda: {"alpha": (2, 1, 5, 7)}
    found = edge.samples()
    assert value(found, "stopguard_probes", engine="alpha") == 2
    assert value(found, "stopguard_probes_in_gap", engine="alpha") == 1
    assert value(found, "stopguard_probe_frames_dropped_total", engine="alpha") == 7


def test_labels_are_those_of_the_catalogue(storm_samples: tuple[object, Samples]) -> None:
    _, found = storm_samples
    by_name = {re.sub(r"_(bucket|count|sum)$", "", name): pairs for name, pairs in found}
    for metric in CATALOGUE:
        closed = {label.name: label.values for label in metric.labels if label.values}
        seen = [
            dict(pairs)
            for name, pairs in found
            if name == metric.name
            or (metric.kind == "histogram" and re.sub(r"_(bucket|count|sum)$", "", name) == metric.name)
        ]
        if metric.name not in (
            "stopguard_orphans",
            "stopguard_phantoms",
            "stopguard_engine_up",
            "stopguard_engine_info",
            "stopguard_engine_step_seconds",
            "stopguard_probes",
            "stopguard_probes_in_gap",
            "stopguard_probe_frames_dropped_total",
        ):
            assert seen, metric.name
        for labels in seen:
            assert set(labels) - {"le"} == {label.name for label in metric.labels}, metric.name
            for name, values in closed.items():
                assert labels[name] in values
    assert {name for name in by_name if name.startswith("stopguard_")} <= {metric.name for metric in CATALOGUE}


def test_open_metrics_with_exemplars_where_it_is_asked_for() -> None:
    edge = Edge()
    controller = edge.controller
    tracked = controller.admit("sg-1", 1.0, model="small")
    tracked.ledgers.labels = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    controller.dispatch(tracked, 1.0, PROBED)
    edge.see(controller.client_left(tracked, 2.0, "eof"), 2.0)
    edge.see(controller.acknowledged(tracked, 2.2, Evidence.PROBE), 2.2)
    body, content_type = edge.telemetry.render(ACCEPT_OPEN_METRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    exemplars = [
        (sample.name, sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in parse_open_metrics(body.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar
    ]
    assert (
        "stopguard_stop_to_settled_seconds_bucket",
        "0af7651916cd43dd8448eb211c80319c",
        pytest.approx(0.2),
    ) in exemplars
    plain, plain_type = edge.telemetry.render("text/plain")
    assert plain_type.startswith("text/plain")
    assert b"trace_id" not in plain


def test_comparisons_with_gauges_are_shown_and_silence_is_not_zero() -> None:
    edge = Edge()
    telemetry = edge.telemetry
    gauges = EngineGauges(at=1.0, running=3, waiting=0)
    telemetry.reconciliations = lambda: {"alpha": reconcile([], gauges), "stranger": reconcile([], gauges)}
    found = edge.samples()
    assert value(found, "stopguard_orphans", engine="alpha", ledger="queue", unit="places") == 3
    assert value(found, "stopguard_phantoms", engine="alpha", ledger="queue", unit="places") == 0
    assert not present(found, "stopguard_orphans", engine="alpha", ledger="kv")
    assert not present(found, "stopguard_orphans", engine="stranger")


def test_waste_in_gpu_seconds_needs_a_measured_step() -> None:
    edge = Edge()
    controller = edge.controller

    def stop_one(number: int, at: float) -> None:
        tracked = controller.admit(f"sg-{number}", at, model="small")
        controller.dispatch(tracked, at, PROBED)
        controller.output_started(tracked, at)
        edge.see(controller.client_left(tracked, at + 1, "eof"), at + 1)
        tracked.events += 10
        edge.see(controller.acknowledged(tracked, at + 1.1, Evidence.PROBE), at + 1.1)

    stop_one(1, 1.0)
    found = edge.samples()
    assert value(found, "stopguard_wasted_tokens_sum", engine="alpha") == 10
    assert value(found, "stopguard_wasted_gpu_seconds_total", engine="alpha") == 0
    assert not present(found, "stopguard_engine_step_seconds", engine="alpha")
    for step in range(3):
        edge.telemetry.probe_frame("alpha", _frame(step, 10.0 + step * 0.02, running=4), lag_seconds=0.003)
    stop_one(2, 5.0)
    found = edge.samples()
    assert value(found, "stopguard_engine_step_seconds", engine="alpha") == pytest.approx(0.02)
    assert value(found, "stopguard_wasted_gpu_seconds_total", engine="alpha") == pytest.approx(10 * 0.02 / 4)
    assert value(found, "stopguard_probe_lag_seconds_count") == 3
    edge.telemetry.probe_gap("alpha")
    edge.telemetry.probe_gap("stranger")
    assert value(edge.samples(), "stopguard_probe_gaps_total") == 1


def test_time_in_which_nothing_ran_is_no_step() -> None:
    edge = Edge()
    edge.telemetry.probe_frame("alpha", _frame(1, 10.0, running=0))
    edge.telemetry.probe_frame("alpha", _frame(2, 70.0, running=1))
    edge.telemetry.probe_frame("alpha", _frame(3, 70.01, running=1))
    assert value(edge.samples(), "stopguard_engine_step_seconds") == pytest.approx(0.01)


def test_scrapes_while_the_books_change_in_another_thread() -> None:
    """No scrape fails, and no counter falls, while requests open, run and close beside it."""
    edge = Edge(models=("small", *(f"m{number}" for number in range(20))))
    controller = edge.controller
    done = threading.Event()
    failures: list[str] = []

    def scrape() -> None:
        last: Samples = {}
        while not done.is_set():
            found = edge.samples()
            for key, number in found.items():
                if key[0].endswith(("_total", "_count", "_bucket")) and number < last.get(key, 0.0):
                    failures.append(f"{key} fell from {last[key]} to {number}")
            last = found

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for number in range(400):
            at = 1.0 + number
            tracked = controller.admit(f"sg-{number}", at, model=f"m{number % 20}")
            controller.dispatch(tracked, at, PROBED)
            tracked.events += 5
            edge.see(preemptions.preempted(controller, tracked, at + 0.1), at + 0.1)
            tracked.ledgers.tokens_recomputed += 3
            edge.see(controller.client_left(tracked, at + 0.2, "eof"), at + 0.2)
            edge.see(controller.acknowledged(tracked, at + 0.3, Evidence.PROBE), at + 0.3)
    finally:
        done.set()
        thread.join()
    assert failures == []
    found = edge.samples()
    assert value(found, "stopguard_preemptions_total") == 400
    assert value(found, "stopguard_recomputed_tokens_total") == 1200
    edge.book.verify()


def _frame(step: int, at: float, running: int) -> Frame:
    return Frame(
        sequence=step,
        step=step,
        at=at,
        events=[],
        running_now=running,
        waiting_now=0,
        blocks_free_now=0,
        blocks_cached_now=0,
    )
