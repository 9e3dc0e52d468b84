"""The comparison: each policy's row comes out of its runs, and other behaviour gets other words."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from stopguard.cli import main
from stopguard.refengine import FAULTS, POLICIES
from stopguard.refengine import compare as compare_module
from stopguard.refengine.compare import COLUMNS, Row, compare, render_markdown

EXPECTED = {
    "vllm": (
        ("next step boundary", "event-driven"),
        ("delivered as stale", "counters frozen"),
        ("behind the step fence", "deferred"),
        ("last of the running queue", "front of the waiting queue", "recompute"),
    ),
    "sglang": (
        (
            "waiting: at once",
            "running: marked, ends with the next step",
            "chunked prefill: at the chunk's end",
            "detection 2 s late on streams",
            "4 s poll otherwise",
        ),
        ("not delivered",),
        ("at the end of that step, no fence", "retract evicts the prefix tree"),
        ("fewest output tokens, then longest prompt", "to the back of the queue"),
    ),
    "llamacpp": (
        ("cancel task at the queue's head", "a running decode is not interrupted", "starved while a neighbour streams"),
        ("not delivered",),
        ("slot freed, KV kept for reuse",),
        ("none",),
    ),
    "trtllm": (
        ("1 Hz poll + FIFO queue + one loop", "may be refused and is retried"),
        ("delivered through the response queue",),
        ("response pass",),
        ("paused requests",),
    ),
    "deepinfer": (
        ("marked at once, cleaned one beat later", "a prefill in flight is never cancelled"),
        ("delivered inside the deferred window",),
        ("next beat, output objects one later",),
        ("longest output first", "structured output is finished instead"),
    ),
}


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.policy: row for row in compare(seed=7)}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_row_of_each_policy(policy: str, rows: dict[str, Row]) -> None:
    for cell, phrases in zip(rows[policy].cells[1:], EXPECTED[policy], strict=True):
        for phrase in phrases:
            assert phrase in cell


def test_exactly_one_rule_explains_every_victim(rows: dict[str, Row]) -> None:
    for row in rows.values():
        found = row.measures.preemptions
        assert (len(found.rules), found.count > 20) == ((1, True) if row.policy != "llamacpp" else (0, False))


def test_the_words_follow_the_behaviour_and_not_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine called vllm that behaves like llama.cpp in one thing gets llama.cpp's word there."""
    changed = msgspec.structs.replace(
        POLICIES["vllm"],
        victim=POLICIES["deepinfer"].victim,
        detection=POLICIES["trtllm"].detection,
        intake="head",
        pipeline_depth=1,
        front_gate=True,
    )
    monkeypatch.setitem(POLICIES, "vllm", changed)
    [row] = compare(["vllm"])
    assert "cancel task at the queue's head" in row.takes_effect
    assert "1 Hz poll" in row.takes_effect
    assert row.in_flight_output == "not delivered"
    assert row.release == "at the end of that step, no fence"
    assert "longest output first" in row.preemption_victim


def test_the_table_has_the_columns_and_a_row_each(rows: dict[str, Row]) -> None:
    lines = render_markdown(list(rows.values())).splitlines()
    assert lines[0] == "| " + " | ".join(COLUMNS) + " |"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:7]] == list(POLICIES)


@pytest.mark.parametrize("form", ["text", "json", "markdown"])
def test_the_command_prints_every_format(form: str) -> None:
    result = CliRunner().invoke(main, ["refengine", "compare", "--policy", "trtllm", "--format", form])
    assert result.exit_code == 0, result.output
    assert "1 Hz poll + FIFO queue" in result.output
    if form == "json":
        [row] = json.loads(result.output)
        assert row["measures"]["running"]["tokens_emitted"] == 2


def test_an_unknown_policy_is_one_clear_line() -> None:
    result = CliRunner().invoke(main, ["refengine", "compare", "--policy", "nothing"])
    assert result.exit_code == 2
    assert "vllm, sglang, llamacpp, trtllm, deepinfer" in result.output
    assert compare_module.COLUMNS[0] == "policy"


def test_the_documentation_shows_what_the_runs_say() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "refengine.md").read_text(encoding="utf-8")
    table = "\n".join(render_markdown(compare()).splitlines()[: 2 + len(POLICIES)])
    assert table in documented, "regenerate it: stopguard refengine compare --format markdown"
    for name, fault in FAULTS.items():
        assert f"| `{name}` | {fault.failure_class} | {fault.ledger} |" in documented
