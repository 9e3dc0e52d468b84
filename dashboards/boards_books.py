"""Ledgers and leaks, preemption and waste, engines and probe health: the other three dashboards."""

from __future__ import annotations

from dashboards.boards import ENGINE, NONE_IS_GOOD, OVERVIEW, STOPS, VARIABLES
from dashboards.expressions import OWN, increase, pick, quantile, rate, ratio
from dashboards.model import GREEN, RED, YELLOW, Dashboard, Panel, Query, Row, Threshold

__all__ = ["DASHBOARDS"]

ENDED = OWN + ', semantics!="preempt"'
BY_PLACE = "{{engine}} {{ledger}} ({{unit}})"

LEDGERS = Dashboard(
    uid="stopguard-ledgers",
    title="StopGuard / Ledgers and leaks",
    description="What is open, what is overdue, and do the engines' books agree with ours?",
    variables=VARIABLES,
    rows=(
        Row(
            "Leaks",
            (
                Panel(
                    title="Leaks in the chosen time",
                    description="Accounts that were still open at their deadline.",
                    unit="short",
                    kind="stat",
                    width=6,
                    height=6,
                    decimals=0,
                    queries=(Query(increase("stopguard_leaks_total", by="ledger"), "{{ledger}}"),),
                    thresholds=NONE_IS_GOOD,
                ),
                Panel(
                    title="Leaks by ledger",
                    description="Leaks a second: `kv` is memory, `queue` a place, `link` an ack that never came.",
                    unit="suffix: leaks/s",
                    width=9,
                    height=6,
                    stack=True,
                    queries=(Query(rate("stopguard_leaks_total", by="ledger"), "{{ledger}}"),),
                ),
                Panel(
                    title="Leaks by engine",
                    description="The engine that does not give back.",
                    unit="suffix: leaks/s",
                    width=9,
                    height=6,
                    queries=(Query(rate("stopguard_leaks_total", by="engine"), "{{engine}}"),),
                ),
            ),
        ),
        Row(
            "Open books",
            (
                Panel(
                    title="Requests with this ledger open",
                    description="Read from the books at each scrape. All five fall to zero when nothing runs.",
                    unit="short",
                    queries=(Query(f"sum by (ledger) ({pick('stopguard_ledger_open')})", "{{ledger}}"),),
                ),
                Panel(
                    title="Overdue requests",
                    description="Requests with a ledger open past its deadline, by engine.",
                    unit="short",
                    queries=(
                        Query("sum by (engine) (stopguard_requests{" + OWN + ', state="overdue"})', "{{engine}}"),
                    ),
                ),
                Panel(
                    title="Settling",
                    description="Requests that left their engine and whose books are not closed yet.",
                    unit="short",
                    queries=(
                        Query("sum by (engine) (stopguard_requests{" + OWN + ', state="settling"})', "{{engine}}"),
                    ),
                ),
            ),
        ),
        Row(
            "Against the engines' own gauges",
            (
                Panel(
                    title="Orphans",
                    description="What an engine has and no known request owns. When it lasts, it is work for nobody.",
                    unit="short",
                    queries=(Query(f"sum by (engine, ledger, unit) ({pick('stopguard_orphans', ENGINE)})", BY_PLACE),),
                ),
                Panel(
                    title="Phantoms",
                    description="What our books believe in and the engine does not have.",
                    unit="short",
                    queries=(Query(f"sum by (engine, ledger, unit) ({pick('stopguard_phantoms', ENGINE)})", BY_PLACE),),
                ),
                Panel(
                    title="Book errors",
                    description="Statements of engines that the books cannot hold, like a second release, a second.",
                    unit="suffix:/s",
                    queries=(Query(rate("stopguard_book_errors_total", where=""), "book errors"),),
                ),
            ),
        ),
    ),
)

