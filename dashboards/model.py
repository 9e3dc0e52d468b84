"""A small generator of Grafana dashboards: panels as values, laid out in rows, written as JSON.

It knows two kinds of panels, `timeseries` and `stat`, because these can be drawn without a Grafana server by
Grafana's own published components, so that every panel can be looked at before it is released. Everything that
a panel should have (unit, description, a data source variable, an id) has no default here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

__all__ = ["DATASOURCE", "Dashboard", "Panel", "Query", "Row", "Threshold", "Variable", "to_json"]

SCHEMA_VERSION = 42
GRID_COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAGS = ["stopguard"]

GREEN, YELLOW, RED, BLUE, GREY = "green", "yellow", "red", "blue", "#8e8e8e"


class Query(msgspec.Struct, frozen=True):
    """One expression and how its series are called; ``{{label}}`` in `legend` is replaced."""

    expr: str
    legend: str


class Threshold(msgspec.Struct, frozen=True):
    """From `value` on (`None`: from the beginning) the colour is `colour`."""

    value: float | None
    colour: str


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One panel. `unit` is one of Grafana's; `colours` fixes the colour of series by name."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    height: int = 7
    decimals: int | None = None
    stack: bool = False
    minimum: float | None = 0
    maximum: float | None = None
    thresholds: tuple[Threshold, ...] = (Threshold(None, BLUE),)
    colours: tuple[tuple[str, str], ...] = ()
    no_value: str = ""


class Row(msgspec.Struct, frozen=True):
    """A heading and the panels under it, left to right, as many in a line as fit."""

    title: str
    panels: tuple[Panel, ...]


class Variable(msgspec.Struct, frozen=True):
    """A choice of values of `label`, as found at `metric`."""

    name: str
    label: str
    metric: str


class Dashboard(msgspec.Struct, frozen=True, kw_only=True):
    """One dashboard. `uid` is its address and never changes."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...]


def to_json(dashboard: Dashboard, siblings: Sequence[Dashboard]) -> str:
    """The dashboard as Grafana imports it, with links to its siblings."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": TAGS,
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "id": None,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "fiscalYearStartMonth": 0,
        "annotations": {"list": [_alerts()]},
        "links": [_link(each) for each in siblings if each.uid != dashboard.uid],
        "templating": {"list": [_datasource(), *(_variable(each) for each in dashboard.variables)]},
        "panels": _panels(dashboard.rows),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _panels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": GRID_COLUMNS, "h": 1},
                "panels": [],
            }
        )
        top += 1
        left = line_height = 0
        for panel in row.panels:
            if left + panel.width > GRID_COLUMNS:
                top, left, line_height = top + line_height, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            panels.append(_panel(panel, len(panels) + 1, place))
            left += panel.width
            line_height = max(line_height, panel.height)
        top += line_height
    return panels


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": step.value, "color": step.colour} for step in panel.thresholds],
        },
        "mappings": [],
        "custom": _lines(panel) if panel.kind == "timeseries" else {},
    }
    limits = (("decimals", panel.decimals), ("min", panel.minimum), ("max", panel.maximum))
    defaults |= {name: value for name, value in limits if value is not None}
    if panel.no_value:
        defaults["noValue"] = panel.no_value
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": [_colour(*each) for each in panel.colours]},
        "options": _stat_options() if panel.kind == "stat" else _timeseries_options(),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _lines(panel: Panel) -> dict[str, Any]:
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "lineInterpolation": "linear",
        "fillOpacity": 35 if panel.stack else 0,
        "gradientMode": "none",
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stack else "none", "group": "A"},
        "axisPlacement": "auto",
        "scaleDistribution": {"type": "linear"},
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
    }


def _timeseries_options() -> dict[str, Any]:
    return {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _stat_options() -> dict[str, Any]:
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "auto",
        "textMode": "auto",
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }


def _colour(series: str, colour: str) -> dict[str, Any]:
    return {
        "matcher": {"id": "byName", "options": series},
        "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
        "refresh": 1,
        "regex": "",
        "multi": False,
        "includeAll": False,
        "options": [],
    }


def _variable(variable: Variable) -> dict[str, Any]:
    expr = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.label.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": expr, "refId": "Variable"},
        "hide": 0,
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def _alerts() -> dict[str, Any]:
    """The alerts of the rules beside these dashboards, drawn over every panel while they fire."""
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": RED,
        "expr": 'ALERTS{alertname=~"StopGuard.+", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{engine}}",
        "step": "15s",
    }


def _link(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "title": dashboard.title,
        "type": "link",
        "url": f"/d/{dashboard.uid}",
        "icon": "dashboard",
        "tooltip": dashboard.description,
        "tags": [],
        "asDropdown": False,
        "targetBlank": False,
        "includeVars": True,
        "keepTime": True,
    }
