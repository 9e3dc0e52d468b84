"""The PromQL that panels and rules share, so that a graph and the alert about it cannot disagree.

`window` is a range: Grafana's `$__rate_interval` in panels, a fixed one in rules. `where` narrows down, as it
stands between braces; `by` are the labels that stay.
"""

from __future__ import annotations

__all__ = ["OWN", "increase", "pick", "quantile", "rate", "ratio", "stopped"]

OWN = 'engine=~"$engine", model=~"$model"'
"""Every dashboard's own choice."""


def pick(metric: str, where: str = OWN) -> str:
    """A selector."""
    return f"{metric}{{{where}}}" if where else metric


def rate(metric: str, *, by: str = "", where: str = OWN, window: str = "$__rate_interval") -> str:
    """How fast a counter grows, a second."""
    return f"sum{_by(by)}(rate({pick(metric, where)}[{window}]))"


def increase(metric: str, *, by: str = "", where: str = OWN, window: str = "$__range") -> str:
    """How much a counter grew within `window`."""
    return f"sum{_by(by)}(increase({pick(metric, where)}[{window}]))"


def quantile(share: float, histogram: str, *, by: str = "", where: str = OWN, window: str = "$__rate_interval") -> str:
    """A quantile of a histogram; nothing where nothing was observed."""
    keep = f"{by}, le" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({keep}) (rate({pick(f'{histogram}_bucket', where)}[{window}])))"


def ratio(part: str, whole: str) -> str:
    """`part` of `whole`, and nothing (not: not a number) where there is no whole."""
    return f"{part} / ({whole} > 0)"


def stopped(where: str = OWN) -> str:
    """Labels of the requests that somebody stopped, in the metric of all that ended."""
    own = 'semantics=~"cancel|fail"'
    return f"{where}, {own}" if where else own


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
