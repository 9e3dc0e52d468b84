"""The study of preemption: ways and victim policies side by side, over seeded loads, in virtual time.

An *arm* is one way to run StopGuard before one engine. Two do not preempt: `arrival` (no classes) and `native` (the
engine sorts its queue by priority, which is all that native priority does for a full pool). The others preempt
inside the engine with one victim policy each. `slots` and `slots gateway` are an engine that cannot preempt and has
few slots, without and with stopping and resuming at the gateway.

Figures are of virtual time, so they compare arms and say nothing of a machine. Every stream's tokens are compared with
those of the run without classes; one that differs is counted as inexact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stopguard.preemption import POLICIES, Mode, PreemptionSettings, WayKind
from stopguard.refengine import DEFAULT_POLICY, EngineConfig
from stopguard.refengine import POLICIES as ENGINES
from stopguard.testing.preemption_loads import HOSTILE, load_named
from stopguard.testing.preemption_world import SMALL_POOL, Run, World

__all__ = ["ARMS", "THROUGHPUT_MIN", "Arm", "Row", "arm_named", "render_json", "render_text", "study"]

#: What a hostile load may not push the throughput below, relative to the arm `native`.
THROUGHPUT_MIN = 0.9
_SLOTS = 4


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run. `baseline` names the arm that its throughput is compared with."""

    name: str
    mode: Mode
    policy: str = "least_work_lost"
    way: WayKind = WayKind.INSIDE
    native_priority: bool = True
    slots: bool = False
    baseline: str = "native"


ARMS: tuple[Arm, ...] = (
    Arm(name="arrival", mode=Mode.OFF, native_priority=False),
    Arm(name="native", mode=Mode.QUEUE),
    *(Arm(name=policy, mode=Mode.PREEMPT, policy=policy) for policy in POLICIES),
    Arm(name="gateway", mode=Mode.PREEMPT, way=WayKind.GATEWAY),
    Arm(name="slots", mode=Mode.QUEUE, slots=True, native_priority=False, baseline="slots"),
    Arm(
        name="slots gateway",
        mode=Mode.PREEMPT,
        way=WayKind.GATEWAY,
        slots=True,
        native_priority=False,
        baseline="slots",
    ),
)


class Row(msgspec.Struct, kw_only=True):
    """One arm under one load, over all seeds. Seconds, tokens, shares of one."""

    load: str
    arm: str
    runs: int
    urgent_first_seconds_p50: float
    urgent_first_seconds_p99: float
    other_total_seconds_p50: float
    makespan_seconds: float
    """The mean of the runs."""
    throughput_share: float
    """Tokens a second, relative to the arm's baseline."""
    preemptions: int
    recomputed_tokens: int
    """By our own preemptions."""
    engine_recomputed_tokens: int
    """By the engine's own."""
    fairness: float
    """Jain's index of the pace (tokens a second) of those that are not urgent: 1 is equal."""
    longest_wait_seconds: float
    """Until a first token, or while somebody was away."""
    guard_closings: int
    inexact_streams: int
    refusals: dict[str, int]

    @property
    def holds(self) -> bool:
        """Whether a hostile load has done no harm."""
        return self.throughput_share >= THROUGHPUT_MIN and not self.inexact_streams


def arm_named(name: str) -> Arm:
    """The arm; `KeyError` when there is none."""
    return {arm.name: arm for arm in ARMS}[name]


def study(
    loads: Sequence[str],
    arms: Sequence[Arm] = ARMS,
    seeds: Sequence[int] = (1, 2, 3),
    settings: PreemptionSettings | None = None,
    told: Callable[[str], None] = lambda _line: None,
) -> list[Row]:
    """Run every arm under every load with every seed. `told` hears of each load that is done."""
    rows: list[Row] = []
    for load in loads:
        runs = {arm.name: [_run(load, arm, seed, settings) for seed in seeds] for arm in arms}
        undisturbed = [_tokens(_run(load, ARMS[0], seed, settings)) for seed in seeds]
        for arm in arms:
            baseline = runs.get(arm.baseline) or [_run(load, arm_named(arm.baseline), seed, settings) for seed in seeds]
            runs[arm.baseline] = baseline
            rows.append(_row(load, arm, runs[arm.name], baseline, undisturbed))
        told(load)
    return rows


def _run(load: str, arm: Arm, seed: int, settings: PreemptionSettings | None) -> Run:
    wanted = msgspec.structs.replace(settings or PreemptionSettings(), mode=arm.mode, policy=arm.policy)
    config, places, policy = SMALL_POOL, SMALL_POOL.max_running, DEFAULT_POLICY
    if arm.slots:
        policy = next(name for name, each in ENGINES.items() if not each.preempts)
        config = EngineConfig(blocks=512, block_tokens=16, max_running=_SLOTS, max_model_tokens=2048)
        places = _SLOTS
    world = World(
        load_named(load, seed),
        wanted,
        way=arm.way,
        engine_policy=policy,
        config=config,
        native_priority=arm.native_priority,
        places=places,
        seed=seed,
    )
    run = world.run()
    world.verify()
    return run


