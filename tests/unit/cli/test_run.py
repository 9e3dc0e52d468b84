"""`stopguard run`: what is set for an engine, and that its process is simply the command's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from stopguard.cli import main
from stopguard.cli.run import prepare, recognise_command
from stopguard.engines import LaunchNeeds

NEEDS = LaunchNeeds(
    programs=("anyengine",),
    plugin="stopguard",
    plugin_list_variable="ANY_PLUGINS",
    environment={"ANY_LEVEL": "1"},
    arguments=("--threads=64", "--flag"),
)


def test_what_an_engine_needs_is_added() -> None:
    prepared = prepare(["anyengine", "model"], NEEDS, {}, collector="unix:/s", token="secret")
    assert prepared.words == ("anyengine", "model", "--threads=64", "--flag")
    assert prepared.variables == {
        "ANY_LEVEL": "1",
        "STOPGUARD_COLLECTOR": "unix:/s",
        "STOPGUARD_COLLECTOR_TOKEN": "secret",
    }
    assert "secret" not in "".join(prepared.lines("any"))


def test_what_the_user_has_set_stays() -> None:
    environment = {"ANY_LEVEL": "2", "ANY_PLUGINS": "mine, other"}
    prepared = prepare(["anyengine", "--threads", "8"], NEEDS, environment)
    assert prepared.words == ("anyengine", "--threads", "8", "--flag")
    assert prepared.variables == {"ANY_PLUGINS": "mine,other,stopguard"}
    again = prepare(["anyengine"], NEEDS, {"ANY_PLUGINS": "stopguard,mine"})
    assert "ANY_PLUGINS" not in again.variables


def test_an_empty_list_allows_nobody_and_then_us_alone() -> None:
    assert prepare(["x"], NEEDS, {"ANY_PLUGINS": ""}).variables["ANY_PLUGINS"] == "stopguard"


def test_an_engine_without_a_plugin_has_nobody_inside() -> None:
    prepared = prepare(["x"], LaunchNeeds(), {}, collector="unix:/s", token="t")
    assert prepared.variables == {}
    assert "no plugin" in prepared.notes[0]


def test_a_command_is_recognised_by_its_words() -> None:
    assert recognise_command(["/usr/local/bin/stopguard", "refengine", "serve"]) == "ref"
    assert recognise_command(["sleep", "1"]) == ""


def test_usage_errors_are_one_line() -> None:
    runner = CliRunner()
    unknown = runner.invoke(main, ["run", "--", "sleep", "1"])
    assert unknown.exit_code == 2
    assert "say which engine it is with --engine KIND" in unknown.output
    missing = runner.invoke(main, ["run", "--engine", "ref", "--", "no-such-program-anywhere"])
    assert missing.exit_code == 2
    assert "there is no program 'no-such-program-anywhere'" in missing.output
    assert runner.invoke(main, ["run", "--engine", "rof", "--", "x"]).output.count("did you mean ref?") == 1
    token = runner.invoke(main, ["run", "--engine", "ref", "--collector-token-file", "/nowhere/token", "--", "true"])
    assert "cannot be read" in token.output


def test_a_dry_run_does_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    result = CliRunner().invoke(main, ["run", "--engine", "ref", "--dry-run", "--", "touch", str(mark)])
    assert result.exit_code == 0
    assert f"stopguard run: ref: touch {mark}" in result.output
    assert not mark.exists()


# ---- as a process -----------------------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def run(program: str, started: list[subprocess.Popen[str]], **environment: str) -> subprocess.Popen[str]:
    entry = "from stopguard.cli import main; main()"
    command = [sys.executable, "-c", entry, "run", "--engine", "ref", "--", sys.executable, "-u", "-c", program]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STOPGUARD_")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**inherited, **environment}
    )
    started.append(process)
    return process


def test_the_exit_code_is_the_commands(started: list[subprocess.Popen[str]]) -> None:
    assert run("raise SystemExit(37)", started).wait(60) == 37


def test_it_is_the_command_and_gets_its_signals(started: list[subprocess.Popen[str]]) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    process = run(program, started)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 5
    killed = run("import signal\nprint(1, flush=True)\nsignal.pause()", started)
    assert killed.stdout is not None
    killed.stdout.readline()
    killed.send_signal(signal.SIGINT)
    assert killed.wait(60) in (1, -signal.SIGINT)
