"""`auto` engines become engines of a kind before anything listens."""

from __future__ import annotations

import pytest

from stopguard.cli import assembly, identifying
from stopguard.cli.identifying import identified, unknown_engines
from stopguard.config import Configuration
from stopguard.errors import EngineError
from stopguard.refengine import EngineConfig, ReferenceEngine
from stopguard.refengine.http_face import Face, FaceOptions
from stopguard.refengine.http_server import serving

pytestmark = pytest.mark.anyio


def configuration(**engines: dict[str, str]) -> Configuration:
    return Configuration.model_validate({"engines": engines, "identify_seconds": 0.2})


def face() -> Face:
    return Face(ReferenceEngine(EngineConfig(blocks=64), "vllm"), options=FaceOptions())


async def test_what_is_found_stands_in_the_configuration() -> None:
    lines: list[str] = []
    async with serving(face()) as url, serving(face()) as other:
        found = await identified(
            configuration(
                auto={"kind": "auto", "url": url},
                mine={"kind": "auto", "url": other + "/v1"},
                ref={"kind": "openai", "url": url},
            ),
            {},
            lines.append,
        )
    assert {name: entry.kind for name, entry in found.engines.items()} == {
        "ref-2": "ref",
        "mine": "ref",
        "ref": "openai",
    }
    assert sorted(lines)[0] == f"engine auto at {url} is ref"
    assert [type(engine).__name__ for engine, _ in assembly.engines(found, {})] == [
        *("ReferenceEngineAdapter", "ReferenceEngineAdapter", "OpenAIEngine")
    ]


async def test_nobody_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identifying, "_PAUSE_SECONDS", 0.01)
    lines: list[str] = []
    with pytest.raises(EngineError, match=r"engine auto at http://127.0.0.1:1 does not answer: start it first"):
        await identified(configuration(auto={"kind": "auto", "url": "http://127.0.0.1:1"}), {}, lines.append)
    assert lines == ["engine auto at http://127.0.0.1:1 does not say what it is yet: waiting for it"]


async def test_without_auto_nobody_is_asked() -> None:
    given = configuration(a={"kind": "openai", "url": "http://127.0.0.1:1"})
    assert await identified(given, {}, print) is given
    assert unknown_engines(given) == []


def test_a_check_asks_nobody() -> None:
    ((engine, _),) = assembly.engines(configuration(auto={"kind": "auto", "url": "http://127.0.0.1:1"}), {})
    assert engine.profile.best_evidence.label == "sent"