def _tokens(run: Run) -> list[list[int]]:
    return [client.tokens for client in run.clients]


def _row(load: str, arm: Arm, runs: list[Run], baseline: list[Run], undisturbed: list[list[list[int]]]) -> Row:
    clients = [client for run in runs for client in run.clients]
    urgent = [client.first_seconds for client in clients if client.arrival.priority_class == "urgent"]
    others = [client for client in clients if client.arrival.priority_class != "urgent"] or clients
    refusals: dict[str, int] = {}
    for run in runs:
        for reason, count in run.refusals.items():
            refusals[reason] = refusals.get(reason, 0) + count
    return Row(
        load=load,
        arm=arm.name,
        runs=len(runs),
        urgent_first_seconds_p50=quantile(urgent, 0.5),
        urgent_first_seconds_p99=quantile(urgent, 0.99),
        other_total_seconds_p50=quantile([client.total_seconds for client in others], 0.5),
        makespan_seconds=sum(run.makespan_seconds for run in runs) / len(runs),
        throughput_share=_pace(runs) / _pace(baseline),
        preemptions=sum(run.taken for run in runs),
        recomputed_tokens=sum(run.ordered_recomputed_tokens for run in runs),
        engine_recomputed_tokens=sum(run.engine_recomputed_tokens for run in runs),
        fairness=_jain([len(client.tokens) / client.total_seconds for client in others]),
        longest_wait_seconds=max(max(client.first_seconds, client.longest_parked_seconds) for client in clients),
        guard_closings=sum(run.guard_closings for run in runs),
        inexact_streams=sum(
            got != wanted
            for run, right in zip(runs, undisturbed, strict=True)
            for got, wanted in zip(_tokens(run), right, strict=True)
        ),
        refusals=refusals,
    )


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of all lie, or the one above; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _pace(runs: list[Run]) -> float:
    tokens = sum(len(client.tokens) for run in runs for client in run.clients)
    return tokens / sum(run.makespan_seconds for run in runs)


def _jain(values: list[float]) -> float:
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


# ---- rendering ----------------------------------------------------------------------------------

_HEADS = (
    "arm",
    "urgent p50",
    "p99 ms",
    "others p50 s",
    "makespan s",
    "throughput",
    "preempted",
    "recomputed",
    "fair",
    "longest wait s",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row in words, in the order of the table's heads."""
    return (
        row.arm,
        f"{row.urgent_first_seconds_p50 * 1000:.0f}",
        f"{row.urgent_first_seconds_p99 * 1000:.0f}",
        f"{row.other_total_seconds_p50:.1f}",
        f"{row.makespan_seconds:.1f}",
        f"{row.throughput_share:.1%}",
        str(row.preemptions),
        str(row.recomputed_tokens),
        f"{row.fairness:.2f}",
        f"{row.longest_wait_seconds:.1f}",
    )


def render_text(rows: Sequence[Row]) -> str:
    """A table for each load, in plain text that is Markdown too."""
    lines: list[str] = []
    for load in dict.fromkeys(row.load for row in rows):
        mine = [row for row in rows if row.load == load]
        table = [_HEADS, *(cells(row) for row in mine)]
        widths = [max(len(line[column]) for line in table) for column in range(len(_HEADS))]
        lines += [f"### {load}", ""]
        for number, line in enumerate(table):
            padded = [
                text.ljust(width) if not column else text.rjust(width)
                for column, (text, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("| " + " | ".join(padded) + " |")
            if not number:
                lines.append(
                    "|" + "|".join("-" * (width + 1) + ("-" if not c else ":") for c, width in enumerate(widths)) + "|"
                )
        lines.append("")
        if load in HOSTILE:
            worst = min(mine, key=lambda row: row.throughput_share)
            verdict = "the guard holds" if all(row.holds for row in mine) else "THE GUARD FAILS"
            longest = max(row.longest_wait_seconds for row in mine)
            closings = sum(row.guard_closings for row in mine)
            lines += [
                f"{verdict}: throughput at least {worst.throughput_share:.1%} of no preemption, nobody waited longer "
                f"than {longest:.1f} s, closed {closings} times",
                "",
            ]
        inexact = sum(row.inexact_streams for row in mine)
        preempted = sum(row.preemptions for row in mine)
        lines += [f"{preempted} preemptions, {inexact} streams with another token than undisturbed.", ""]
    return "\n".join(lines)


def render_json(rows: Sequence[Row]) -> str:
    """All rows, with the reasons for which requests were not preempted."""
    return msgspec.json.format(msgspec.json.encode(list(rows)), indent=2).decode() + "\n"
