"""Overview and Stops, the first two dashboards. Each begins with the question that it answers."""

from __future__ import annotations

from dashboards.expressions import OWN, increase, pick, quantile, rate, ratio, stopped
from dashboards.model import BLUE, GREEN, GREY, RED, YELLOW, Dashboard, Panel, Query, Row, Threshold, Variable

__all__ = ["OBJECTIVE_SECONDS", "OVERVIEW", "STOPS"]

OBJECTIVE_SECONDS = 2.5
"""What a stop may take to be settled, in the 99th percentile: a bucket's bound, and the alert's threshold."""

VARIABLES = (
    Variable("engine", "engine", "stopguard_requests"),
    Variable("model", "model", "stopguard_requests"),
)
ENGINE = 'engine=~"$engine"'
OUTCOME_COLOURS = (("confirmed", GREEN), ("raced_finish", BLUE), ("failed", YELLOW), ("unconfirmed", RED))
NONE_IS_GOOD = (Threshold(None, GREEN), Threshold(0.5, RED))
SETTLE_TIME = (Threshold(None, GREEN), Threshold(OBJECTIVE_SECONDS / 2, YELLOW), Threshold(OBJECTIVE_SECONDS, RED))
SETTLED = "stopguard_stop_to_settled_seconds"
UNCONFIRMED = 'outcome="unconfirmed"'
STOPPED = stopped()


def _quantiles(title: str, histogram: str, description: str, *, where: str = OWN, width: int = 8) -> Panel:
    return Panel(
        title=title,
        description=description,
        unit="s",
        width=width,
        queries=tuple(
            Query(quantile(share, histogram, where=where), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)
        ),
    )


# ---- Overview ---------------------------------------------------------------------------------------------------

OVERVIEW = Dashboard(
    uid="stopguard-overview",
    title="StopGuard / Overview",
    description="Is every stop a stop?",
    variables=VARIABLES,
    rows=(
        Row(
            "Is every stop a stop?",
            (
                Panel(
                    title="Stops with evidence",
                    description="Of the requests that somebody stopped in the chosen time: those whose end is proved.",
                    unit="percentunit",
                    kind="stat",
                    width=4,
                    height=5,
                    maximum=1,
                    queries=(
                        Query(
                            "1 - "
                            + ratio(
                                increase("stopguard_stops_total", where=f"{STOPPED}, {UNCONFIRMED}"),
                                increase("stopguard_stops_total", where=STOPPED),
                            ),
                            "confirmed",
                        ),
                    ),
                    thresholds=(Threshold(None, RED), Threshold(0.98, YELLOW), Threshold(0.995, GREEN)),
                    no_value="no stops",
                ),
                Panel(
                    title="Leaks",
                    description="Accounts that were still open at their deadline, in the chosen time.",
                    unit="short",
                    kind="stat",
                    width=4,
                    height=5,
                    decimals=0,
                    queries=(Query(increase("stopguard_leaks_total"), "leaks"),),
                    thresholds=NONE_IS_GOOD,
                ),
                Panel(
                    title="Stop to settled, p99",
                    description="From the observation of a stop to five closed ledgers. The objective.",
                    unit="s",
                    kind="stat",
                    width=4,
                    height=5,
                    queries=(Query(quantile(0.99, SETTLED), "p99"),),
                    thresholds=SETTLE_TIME,
                    no_value="no stops",
                ),
                Panel(
                    title="Stops in progress",
                    description="Requests that are being stopped now.",
                    unit="short",
                    kind="stat",
                    width=4,
                    height=5,
                    queries=(Query("sum(stopguard_requests{" + OWN + ', state="stopping"})', "stopping"),),
                ),
                Panel(
                    title="Overdue",
                    description="Requests with a ledger that is open past its deadline, now.",
                    unit="short",
                    kind="stat",
                    width=4,
                    height=5,
                    queries=(Query("sum(stopguard_requests{" + OWN + ', state="overdue"})', "overdue"),),
                    thresholds=NONE_IS_GOOD,
                ),
                Panel(
                    title="Computed for nobody",
                    description="Tokens that were discarded or came late, of all tokens that left the engines.",
                    unit="percentunit",
                    kind="stat",
                    width=4,
                    height=5,
                    queries=(
                        Query(
                            ratio(
                                rate("stopguard_tokens_total", where=OWN + ', disposition!="delivered"'),
                                rate("stopguard_tokens_total"),
                            ),
                            "wasted",
                        ),
                    ),
                    thresholds=(Threshold(None, GREEN), Threshold(0.05, YELLOW), Threshold(0.2, RED)),
                    no_value="no tokens",
                ),
            ),
        ),
        Row(
            "Requests and stops",
            (
                Panel(
                    title="Requests by state",
                    description="Requests whose books are open, read from the books.",
                    unit="short",
                    stack=True,
                    queries=(Query(f"sum by (state) ({pick('stopguard_requests')})", "{{state}}"),),
                    colours=(
                        ("queued", GREY),
                        ("running", GREEN),
                        ("preempted", BLUE),
                        ("draining", "purple"),
                        ("stopping", YELLOW),
                        ("settling", "orange"),
                        ("overdue", RED),
                    ),
                ),
                Panel(
                    title="Ends by meaning",
                    description="Requests that ended, a second: by the model (finish), a client (cancel), a failure.",
                    unit="reqps",
                    queries=(
                        Query(
                            rate("stopguard_stops_total", by="semantics", where=OWN + ', semantics!="preempt"'),
                            "{{semantics}}",
                        ),
                    ),
                ),
                Panel(
                    title="Stops by outcome",
                    description="Requests that somebody stopped, a second, and what is known of their end.",
                    unit="reqps",
                    stack=True,
                    queries=(Query(rate("stopguard_stops_total", by="outcome", where=STOPPED), "{{outcome}}"),),
                    colours=OUTCOME_COLOURS,
                ),
                _quantiles("Stop to settled", SETTLED, "From the observation of a stop to five closed ledgers."),
                Panel(
                    title="Leaks by ledger",
                    description="Accounts that were still open at their deadline, a second.",
                    unit="suffix: leaks/s",
                    stack=True,
                    queries=(Query(rate("stopguard_leaks_total", by="ledger"), "{{ledger}}"),),
                ),
                Panel(
                    title="Tokens by where they ended",
                    description="Tokens a second: with the client, dropped, or late after a stop.",
                    unit="si: tokens/s",
                    stack=True,
                    queries=(Query(rate("stopguard_tokens_total", by="disposition"), "{{disposition}}"),),
                    colours=(("delivered", GREEN), ("discarded", YELLOW), ("stale", RED)),
                ),
            ),
        ),
    ),
)

