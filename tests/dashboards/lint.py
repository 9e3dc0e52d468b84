"""Rules for dashboards that Grafana would not complain about, and readers of their JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser

__all__ = ["complaints", "expressions", "panels", "substitute"]

_RANGE_FUNCTIONS = re.compile(r"\b(?:rate|increase|irate|delta)\([^\[]*\[([^\]]+)\]")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_WINDOWS = ("$__rate_interval", "$__range")
_BUILT_IN = {"__rate_interval": "1m", "__range": "1h", "__interval": "15s"}
_STOPGUARD_METRIC = re.compile(r"\bstopguard_\w+")

Document = dict[str, Any]


def panels(document: Document) -> Iterator[Document]:
    """Every panel but the rows' headings."""
    for panel in document["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions(document: Document) -> Iterator[tuple[str, str]]:
    """(panel's title, expression)."""
    for panel in panels(document):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def substitute(expr: str, values: dict[str, str]) -> str:
    """`expr` with Grafana's variables replaced; `KeyError` for one that nobody defined."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], expr)


def complaints(document: Document, metrics: set[str]) -> Iterator[str]:
    """What is wrong with a dashboard. `metrics` are all names that are exposed."""
    variables = {variable["name"]: variable for variable in document["templating"]["list"]}
    if not document.get("uid") or document.get("id") is not None:
        yield "a dashboard has a uid and no id"
    if not any(variable["type"] == "datasource" for variable in variables.values()):
        yield "no variable for the data source"
    ids = [panel.get("id") for panel in document["panels"]]
    if None in ids or len(set(ids)) != len(ids):
        yield "panel ids are missing or not unique"
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        yield from _placed(panel, taken)
    for panel in panels(document):
        for complaint in _panel(panel, {**_BUILT_IN, **dict.fromkeys(variables, "x")}, metrics):
            yield f"{panel.get('title') or '?'}: {complaint}"


def _placed(panel: Document, taken: set[tuple[int, int]]) -> Iterator[str]:
    place = panel["gridPos"]
    if place["x"] + place["w"] > 24:
        yield f"{panel.get('title')}: wider than the grid"
    cells = {
        (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    }
    if cells & taken:
        yield f"{panel.get('title')}: lies on another panel"
    taken |= cells


def _panel(panel: Document, variables: dict[str, str], metrics: set[str]) -> Iterator[str]:
    for field in ("title", "description"):
        if not panel.get(field):
            yield f"no {field}"
    if not panel.get("fieldConfig", {}).get("defaults", {}).get("unit"):
        yield "no unit"
    for target in panel.get("targets") or [{}]:
        expr = target.get("expr", "")
        if not target.get("legendFormat"):
            yield "no legend"
        if target.get("datasource", {}).get("uid") != "${datasource}":
            yield "a hard-wired data source"
        for window in _RANGE_FUNCTIONS.findall(expr):
            if window not in _WINDOWS:
                yield f"a rate over [{window}]"
        try:
            promql_parser.parse(substitute(expr, variables))
        except KeyError as error:
            yield f"an undefined variable {error}"
        except ValueError as error:
            yield f"PromQL: {error}"
        if "histogram_quantile" in expr and not re.search(r"by \([^)]*\ble\b", expr):
            yield "a quantile without le"
        for name in _STOPGUARD_METRIC.findall(expr):
            if re.sub(r"_(bucket|count|sum)$", "", name) not in metrics:
                yield f"{name} is not exposed"
