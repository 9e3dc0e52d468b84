"""`stopguard explain --resume`: the table of what can be cut and continued, as it is decided."""

from __future__ import annotations

import json

from click.testing import CliRunner

from stopguard.cli import main
from stopguard.engines.resumption import Feature


def test_for_people_each_feature_has_a_line_with_a_verdict_for_each_engine() -> None:
    result = CliRunner().invoke(main, ["explain", "--resume"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split()[:3] == ["a", "request", "with"]
    columns = lines[0].split()[3:-1]
    assert {"llamacpp", "ref", "sglang", "vllm"} <= set(columns)
    for feature in Feature:
        (line,) = [line for line in lines if line.startswith(feature.value + "  ")]
        verdicts = line.removeprefix(feature.value).split()[: len(columns)]
        assert set(verdicts) <= {"never", "approximate", "exact"}


def test_for_programs() -> None:
    result = CliRunner().invoke(main, ["explain", "--resume", "--format", "json"])
    document = json.loads(result.output)
    rows = {row["feature"]: row for row in document["resume"]}
    assert rows[Feature.LOGPROBS.value]["engines"]["vllm"] == "exact"
    assert rows[Feature.LOGPROBS.value]["engines"]["ref"] == "never"
    assert document["consent_header"] == "X-StopGuard-Resume: approximate"


def test_it_goes_alone() -> None:
    result = CliRunner().invoke(main, ["explain", "--resume", "sg-1"])
    assert result.exit_code == 2
    assert "--resume goes alone" in result.output