# ---- Stops ------------------------------------------------------------------------------------------------------

STOPS = Dashboard(
    uid="stopguard-stops",
    title="StopGuard / Stops",
    description="How long does each step of a stop take, at which engine?",
    variables=VARIABLES,
    rows=(
        Row(
            "The steps of a stop",
            (
                _quantiles(
                    "Detection",
                    "stopguard_disconnect_detection_seconds",
                    "From the moment a client left to the moment that was known, where the former is known.",
                    where="",
                    width=6,
                ),
                _quantiles(
                    "1. Notify",
                    "stopguard_stop_to_abort_sent_seconds",
                    "From the observation of a stop to the first abort that left for the engine.",
                    width=6,
                ),
                _quantiles(
                    "2. Ack",
                    "stopguard_abort_to_ack_seconds",
                    "From the first abort to the engine's own word that the request left its scheduler.",
                    where=OWN + ', semantics!="preempt"',
                    width=6,
                ),
                _quantiles(
                    "3. Release",
                    "stopguard_ack_to_released_seconds",
                    "From the ack to the moment at which the request held no KV.",
                    width=6,
                ),
                _quantiles(
                    "4. Settle: the whole stop",
                    SETTLED,
                    "From the observation of a stop to five closed ledgers.",
                    width=12,
                ),
                Panel(
                    title="Settled within the objective",
                    description=f"Of the stops that were settled: those within {OBJECTIVE_SECONDS:g} s.",
                    unit="percentunit",
                    width=12,
                    maximum=1,
                    queries=(
                        Query(
                            ratio(
                                rate(
                                    f"{SETTLED}_bucket",
                                    by="engine",
                                    where=f'{OWN}, le="{OBJECTIVE_SECONDS}"',
                                ),
                                rate(f"{SETTLED}_count", by="engine"),
                            ),
                            "{{engine}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "By engine and meaning",
            (
                Panel(
                    title="Stop to settled by engine, p99",
                    description="The engine that is slow to let go.",
                    unit="s",
                    queries=(Query(quantile(0.99, SETTLED, by="engine"), "{{engine}}"),),
                ),
                Panel(
                    title="Stop to settled by meaning, p99",
                    description="Cancels by clients, and failures.",
                    unit="s",
                    queries=(Query(quantile(0.99, SETTLED, by="semantics"), "{{semantics}}"),),
                ),
                Panel(
                    title="Ack by evidence, p99",
                    description="How long each kind of proof takes: the scheduler's word, the stream's end, gauges.",
                    unit="s",
                    queries=(
                        Query(
                            quantile(
                                0.99,
                                "stopguard_abort_to_ack_seconds",
                                by="evidence",
                                where=OWN + ', semantics!="preempt"',
                            ),
                            "{{evidence}}",
                        ),
                    ),
                ),
                Panel(
                    title="Stops by outcome",
                    description="Requests that somebody stopped, a second.",
                    unit="reqps",
                    stack=True,
                    queries=(Query(rate("stopguard_stops_total", by="outcome", where=STOPPED), "{{outcome}}"),),
                    colours=OUTCOME_COLOURS,
                ),
                Panel(
                    title="Unconfirmed stops by engine",
                    description="Stops without evidence, a second: all of them, at an engine that can prove nothing.",
                    unit="reqps",
                    queries=(
                        Query(
                            rate("stopguard_stops_total", by="engine", where=f"{STOPPED}, {UNCONFIRMED}"), "{{engine}}"
                        ),
                    ),
                ),
                Panel(
                    title="Abort retries by reason",
                    description="Aborts beyond the first, a second, by what became of the one before.",
                    unit="suffix:/s",
                    queries=(Query(rate("stopguard_abort_retries_total", by="reason"), "{{reason}}"),),
                ),
            ),
        ),
    ),
)
