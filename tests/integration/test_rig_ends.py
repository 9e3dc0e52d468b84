"""How an engine is started and ended: nobody else in its place, and not without whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from stopguard.listening import open_listener
from stopguard.testing import rig

STARTS_AN_ENGINE = """
import sys
from stopguard.testing import rig

class FileServer:
    kind, version, ingredients = "files", "1", ()
    def install(self, home, say):
        pass
    def launch(self, home, port, arguments, options):
        serve = f"{sys.executable} -m http.server {port} --bind 127.0.0.1"
        command = ("/bin/sh", "-c", f"trap 'kill $!' TERM; {serve} & wait")
        return rig.Launch(command=command, model="", ready_path="/", ready_seconds=30.0)

with rig.start(FileServer()) as engine:
    print(*[process.pid for process in engine.processes()], flush=True)
    sys.stdin.read()
"""


class Never:
    """An engine that is not started at all."""

    kind, version = "never", "1"
    ingredients: tuple[Path, ...] = ()

    def install(self, home: Path, say: rig.Say) -> None:
        """Nothing is needed."""

    def launch(self, home: Path, port: int, arguments: Sequence[str], options: Mapping[str, Any]) -> rig.Launch:
        raise AssertionError("launched")


def test_nobody_answers_in_an_engines_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOPGUARD_ENGINES", str(tmp_path))
    with open_listener("127.0.0.1", 0) as other:
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(rig.RigError, match=f"port {port}: somebody else"), rig.start(Never(), port=port):
            pass


def test_sigterm_ends_the_engine(tmp_path: Path) -> None:
    script = tmp_path / "starts_an_engine.py"
    script.write_text(STARTS_AN_ENGINE)
    environment = {**os.environ, "STOPGUARD_ENGINES": str(tmp_path)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        engine = [int(number) for number in starter.stdout.readline().split()]
        assert len(engine) >= 2
        starter.send_signal(signal.SIGTERM)
        _, said = starter.communicate(timeout=60.0)
        assert starter.returncode == 128 + signal.SIGTERM, said
    assert not [pid for pid in engine if psutil.pid_exists(pid)]
    assert "files ended" in said
    assert "Traceback" not in said
