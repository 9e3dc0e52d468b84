"""What pyproject.toml, constraints.txt and docs/dependencies.md say of the same things."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
REASONS = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").lower()


def names(requirements: list[str]) -> set[str]:
    """Return the normalised distribution names of `requirements`, our own aside."""
    found = {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found} - {"stopguard"}


def test_constraints_are_exact_versions_and_nothing_else() -> None:
    assert [line for line in CONSTRAINTS if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)] == []
    assert len(names(CONSTRAINTS)) == len(CONSTRAINTS)


def test_everything_that_make_installs_is_constrained() -> None:
    extras = PROJECT["optional-dependencies"]
    assert names([*PROJECT["dependencies"], *extras["otel"], *extras["dev"]]) <= names(CONSTRAINTS)


def test_requirements_have_lower_bounds_only() -> None:
    everything = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    bounded = [line.partition(";")[0] for line in everything]
    assert [line for line in bounded if re.search(r"==|<|~=", line)] == []


def test_every_library_and_extra_has_its_reason() -> None:
    wanted = names(PROJECT["dependencies"]) | {f"`{extra}`" for extra in PROJECT["optional-dependencies"]}
    assert [name for name in sorted(wanted) if name not in REASONS] == []


def test_the_console_script_is_the_command_line() -> None:
    assert PROJECT["scripts"] == {"stopguard": "stopguard.cli:main"}
    assert (ROOT / "stopguard" / "py.typed").exists()
