from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from stopguard.stops.machine import ENGINE_TABLE, Engine, EngineEvent

SCRIPT = Path(__file__).resolve().parents[3] / "docs" / "generate_state_diagrams.py"


@pytest.fixture
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_state_diagrams", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tables_say(generator: ModuleType) -> None:
    committed = SCRIPT.with_name("states.md").read_text(encoding="utf-8")
    assert committed == generator.page(), "docs/states.md is out of date: run `make docs`"


def test_a_changed_table_is_another_page(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = generator.page()
    row = {**ENGINE_TABLE[Engine.PARKED], EngineEvent.SHELVED: Engine.SHELVED}
    monkeypatch.setitem(ENGINE_TABLE, Engine.PARKED, row)
    assert generator.page() != before


def test_every_state_and_event_is_on_it(generator: ModuleType) -> None:
    page = generator.page()
    assert all(state.name in page for state in Engine)
    assert all(event.name.lower().replace("_", " ") in page for event in EngineEvent)
    assert page.count("```mermaid\nstateDiagram-v2\n") == 3
