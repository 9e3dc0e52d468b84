"""The study's rows as pictures: small SVG files, written by hand, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from stopguard.preemption import POLICIES
from stopguard.testing.preemption_study import Row

__all__ = ["bars_of_first_tokens", "cost_and_gain"]

_WIDTH = 760
_LABEL = 170
_ROW = 26
_LABEL_APART = 13.0
_STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#333}.h{font-weight:600;font-size:14px}.g{stroke:#8884}"
    ".a{fill:#4c78a8}.b{fill:#f58518}.m{fill:#54a24b}"
    "@media (prefers-color-scheme:dark){text{fill:#ddd}}</style>"
)


def bars_of_first_tokens(rows: Sequence[Row], load: str) -> str:
    """Each arm's time to the first token of urgent requests, p50 and p99, on a logarithmic scale."""
    mine = [row for row in rows if row.load == load]
    longest = max(row.urgent_first_seconds_p99 for row in mine) * 1000
    low, high = 10.0, 10.0 ** math.ceil(math.log10(max(longest, 100.0)))
    top, height = 58, 58 + _ROW * len(mine) + 34

    def x_of(milliseconds: float) -> float:
        share = math.log10(max(milliseconds, low) / low) / math.log10(high / low)
        return _LABEL + share * (_WIDTH - _LABEL - 70)

    parts = [_head(height, f"{load}: time to the first token of urgent requests")]
    tick = low
    while tick <= high:
        x = x_of(tick)
        parts.append(f'<line class="g" x1="{x:.1f}" y1="{top - 8}" x2="{x:.1f}" y2="{height - 26}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{_duration(tick)}</text>')
        tick *= 10
    parts.append(
        f'<rect class="a" x="{_LABEL}" y="34" width="12" height="10"/><text x="{_LABEL + 16}" y="43">p50</text>'
    )
    parts.append(
        f'<rect class="b" x="{_LABEL + 60}" y="34" width="12" height="10"/><text x="{_LABEL + 76}" y="43">p99</text>'
    )
    for number, row in enumerate(mine):
        y = top + number * _ROW
        parts.append(f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(row.arm)}</text>')
        for style, seconds, offset in (
            ("a", row.urgent_first_seconds_p50, 0),
            ("b", row.urgent_first_seconds_p99, 10),
        ):
            end = x_of(seconds * 1000)
            parts.append(
                f'<rect class="{style}" x="{_LABEL}" y="{y + offset}" width="{max(1.0, end - _LABEL):.1f}" height="9"/>'
            )
        half, nearly_all = row.urgent_first_seconds_p50 * 1000, row.urgent_first_seconds_p99 * 1000
        words = f"{_duration(half)} / {_duration(nearly_all)}"
        parts.append(f'<text x="{x_of(nearly_all) + 6:.1f}" y="{y + 14}">{words}</text>')
    return "".join([*parts, "</svg>\n"])


def cost_and_gain(rows: Sequence[Row], loads: Sequence[str]) -> str:
    """Of each victim policy: what it recomputes (across) and the urgent p99 that it gives (up), over `loads`."""
    names = [row.arm for row in rows if row.load == loads[0] and row.arm in POLICIES]
    points = []
    for name in names:
        mine = [row for row in rows if row.arm == name and row.load in loads]
        points.append(
            (
                name,
                sum(row.recomputed_tokens for row in mine) / sum(row.runs for row in mine),
                sum(row.urgent_first_seconds_p99 for row in mine) * 1000 / len(mine),
            )
        )
    height, left, bottom = 380, 70, 330
    across = max((x for _, x, _ in points), default=0.0) * 1.15 or 1.0
    up = max((y for _, _, y in points), default=0.0) * 1.15 or 1.0
    parts = [_head(height, "Cost and gain of the victim policies, mean over " + ", ".join(loads))]
    for step in range(5):
        x, y = left + step / 4 * (_WIDTH - left - 160), bottom - step / 4 * (bottom - 50)
        parts.append(f'<line class="g" x1="{x:.1f}" y1="50" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<line class="g" x1="{left}" y1="{y:.1f}" x2="{_WIDTH - 160}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{across * step / 4:.0f}</text>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_duration(up * step / 4)}</text>')
    parts.append(f'<text x="{left}" y="{bottom + 36}">tokens recomputed a run (less is better)</text>')
    parts.append(f'<text x="{left}" y="42">urgent p99 (less is better)</text>')
    label_below = -_LABEL_APART
    for name, x_value, y_value in sorted(points, key=lambda point: -point[2]):
        x = left + x_value / across * (_WIDTH - left - 160)
        y = bottom - y_value / up * (bottom - 50)
        parts.append(f'<circle class="m" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        label_below = max(y + 4, label_below + _LABEL_APART)
        parts.append(f'<text x="{x + 8:.1f}" y="{label_below:.1f}">{escape(name)}</text>')
    return "".join([*parts, "</svg>\n"])


def _head(height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">{_STYLE}<text class="h" x="12" y="22">{escape(title)}</text>'
    )


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.3g} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"
