"""The study: nobody's tokens change, hostile loads do no harm, nobody starves, and the same seed gives the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from stopguard.cli import main
from stopguard.errors import ConfigurationError
from stopguard.preemption import Mode, PreemptionSettings, WayKind
from stopguard.testing.preemption_loads import HOSTILE, LOADS, Arrival, Load, load_named
from stopguard.testing.preemption_plots import bars_of_first_tokens, cost_and_gain
from stopguard.testing.preemption_study import ARMS, THROUGHPUT_MIN, Row, arm_named, quantile, render_text, study
from stopguard.testing.preemption_world import World

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def honest() -> list[Row]:
    return study(["chats"], ARMS, seeds=[1])


@pytest.mark.slow
def test_every_stream_has_the_tokens_of_an_undisturbed_run(honest: list[Row]) -> None:
    assert [row.inexact_streams for row in honest] == [0] * len(ARMS)
    assert sum(row.preemptions for row in honest) > 50


@pytest.mark.slow
def test_preempting_helps_the_urgent_and_costs_little(honest: list[Row]) -> None:
    rows = {row.arm: row for row in honest}
    arrival, native = rows["arrival"], rows["native"]
    assert arrival.preemptions == native.preemptions == 0
    for name in ("least_work_lost", "longest_output_first", "gateway"):
        row = rows[name]
        assert row.preemptions > 0
        assert row.urgent_first_seconds_p50 <= arrival.urgent_first_seconds_p50 / 8
        assert row.urgent_first_seconds_p99 < native.urgent_first_seconds_p99
        assert row.throughput_share > THROUGHPUT_MIN
    assert rows["slots gateway"].urgent_first_seconds_p50 <= rows["slots"].urgent_first_seconds_p50 / 4


@pytest.mark.slow
def test_hostile_loads_do_no_harm() -> None:
    arms = [arm_named(name) for name in ("native", "least_work_lost", "newest_first", "gateway", "slots gateway")]
    rows = study(HOSTILE, arms, seeds=[1])
    print()
    print(render_text(rows))
    assert "THE GUARD FAILS" not in render_text(rows)
    for row in rows:
        assert row.holds, row
        if row.load in ("all_urgent", "unpreemptible"):
            assert row.preemptions == 0
    assert any(row.preemptions for row in rows if row.load == "flapping")


@pytest.mark.slow
def test_a_guard_that_has_closed_leaves_the_throughput_alone() -> None:
    """A storm of urgent requests against long contexts, with nothing else to hold it back but the guard."""
    settings = PreemptionSettings(
        cool_down_seconds=0.001,
        preemptions_per_request=1000,
        window_tokens=500,
        window_seconds=5.0,
        hold_seconds=0.001,
        remaining_tokens_min=0,
        patience_seconds=0.001,
    )
    arms = [arm_named("native"), arm_named("most_blocks_freed"), arm_named("gateway")]
    rows = study(["flapping", "prompts"], arms, seeds=[1], settings=settings)
    assert sum(row.guard_closings for row in rows) > 0
    for row in rows:
        assert row.throughput_share >= THROUGHPUT_MIN, row
        assert not row.inexact_streams


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WayKind))
def test_nobody_starves_beside_urgent_work_without_end(way: WayKind) -> None:
    """More urgent work than the engine can do, for as long as it takes: the others are served within their bound."""
    urgent = [
        Arrival(at=0.5 + number * 0.05, priority_class="urgent", tenant="red", prompt_tokens=60, max_tokens=40)
        for number in range(900)
    ]
    others = [
        Arrival(at=0.01 * number, priority_class="background", tenant="blue", prompt_tokens=100, max_tokens=200)
        for number in range(8)
    ]
    late = [Arrival(at=5.0, priority_class="background", tenant="blue", prompt_tokens=50, max_tokens=50)]
    load = Load(name="endless", arrivals=tuple(sorted([*urgent, *others, *late], key=lambda each: each.at)))
    settings = PreemptionSettings(mode=Mode.PREEMPT, promote_seconds=1.0, longest_parked_seconds=3.0)
    world = World(load, settings, way=way, native_priority=False, places=8)
    run = world.run()
    world.verify()
    background = [client for client in run.clients if client.arrival.priority_class == "background"]
    ends = max(client.ended_at or 0.0 for client in run.clients)
    waits = [max(client.first_seconds, client.longest_parked_seconds) for client in background]
    print(f"{way}: longest wait {max(waits):.1f} s, urgent work for {ends:.0f} s, {run.taken} preemptions")
    assert ends > 40.0
    # Two promotions to the top, then its turn among those at the top; or the longest that it may be parked.
    assert max(waits) < 8.0
    assert max(client.ended_at or 0.0 for client in background) < ends / 2


def test_a_seed_is_a_load() -> None:
    for name in LOADS:
        assert load_named(name, 1) == load_named(name, 1)
        assert load_named(name, 1) != load_named(name, 2)
        times = [each.at for each in load_named(name, 1).arrivals]
        assert times == sorted(times)
    with pytest.raises(ConfigurationError, match="no load 'calm'; there are: steady"):
        load_named("calm", 1)


def test_the_same_seed_gives_the_same_run() -> None:
    arms = [arm_named("least_work_lost")]
    arrivals = load_named("chats", 3).arrivals[:40]
    load = Load(name="short", arrivals=arrivals)
    runs = []
    for _ in range(2):
        world = World(load, PreemptionSettings(mode=Mode.PREEMPT, policy=arms[0].policy), places=6)
        runs.append(msgspec.json.encode(world.run()))
        world.verify()
    assert runs[0] == runs[1]


def test_a_quantile_is_a_value_that_was_there() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile([], 0.5) == 0.0


@pytest.mark.slow
def test_the_command_prints_tables_and_draws(tmp_path: Path) -> None:
    asked = ["refengine", "study", "--load", "prompts", "--seeds", "1", "--plots", str(tmp_path)]
    asked += ["--policy", "native", "--policy", "newest_first"]
    found = CliRunner().invoke(main, asked)
    assert found.exit_code == 0, found.output
    assert "### prompts" in found.output
    assert "| newest_first |" in found.output
    drawn = (tmp_path / "preemption_prompts.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<svg")
    assert "newest_first" in drawn
    assert (tmp_path / "preemption_cost.svg").exists()
    rows = CliRunner().invoke(main, [*asked[:6], "--policy", "native", "--format", "json"])
    assert msgspec.json.decode(rows.stdout)[0]["arm"] == "native"


def test_the_command_names_what_there_is() -> None:
    for words, complaint in (
        (["--policy", "youngest"], "there is no arm 'youngest'; there are: arrival, native"),
        (["--load", "calm"], "there is no load 'calm'"),
    ):
        found = CliRunner().invoke(main, ["refengine", "study", *words])
        assert found.exit_code != 0
        assert complaint in found.output + str(found.exception)


def test_pictures_are_well_formed_with_nothing_to_show() -> None:
    row = Row(
        load="calm",
        arm="native",
        runs=1,
        urgent_first_seconds_p50=0.0,
        urgent_first_seconds_p99=0.0,
        other_total_seconds_p50=1.0,
        makespan_seconds=1.0,
        throughput_share=1.0,
        preemptions=1,
        recomputed_tokens=0,
        engine_recomputed_tokens=0,
        fairness=1.0,
        longest_wait_seconds=0.0,
        guard_closings=0,
        inexact_streams=0,
        refusals={},
    )
    for drawn in (bars_of_first_tokens([row], "calm"), cost_and_gain([row], ["calm"])):
        assert drawn.startswith("<svg")
        assert drawn.rstrip().endswith("</svg>")
