"""Writes docs/states.md from the transition tables, so that the pictures cannot drift from the code.

Run by `make docs`; `tests/unit/stops/test_state_diagrams.py` fails when the page is not what this writes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from stopguard.stops.machine import (
    BOOKS_TABLE,
    CLIENT_ENDED,
    CLIENT_TABLE,
    ENGINE_ENDED,
    ENGINE_TABLE,
    JOINT_RULES,
    OWES_ABORT,
    Books,
    Client,
    Engine,
)

State = TypeVar("State", bound=enum.IntEnum)
Event = TypeVar("Event", bound=enum.IntEnum)

PAGE = Path(__file__).with_name("states.md")

HEAD = """\
# The states of a request

<!-- Written by docs/generate_state_diagrams.py from stopguard/stops/machine.py: change the tables, `make docs`. -->

A request has three small machines: what its client wants, what we may believe of its engine, and whether its books
are closed. [stops.md](stops.md) tells the story; this page is the tables themselves. An event that is not in the
table of a state is illegal there: it raises `IllegalTransition` and changes nothing. Events that change nothing (what
an engine may still say when all is over) are listed under each picture.
"""


def words(name: str) -> str:
    return name.lower().replace("_", " ")


def diagram(table: Mapping[State, Mapping[Event, State]], first: State, ended: Iterable[State]) -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    for state, row in table.items():
        moves: dict[State, list[str]] = {}
        for event, target in row.items():
            if target is not state:
                moves.setdefault(target, []).append(words(event.name))
        lines += [f"    {state.name} --> {target.name}: {' / '.join(events)}" for target, events in moves.items()]
    lines += [f"    {state.name} --> [*]" for state in sorted(ended)]
    return [*lines, "```", ""]


def quiet(table: Mapping[State, Mapping[Event, State]]) -> list[str]:
    lines = ["| state | events that change nothing |", "|---|---|"]
    for state, row in table.items():
        events = [words(event.name) for event, target in row.items() if target is state]
        lines.append(f"| {state.name} | {', '.join(events) or 'none'} |")
    return [*lines, ""]


def joint_rules() -> list[str]:
    lines = [
        "| when the client is | and the engine is | then the client becomes | and the engine |",
        "|---|---|---|---|",
    ]
    for (client, engine), (client_after, engine_after) in JOINT_RULES.items():
        same = "stays"
        lines.append(
            f"| {client.name} | {engine.name} | {same if client_after is client else client_after.name} | "
            f"{same if engine_after is engine else engine_after.name} |"
        )
    return [*lines, ""]


def owed_aborts() -> list[str]:
    head = [engine.name for engine in Engine]
    lines = ["| client \\ engine | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for client in Client:
        cells = ["**abort**" if (client, engine) in OWES_ABORT else "" for engine in Engine]
        lines.append(f"| {client.name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def page() -> str:
    """The whole page."""
    books_ended = [state for state, row in BOOKS_TABLE.items() if not row]
    lines = [
        *(HEAD, "## The client", ""),
        *diagram(CLIENT_TABLE, Client.LISTENING, CLIENT_ENDED),
        *quiet(CLIENT_TABLE),
        *("`served` needs one thing more than the table says: the engine must be FINISHED.", ""),
        *("## The engine", ""),
        *diagram(ENGINE_TABLE, Engine.UNDISPATCHED, ENGINE_ENDED),
        *quiet(ENGINE_TABLE),
        *("## The books", ""),
        *diagram(BOOKS_TABLE, Books.OPEN, books_ended),
        *quiet(BOOKS_TABLE),
        "`closed` needs one thing more than the table says: client and engine must both have ended. And the books go",
        *("from OPEN to SETTLING by themselves when the client's side ends.", ""),
        *("## Joint rules", ""),
        *("After each event these are applied until none fires.", ""),
        *joint_rules(),
        *("## Who owes an abort", ""),
        "In these joint states the engine works for nobody: whoever drives the machine must send an abort, and say so.",
        "",
        *owed_aborts(),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
