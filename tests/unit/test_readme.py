"""The README's two commands, the Makefile and continuous integration say the same; links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGETS = [
    *("help", "demo", "demo-vllm", "demo-engine", "engines", "test", "check", "format", "bench", "compiled", "docs"),
    *("constraints", "clean", "distclean"),
]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "adapters" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def two_commands() -> list[str]:
    """Return the commands of the README's block, without their comments."""
    block = re.search(r"^## Two commands\n+```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert block, "README.md has no fenced block under 'Two commands'"
    return [line.partition("#")[0].strip() for line in block.group(1).splitlines()]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run `command` in the repository, as a shell that is no child of make would."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=30)


def test_the_two_commands_are_these() -> None:
    assert two_commands() == ["make demo", "make test"]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    result = run(".ci/run", "--print")
    assert (result.stdout, result.stderr) == (two_commands()[1] + "\n", "")


def test_ci_follows_the_readme(tmp_path: Path) -> None:
    """Another command in the README is another command in CI, and none is an error."""
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "README.md").write_text(README.replace("\nmake test ", "\nmake test PYTEST_ARGS=-x "))
    assert run(str(script), "--print").stdout == "make test PYTEST_ARGS=-x\n"
    (tmp_path / "README.md").write_text(README.replace("## Two commands", "## Commands"))
    result = run(str(script), "--print")
    assert result.returncode == 1
    assert "prints no test command" in result.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target: str) -> None:
    result = run("make", "-n", target)
    assert result.returncode == 0, result.stderr


def test_make_alone_prints_the_targets() -> None:
    result = run("make")
    assert re.findall(r"^make ([\w-]+)", result.stdout, re.MULTILINE) == TARGETS


def test_an_old_python_is_one_clear_line(tmp_path: Path) -> None:
    """The version is checked before anything is made."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    for interpreter, why in [(str(old), "is older"), ("no-such-python", "was not found")]:
        result = run("make", "-C", str(tmp_path), "check", f"PYTHON={interpreter}")
        assert result.returncode != 0
        message = [line for line in result.stderr.splitlines() if not line.startswith("make")]
        assert len(message) == 1
        assert message[0].startswith("StopGuard needs Python 3.11 or newer")
        assert why in message[0]
        assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    local = [target.partition("#")[0] for target in targets if not re.match(r"\w+:", target)]
    missing = [target for target in local if target and not (page.parent / target).exists()]
    assert missing == []


def test_every_page_of_the_docs_is_on_the_map() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []
