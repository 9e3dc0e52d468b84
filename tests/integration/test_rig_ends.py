"""Whoever starts an engine and is ended by SIGTERM ends the engine too, with all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

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