WASTE = Dashboard(
    uid="stopguard-waste",
    title="StopGuard / Preemption and waste",
    description="What is computed for nobody, and what is computed twice?",
    variables=VARIABLES,
    rows=(
        Row(
            "Waste",
            (
                Panel(
                    title="Computed for nobody",
                    description="Tokens that were discarded or came late, of all tokens that left the engines.",
                    unit="percentunit",
                    queries=(
                        Query(
                            ratio(
                                rate("stopguard_tokens_total", by="engine", where=OWN + ', disposition!="delivered"'),
                                rate("stopguard_tokens_total", by="engine"),
                            ),
                            "{{engine}}",
                        ),
                    ),
                ),
                Panel(
                    title="Wasted tokens a stop",
                    description="Tokens that one stopped request computed for nobody, where that can be seen.",
                    unit="short",
                    queries=tuple(
                        Query(quantile(share, "stopguard_wasted_tokens"), f"p{share * 100:g}")
                        for share in (0.5, 0.95, 0.99)
                    ),
                ),
                Panel(
                    title="Wasted GPU-seconds a second",
                    description="Wasted tokens x the measured step time, shared by the requests of the step.",
                    unit="short",
                    queries=(Query(rate("stopguard_wasted_gpu_seconds_total", by="engine"), "{{engine}}"),),
                ),
            ),
        ),
        Row(
            "Preemption",
            (
                Panel(
                    title="Preemptions",
                    description="Preemptions a second, by who wanted them and who keeps the request meanwhile.",
                    unit="suffix:/s",
                    queries=(Query(rate("stopguard_preemptions_total", by="reason, mode"), "{{reason}}, {{mode}}"),),
                ),
                Panel(
                    title="Preemptions a request",
                    description="Preemptions by the engine's own scheduler, for each request that ended.",
                    unit="short",
                    queries=(
                        Query(
                            ratio(
                                rate("stopguard_preemptions_total", by="engine", where=OWN + ', reason="engine"'),
                                rate("stopguard_stops_total", by="engine", where=ENDED),
                            ),
                            "{{engine}}",
                        ),
                    ),
                    thresholds=(Threshold(None, GREEN), Threshold(0.25, YELLOW), Threshold(1, RED)),
                ),
                Panel(
                    title="Recomputed tokens",
                    description="Tokens a second that are computed again because of preemptions; prompts count.",
                    unit="si: tokens/s",
                    queries=(Query(rate("stopguard_recomputed_tokens_total", by="engine"), "{{engine}}"),),
                ),
                Panel(
                    title="Ordered preemptions by outcome",
                    description="Preemptions that StopGuard ordered, a second: confirmed, or refused by the engine.",
                    unit="suffix:/s",
                    queries=(
                        Query(
                            rate("stopguard_stops_total", by="outcome", where=OWN + ', semantics="preempt"'),
                            "{{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    title="Order to preempted",
                    description="From the order to the engine's word that the request was set aside.",
                    unit="s",
                    queries=tuple(
                        Query(
                            quantile(share, "stopguard_abort_to_ack_seconds", where=OWN + ', semantics="preempt"'),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.99)
                    ),
                ),
                Panel(
                    title="Streams that went on",
                    description="Streams a second that the gateway cut and continued, by why, and those it could not.",
                    unit="suffix:/s",
                    queries=(
                        Query(rate("stopguard_streams_continued_total", by="reason", where=""), "{{reason}}"),
                        Query(
                            rate("stopguard_streams_not_continued_total", by="reason", where=""),
                            "not continued: {{reason}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Classes",
            (
                Panel(
                    title="Who makes room",
                    description="Requests preempted by StopGuard, a second, by their class and by why room was wanted.",
                    unit="suffix:/s",
                    queries=(
                        Query(
                            rate("stopguard_preemption_victims_total", by="class, pressure", where=""),
                            "{{class}}, {{pressure}}",
                        ),
                    ),
                ),
                Panel(
                    title="Why others do not",
                    description="Requests that did not make room although it was wanted, a second, by why.",
                    unit="suffix:/s",
                    queries=(Query(rate("stopguard_preemption_refusals_total", by="reason", where=""), "{{reason}}"),),
                ),
                Panel(
                    title="Waiting for room",
                    description="Requests that wait in StopGuard, by class.",
                    unit="short",
                    queries=(Query("sum by (class) (stopguard_queued_requests)", "{{class}}"),),
                ),
                Panel(
                    title="Away from their engine",
                    description="Requests that made room and are away, on average, and the one that is away longest.",
                    unit="short",
                    queries=(
                        Query(rate("stopguard_preempted_seconds_total", where=""), "requests"),
                        Query("max(stopguard_parked_longest_seconds)", "longest, in seconds"),
                    ),
                ),
                Panel(
                    title="The guard",
                    description="The recomputed share of all tokens, and whether preempting has stopped because of it.",
                    unit="percentunit",
                    queries=(
                        Query("max(stopguard_preemption_recomputed_ratio)", "recomputed"),
                        Query("max(stopguard_preemption_guard_closed)", "closed"),
                    ),
                ),
                Panel(
                    title="Not granted",
                    description="Requests a second that asked for more than they may have, or for what takes longer.",
                    unit="suffix:/s",
                    queries=(
                        Query(rate("stopguard_classes_lowered_total", where=""), "class lowered"),
                        Query(rate("stopguard_hopeless_deadlines_total", where=""), "deadline cannot be met"),
                    ),
                ),
            ),
        ),
    ),
)

ENGINES = Dashboard(
    uid="stopguard-engines",
    title="StopGuard / Engines and probe health",
    description="Are the engines there, and can their probes be believed?",
    variables=VARIABLES,
    rows=(
        Row(
            "Engines",
            (
                Panel(
                    title="Engines that answer",
                    description="1 while an engine answers, 0 while it is ejected.",
                    unit="short",
                    kind="stat",
                    width=8,
                    queries=(Query(f"min by (engine) ({pick('stopguard_engine_up', ENGINE)})", "{{engine}}"),),
                    thresholds=(Threshold(None, RED), Threshold(1, GREEN)),
                ),
                Panel(
                    title="Requests by engine",
                    description="Requests whose books are open and that were sent to this engine.",
                    unit="short",
                    queries=(Query(f"sum by (engine) ({pick('stopguard_requests')})", "{{engine}}"),),
                ),
                Panel(
                    title="Kinds and versions",
                    description="What each engine says it is; absent until it has answered.",
                    unit="short",
                    kind="stat",
                    width=8,
                    queries=(
                        Query(
                            f"max by (engine, kind, version) ({pick('stopguard_engine_info', ENGINE)})",
                            "{{engine}}: {{kind}} {{version}}",
                        ),
                    ),
                ),
                Panel(
                    title="Step time",
                    description="The engine's measured step, a moving average.",
                    unit="s",
                    queries=(
                        Query(f"avg by (engine) ({pick('stopguard_engine_step_seconds', ENGINE)})", "{{engine}}"),
                    ),
                ),
            ),
        ),
        Row(
            "Probes",
            (
                Panel(
                    title="Gaps in the chosen time",
                    description="Holes in the numbered frames of an engine's probe: what was said in them is unknown.",
                    unit="short",
                    kind="stat",
                    decimals=0,
                    queries=(Query(increase("stopguard_probe_gaps_total", by="engine", where=ENGINE), "{{engine}}"),),
                    thresholds=NONE_IS_GOOD,
                ),
                Panel(
                    title="Connected, and in a gap",
                    description="Probes of each engine. While one is in a gap the books of its requests may be wrong.",
                    unit="short",
                    queries=(
                        Query(f"sum by (engine) ({pick('stopguard_probes', ENGINE)})", "{{engine}}"),
                        Query(f"sum by (engine) ({pick('stopguard_probes_in_gap', ENGINE)})", "{{engine}}, in a gap"),
                    ),
                ),
                Panel(
                    title="Dropped frames",
                    description="Frames, a second, that probes could not send: the collector is away, or too slow.",
                    unit="suffix:/s",
                    queries=(
                        Query(rate("stopguard_probe_frames_dropped_total", by="engine", where=ENGINE), "{{engine}}"),
                    ),
                ),
                Panel(
                    title="Lag of the probe",
                    description="From an engine's step to the arrival of the frame that reports it.",
                    unit="s",
                    queries=tuple(
                        Query(quantile(share, "stopguard_probe_lag_seconds", where=""), f"p{share * 100:g}")
                        for share in (0.5, 0.99)
                    ),
                ),
                Panel(
                    title="Frames",
                    description="Frames of all probes, a second. None while requests run means that a probe is silent.",
                    unit="suffix:/s",
                    queries=(Query(rate("stopguard_probe_lag_seconds_count", where=""), "frames"),),
                ),
            ),
        ),
        Row(
            "StopGuard itself",
            (
                Panel(
                    title="Memory",
                    description="Resident memory of each StopGuard process. Flat over any number of requests.",
                    unit="bytes",
                    queries=(
                        Query(
                            "process_resident_memory_bytes * on (job, instance) group_left () stopguard_build_info",
                            "{{job}} {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    title="CPU",
                    description="Cores that each StopGuard process uses.",
                    unit="short",
                    queries=(
                        Query(
                            "rate(process_cpu_seconds_total[$__rate_interval])"
                            " * on (job, instance) group_left () stopguard_build_info",
                            "{{job}} {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    title="Spans dropped",
                    description="Spans a second that were not exported, because the receiver was slower or away.",
                    unit="suffix:/s",
                    queries=(Query(rate("stopguard_spans_dropped_total", where=""), "spans"),),
                ),
            ),
        ),
    ),
)

DASHBOARDS = (OVERVIEW, STOPS, LEDGERS, WASTE, ENGINES)
