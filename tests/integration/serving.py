"""Run `stopguard serve` and the reference engine as processes of their own, and wait for what they say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Server", "chat", "engine", "gateway", "start"]

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from stopguard.cli import main; main()"]
SECONDS = 30.0


class Server:
    """One process. `lines` are what it has said on stderr so far."""

    def __init__(self, process: subprocess.Popen[str], stream: IO[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._stream = stream

    def event(self, name: str) -> dict[str, Any]:
        """The next event called `name`. Blocks until it is said; pytest's own timeout bounds that."""
        for line in self._stream:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("{"):
                document: dict[str, Any] = json.loads(line)
                if document["event"] == name:
                    return document
        raise AssertionError(f"it ended without saying {name!r}:\n" + "\n".join(self.lines))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code. What it still says is read first, so that it cannot block on a full pipe."""
        self.lines += self._stream.read().splitlines()
        return self.process.wait(SECONDS)


class Gateway(Server):
    """A gateway that is ready: where it listens."""

    def __init__(self, process: subprocess.Popen[str], stream: IO[str]) -> None:
        super().__init__(process, stream)
        ready = self.event("ready")
        self.ready = ready
        self.url: str = ready["listen"][0]
        self.admin: str = ready["admin"]


def start(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `stopguard ARGUMENTS…` without anything of ours in its environment but `environment`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STOPGUARD_")}
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={**inherited, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens, the process is gone afterwards and its pipes are closed."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(SECONDS)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def engine(*arguments: str) -> Iterator[str]:
    """A reference engine; yields its URL."""
    process = start("refengine", "serve", "--port", "0", *arguments)
    with ended(process):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("refengine ready: "), line
        yield line.split()[2]


@contextlib.contextmanager
def gateway(engine_url: str, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[Gateway]:
    """A gateway in front of `engine_url`, on ports that the system chose."""
    process = start(
        "serve",
        *("--engine", f"openai={engine_url}"),
        *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-format", "json"),
        *arguments,
        environment=environment,
    )
    with ended(process):
        assert process.stderr is not None
        server = Gateway(process, process.stderr)
        # The model's name is known as soon as the engine was asked once.
        with httpx.Client(trust_env=False) as client:
            while not client.get(f"{server.admin}/readyz").json()["ready"]:
                pass
        yield server


def chat(tokens: int, *, stream: bool = True) -> dict[str, Any]:
    """A request for so many tokens."""
    return {
        "model": "base",
        "stream": stream,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "Tell me a story."}],
    }
