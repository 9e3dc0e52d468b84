"""The examples do what they say: snippets run as printed against a gateway, manifests start what they mean to start."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from stopguard.config import load
from tests.integration.serving import COMMAND, ROOT, Gateway, engine, gateway

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = ROOT / "examples"
PRINTED_ADDRESS = "127.0.0.1:8080"
RUNNERS = {".py": sys.executable, ".sh": "sh", ".mjs": "node"}


@pytest.fixture(scope="module")
def server() -> Iterator[Gateway]:
    with engine("--step-seconds", "0.02") as url, gateway(url) as started:
        yield started


def run_example(name: str, server: Gateway, folder: Path) -> str:
    """Run examples/clients/NAME with the test's address in the place of the printed one; returns what it printed."""
    text = (EXAMPLES / "clients" / name).read_text(encoding="utf-8")
    assert PRINTED_ADDRESS in text
    copy = folder / name
    copy.write_text(text.replace(PRINTED_ADDRESS, server.url.removeprefix("http://")), encoding="utf-8")
    runner = RUNNERS[copy.suffix]
    if shutil.which(runner) is None:
        pytest.skip(f"{runner} is not installed")
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    result = subprocess.run(
        [runner, str(copy)], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def newest_stop(server: Gateway) -> dict[str, object]:
    """The stop that ended last, by the admin port."""
    with httpx.Client(trust_env=False) as client:
        page = client.get(f"{server.admin}/stops", params={"limit": 1}).json()
    assert page["in_progress"] == []
    stop: dict[str, object] = page["ended"][0]["stop"]
    return stop


@pytest.mark.parametrize(
    "name", ["cancel_by_closing.py", "cancel_by_closing_async.py", "cancel_by_closing.sh", "cancel.mjs"]
)
def test_leaving_is_a_stop(name: str, server: Gateway, tmp_path: Path) -> None:
    before = stops_ended(server)
    printed = run_example(name, server, tmp_path)
    assert re.search(r"left the stream|gave up, and the engine stopped", printed)
    assert stops_ended(server) == before + 1
    stop = newest_stop(server)
    assert (stop["semantics"], stop["source"]) == ("cancel", "client")


@pytest.mark.parametrize("name", ["cancel_by_api.py", "cancel_by_api.sh"])
def test_the_cancel_api_stops_and_says_how_surely(name: str, server: Gateway, tmp_path: Path) -> None:
    before = stops_ended(server)
    printed = run_example(name, server, tmp_path)
    assert "evidence" in printed
    assert re.search(r'finish_reason"?[: ]"?abort', printed)
    assert stops_ended(server) == before + 1
    stop = newest_stop(server)
    assert (stop["semantics"], stop["source"]) == ("cancel", "api")


def stops_ended(server: Gateway) -> int:
    with httpx.Client(trust_env=False) as client:
        return len(client.get(f"{server.admin}/stops", params={"limit": 500}).json()["ended"])


# ---- manifests ---------------------------------------------------------------------------------------------------


def check(*arguments: str) -> None:
    """`stopguard serve ARGUMENTS --check` is content."""
    result = subprocess.run(
        [*COMMAND, "serve", *arguments, "--check"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_the_gateways_manifest_has_a_configuration_that_is_read(tmp_path: Path) -> None:
    text = (EXAMPLES / "kubernetes" / "gateway.yaml").read_text(encoding="utf-8")
    block = re.search(r"stopguard\.toml: \|\n((?:    .*\n|\n)+)", text)
    assert block
    file = tmp_path / "stopguard.toml"
    file.write_text("\n".join(line.removeprefix("    ") for line in block[1].splitlines()))
    configuration = load(file=file).configuration
    assert len(configuration.engines) == 2
    patience = configuration.timeouts.drain_seconds + configuration.stops.settle_seconds
    assert grace_seconds(text) > patience + 5


def test_the_sidecars_arguments_are_understood(tmp_path: Path) -> None:
    text = (EXAMPLES / "kubernetes" / "sidecar.yaml").read_text(encoding="utf-8")
    block = re.search(r"args:\n((?: +- .*\n)+)", text)
    assert block
    arguments = [line.strip().removeprefix("- ") for line in block[1].splitlines()]
    assert arguments[0] == "serve"
    check(*[argument.replace("/var/lib/stopguard", str(tmp_path)) for argument in arguments[1:]])


def test_the_compose_files_environment_is_understood(tmp_path: Path) -> None:
    text = (EXAMPLES / "compose.yaml").read_text(encoding="utf-8")
    environment = dict(re.findall(r'^      (STOPGUARD_\w+): "(.*)"$', text, re.MULTILINE))
    assert len(environment) == 6
    loaded = load(environment=environment)
    assert loaded.warnings == ()
    assert loaded.configuration.engines["engine"].url == "http://engine:8000"
    patience = loaded.configuration.timeouts.drain_seconds + loaded.configuration.stops.settle_seconds
    match = re.search(r"stop_grace_period: (\d+)s\n    #", text) or re.search(r"stop_grace_period: (5\d)s", text)
    assert match
    assert int(match[1]) > patience


def test_the_unit_gives_a_stop_the_time_that_it_may_take() -> None:
    text = (EXAMPLES / "stopguard.service").read_text(encoding="utf-8")
    environment = dict(line.split("=", 1) for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE))
    loaded = load(file=EXAMPLES / "stopguard.toml", environment=environment)
    assert loaded.warnings == ()
    match = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert match
    assert int(match[1]) > loaded.configuration.timeouts.drain_seconds + loaded.configuration.stops.settle_seconds


def test_what_the_manifests_run_exists() -> None:
    for name in ("compose.yaml", "kubernetes/gateway.yaml", "kubernetes/sidecar.yaml"):
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        assert set(re.findall(r"image: (.*)", text)) == {"stopguard:latest"}
        for found in re.findall(r'(?:command|args): (\["refengine".*\])', text):
            arguments = json.loads(found)
            result = subprocess.run(
                [*COMMAND, *arguments[:2], "--help"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
            )
            assert all(option in result.stdout for option in arguments[2:] if option.startswith("--"))


def grace_seconds(text: str) -> int:
    match = re.search(r"terminationGracePeriodSeconds: (\d+)", text)
    assert match
    return int(match[1])


def test_the_table_of_examples_is_complete() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)]+)\)", page))
    there = {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*")
        if path.is_file()
        and path.name not in {"README.md", "Dockerfile.dockerignore"}
        and "__pycache__" not in path.parts
    }
    assert linked == there
