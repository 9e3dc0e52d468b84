"""Kinds of engine come from the registry: the built-in one, and what installed packages offer."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from stopguard.engines import OpenAIEngine
from stopguard.engines.registry import GROUP, create, kinds
from stopguard.errors import ConfigurationError


class Special(OpenAIEngine):
    pass


class Broken:
    def __init__(self, name: str, base_url: str, **options: object) -> None:
        raise RuntimeError("half installed")


class NoEngine:
    def __init__(self, name: str, base_url: str, **options: object) -> None:
        self.name = name


def offered(name: str, attribute: str) -> EntryPoint:
    return EntryPoint(name=name, value=f"{__name__}:{attribute}", group=GROUP)


ADAPTERS = [
    offered("special", "Special"),
    offered("broken", "Broken"),
    offered("no-engine", "NoEngine"),
    EntryPoint(name="absent", value="package_that_nobody_has.adapter:Engine", group=GROUP),
    offered("openai", "NoEngine"),
]


def test_the_built_in_kind_comes_first_and_cannot_be_replaced() -> None:
    assert kinds(ADAPTERS) == ("openai", "absent", "broken", "no-engine", "special")
    assert type(create("openai", "a", "http://127.0.0.1:1", adapters=ADAPTERS)) is OpenAIEngine


def test_an_adapter_makes_its_engine() -> None:
    engine = create("special", "a", "http://127.0.0.1:1/", adapters=ADAPTERS)
    assert type(engine).__name__ == "Special"
    assert (engine.name, engine.base_url) == ("a", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("spezial", r"engine a: there is no adapter called 'spezial' here .*; did you mean special\?"),
        ("broken", r"engine a: the adapter broken .* cannot be used: RuntimeError: half installed"),
        ("absent", r"engine a: the adapter absent .* cannot be used: ModuleNotFoundError"),
        ("no-engine", r"engine a: the adapter no-engine .* does not make an engine"),
    ],
)
def test_what_cannot_be_used_is_one_line(kind: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create(kind, "a", "http://127.0.0.1:1", adapters=ADAPTERS)


def test_a_url_that_is_none_stays_the_engines_own_complaint() -> None:
    with pytest.raises(ConfigurationError, match="is not a base URL"):
        create("special", "a", "nonsense", adapters=ADAPTERS)
