"""`make demo-vllm` on the lightest engine: it is installed, met with a storm, and its books settle; nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_the_demo_of_a_real_engine_settles() -> None:
    entry = "from stopguard.cli import main; main()"
    arguments = ["demo", "--engine", "llamacpp", "--requests", "30", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-c", entry, *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    books = json.loads(done.stdout)
    assert (books["engine"], books["requests"], books["clean"]) == ("llamacpp", 30, True)
    assert books["version"]
    cancels = [row for row in books["endings"] if row["semantics"] == "cancel"]
    assert sum(row["requests"] for row in cancels) >= 8
    assert {row["evidence"] for row in cancels if row["outcome"] == "confirmed"} == {"gauge"}
    assert "serves at http://127.0.0.1:" in done.stderr


def test_a_kind_without_a_recipe_is_one_line() -> None:
    entry = "from stopguard.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", entry, "demo", "--engine", "trtllm"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "there is no recipe for the engine 'trtllm'" in done.stderr.strip().splitlines()[-1]
