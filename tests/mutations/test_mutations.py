"""Each rule's test fails when the rule's code is removed: tried, for every mutation in `mutations.py`.

`python -m pytest tests/mutations` copies the package and the tests of the rules aside, applies one mutation at a
time to the copy, runs the tests of its rule in a process of their own, and expects them to fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutations.mutations import MUTATIONS, RULES, Mutation

ROOT = Path(__file__).resolve().parents[2]
TEST_FAILED = 1  # pytest's exit status: tests were run and some failed
COPIED = ("pyproject.toml", "tests/unit/ledger/complete_state.py", "tests/unit/stops/scene.py", RULES)

CLASS_OF_RULE = {
    int(match[2]): match[1]
    for match in re.finditer(r"^class (TestRule(\d+)\w+)", (ROOT / RULES).read_text(encoding="utf-8"), re.MULTILINE)
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and the tests of the rules, apart from the checkout."""
    target = tmp_path_factory.mktemp("mutant")
    for part in ("__init__.py", "errors.py"):
        (target / "stopguard").mkdir(exist_ok=True)
        shutil.copy(ROOT / "stopguard" / part, target / "stopguard" / part)
    for part in ("ledger", "stops", "probe"):
        shutil.copytree(ROOT / "stopguard" / part, target / "stopguard" / part, ignore=shutil.ignore_patterns("*.pyc"))
    for name in COPIED:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    return target


def run(copy: Path, *selected: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        # Our own pytest plugin is registered with the environment, and is no part of the copy.
        [
            sys.executable,
            "-m",
            "pytest",
            *selected,
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:stopguard.testing.pytest_plugin",
        ],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def mutated(copy: Path, mutation: Mutation) -> Iterator[Path]:
    file = copy / "stopguard" / mutation.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: {mutation.what!r} no longer fits it"
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    yield copy
    file.write_text(text, encoding="utf-8")


def test_the_copy_is_what_runs_and_passes(copy: Path) -> None:
    where = subprocess.run(
        [sys.executable, "-c", "import stopguard; print(stopguard.__file__)"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.strip() == str(copy / "stopguard" / "__init__.py")
    result = run(copy, RULES)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"rule {one.rule}, {one.what}")
def test_the_rules_test_fails(mutated: Path, mutation: Mutation) -> None:
    result = run(mutated, f"{RULES}::{CLASS_OF_RULE[mutation.rule]}")
    assert result.returncode == TEST_FAILED, f"{mutation.what}: nobody noticed\n{result.stdout}"
    assert "failed" in result.stdout


def test_every_rule_has_a_mutation() -> None:
    assert {mutation.rule for mutation in MUTATIONS} == set(range(1, 13))
