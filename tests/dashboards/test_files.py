"""The committed files: current, free of complaints, right by Grafana's own types, and their rules tested."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboards.boards_books import DASHBOARDS
from dashboards.generate import FOLDER, files
from dashboards.rules import ALERTS, duration, to_yaml
from stopguard.telemetry import CATALOGUE
from tests.dashboards.lint import complaints, expressions
from tests.dashboards.node import NODE_FOLDER, node_modules
from tests.dashboards.tools import needs

BOARDS = sorted((FOLDER / "grafana").glob("*.json"))
METRICS = {metric.name for metric in CATALOGUE}
PAGE = FOLDER.parent / "docs" / "dashboards.md"


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_the_files_are_what_the_generator_writes() -> None:
    wanted = files()
    assert {path for path in wanted if path.suffix == ".json"} == set(BOARDS)
    for path, text in wanted.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m dashboards.generate"


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_no_complaints(path: Path) -> None:
    assert list(complaints(load(path), METRICS)) == []


def test_every_metric_of_ours_is_on_some_dashboard() -> None:
    shown = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for path in BOARDS
        for _, expr in expressions(load(path))
        for name in re.findall(r"stopguard_\w+", expr)
    }
    assert METRICS - shown == set()


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda panel: panel.update(title=""), "no title"),
        (lambda panel: panel.update(description=""), "no description"),
        (lambda panel: panel["fieldConfig"]["defaults"].pop("unit"), "no unit"),
        (lambda panel: panel.update(id=1), "not unique"),
        (lambda panel: panel["gridPos"].update(w=25), "wider than the grid"),
        (lambda panel: panel["gridPos"].update(x=0, y=0), "lies on another panel"),
        (lambda panel: panel["targets"][0].update(legendFormat=""), "no legend"),
        (
            lambda panel: panel["targets"][0].update(datasource={"uid": "P1"}),
            "hard-wired",
        ),
        (
            lambda panel: panel["targets"][0].update(expr="rate(stopguard_leaks_total[5m])"),
            r"a rate over \[5m\]",
        ),
        (
            lambda panel: panel["targets"][0].update(expr="sum(stopguard_leaks_total"),
            "PromQL",
        ),
        (
            lambda panel: panel["targets"][0].update(expr='stopguard_requests{engine="$engin"}'),
            "undefined variable",
        ),
        (
            lambda panel: panel["targets"][0].update(expr="stopguard_leeks_total"),
            "not exposed",
        ),
        (
            lambda panel: panel["targets"][0].update(
                expr="histogram_quantile(0.9, sum(rate(stopguard_wasted_tokens_bucket[$__rate_interval])))"
            ),
            "without le",
        ),
    ],
)
def test_each_complaint_can_be_made(spoil: Any, complaint: str) -> None:
    document = copy.deepcopy(load(FOLDER / "grafana" / "stopguard-overview.json"))
    spoil(document["panels"][2])
    assert re.search(complaint, "\n".join(complaints(document, METRICS)))


def test_promtool_accepts_and_tests_the_rules() -> None:
    promtool = needs("promtool", "prometheus")
    folder = FOLDER / "prometheus"
    subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", str(folder / "rules.yml")],
        check=True,
    )
    tested = subprocess.run(
        [promtool, "test", "rules", str(folder / "rules_test.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_has_a_rule_test_and_a_section_in_the_documentation() -> None:
    tests = (FOLDER / "prometheus" / "rules_test.yml").read_text(encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    for alert in ALERTS:
        assert f"alertname: {alert}\n" in tests
        assert f"runbook: docs/dashboards.md#{alert.lower()}" in tests
        assert f"\n### {alert}\n" in page


def test_a_scaled_rule_file_differs_in_its_times_alone() -> None:
    def times_removed(text: str) -> str:
        return re.sub(r"\[\w+\]|(?<=for: )\w+|(?<=interval: )\w+", "T", text)

    assert times_removed(to_yaml(1 / 30)) == times_removed(to_yaml())
    assert to_yaml(1 / 30) != to_yaml()
    assert [duration(seconds) for seconds in (3600, 300, 90, 0.5)] == [
        "1h",
        "5m",
        "90s",
        "500ms",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_grafanas_own_types_accept_every_dashboard_and_refuse_mistakes(
    tmp_path: Path,
) -> None:
    node = needs("node", "nodejs")
    modules = node_modules()
    bad: dict[str, Callable[[dict[str, Any]], object]] = {
        "tittle": lambda document: document.update(tittle="x"),
        "hh": lambda document: document["panels"][1]["gridPos"].update(hh=3),
        "colorMood": lambda document: document["panels"][1]["options"].update(colorMood="value"),
        "drawStile": lambda document: document["panels"][9]["fieldConfig"]["defaults"]["custom"].update(drawStile=1),
        "unti": lambda document: document["panels"][1]["fieldConfig"]["defaults"].update(unti="s"),
    }
    spoilt = []
    for name, spoil in bad.items():
        document = load(FOLDER / "grafana" / "stopguard-overview.json")
        spoil(document)
        spoilt.append(tmp_path / f"{name}.json")
        spoilt[-1].write_text(json.dumps(document), encoding="utf-8")
    checked = subprocess.run(
        [
            node,
            str(NODE_FOLDER / "types.mjs"),
            str(modules),
            *map(str, [*BOARDS, *spoilt]),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.stderr == ""
    found = json.loads(checked.stdout)
    assert [found[str(path)] for path in BOARDS] == [[]] * len(DASHBOARDS)
    for path in spoilt:
        assert any(path.stem in complaint for complaint in found[str(path)])
