"""`stopguard explain --resume`: which requests can be cut and continued at the gateway, engine by engine.

The table is the code that decides (`stopguard.preemption.exactness`), with what each installed adapter does better.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from stopguard.engines.resumption import Resumption

__all__ = ["document", "print_table"]

WORDS = ("never", "approximate", "exact")


def adapters() -> dict[str, Resumption]:
    """The installed adapters that can be resumed at, by their kind. One that cannot be loaded is left out."""
    from stopguard.engines.registry import GROUP
    from stopguard.engines.resumption import Resumption

    found: dict[str, Resumption] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            adapter = point.load()
            resumption = getattr(adapter, "resumption", None)
            if resumption is None:
                # Set for each instance: any address will do, nothing is sent.
                resumption = getattr(adapter(point.name, "http://127.0.0.1:1"), "resumption", None)
        except Exception as error:
            click.echo(f"the adapter {point.name} cannot be loaded: {error}", err=True)
            continue
        if isinstance(resumption, Resumption):
            found[point.name] = resumption
    return found


def document() -> dict[str, Any]:
    """The table for programs."""
    from stopguard.preemption.exactness import TABLE, verdict_of

    engines = adapters()
    rows = [
        {
            "feature": row.feature.value,
            "exactness": WORDS[row.exactness],
            "why": row.why,
            "engines": {name: WORDS[verdict_of(row.feature, resumption)] for name, resumption in engines.items()},
        }
        for row in TABLE
    ]
    return {"resume": rows, "consent_header": "X-StopGuard-Resume: approximate"}


def print_table(console: Any, make_table: Any, say: Any) -> None:
    """The table for people; the three helpers are those of `explain`."""
    from rich.text import Text

    engines = adapters()
    rows = document()["resume"]
    table = make_table(console, ("a request with", ""), *((name, "") for name in engines), ("because", "wrap"))
    styles = dict(zip(WORDS, ("red", "yellow", "green"), strict=True))
    for row in rows:
        cells = [Text(row["engines"][name], style=styles[row["engines"][name]]) for name in engines]
        table.add_row(row["feature"], *cells, row["why"])
    console.print(table)
    say(console, Text("A request is as good as the worst of its rows; what is approximate needs the client's consent,"))
    say(console, Text("by the header X-StopGuard-Resume: approximate. See docs/resume.md."))
