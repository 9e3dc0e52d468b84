"""Real engines on an ordinary machine: installed once into a folder of their own, started, watched, ended.

A `Recipe` knows one engine: which packages it needs, which repairs, which model, which command. It lives in the
engine's adapter package and is found through the entry-point group ``stopguard.rigs``. Everything else is here and
the same for all: where installations are kept (``$STOPGUARD_ENGINES``, else the user's cache folder), the lock that
lets one process install while another waits, the process group that is started and ended, the log, what it used.

An installation is complete or absent: its folder gets the mark `installed` last, and one without it is made again.
The folder's name carries a digest of the recipe, so that a changed recipe installs anew beside the old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

import httpx
import msgspec
import psutil

from stopguard.errors import StopGuardError

__all__ = [
    "GROUP",
    "Launch",
    "Recipe",
    "RigError",
    "RunningEngine",
    "home_of",
    "install",
    "free_port",
    "make_environment",
    "pip",
    "put_stopguard",
    "python_of",
    "recipe_of",
    "run_logged",
    "say_to_stderr",
    "start",
]

GROUP: Final = "stopguard.rigs"
_END_SECONDS: Final = 20.0
_TAIL_LINES: Final = 30
_CHECKOUT: Final = Path(__file__).resolve().parents[2]

Say = Callable[[str], None]


def say_to_stderr(line: str) -> None:
    """One line of progress for whoever waits."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class RigError(StopGuardError):
    """The engine could not be installed or started; says which, why, and where its log is."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine: `ready_path` answers 200 once it serves, within `ready_seconds`.

    `model` is the name under which it serves its model. `environment` is added to ours.
    """

    command: tuple[str, ...]
    model: str
    environment: dict[str, str] = {}
    ready_path: str = "/v1/models"
    ready_seconds: float = 600.0


class Recipe(Protocol):
    """One engine: `kind` is its adapter's name, `version` what is installed.

    `ingredients` are the files (beside the recipe itself) whose change asks for a new installation.
    """

    kind: str
    version: str
    ingredients: tuple[Path, ...]

    def install(self, home: Path, say: Say) -> None:
        """Put everything into `home` (an empty folder); `RigError` when that fails."""
        ...

    def launch(self, home: Path, port: int, arguments: Sequence[str], options: Mapping[str, Any]) -> Launch:
        """The command that serves on 127.0.0.1:`port`, with `arguments` at its end.

        `options` are the recipe's own (which model, how large a pool); unknown ones raise `RigError`.
        """
        ...


class RunningEngine:
    """An engine that was started here. `log` grows while it runs; `stop` ends it and everything it started."""

    def __init__(self, kind: str, process: subprocess.Popen[bytes], url: str, launch: Launch, log: Path) -> None:
        self.kind = kind
        self.process = process
        self.url = url
        self.model = launch.model
        self.launch = launch
        self.log = log
        self.started_seconds = 0.0
        self.memory_bytes_max = 0

    def processes(self) -> list[psutil.Process]:
        """Its processes that live now, the first one first."""
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        return []

    def memory_bytes(self) -> int:
        """Resident memory of all its processes now, in bytes (shared pages count for each)."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        self.memory_bytes_max = max(self.memory_bytes_max, total)
        return total

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last `lines` lines of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def kill(self) -> None:
        """End it as a crash would: every process at once, by SIGKILL."""
        self._signal(signal.SIGKILL, self.processes())
        self.process.wait(_END_SECONDS)

    def stop(self) -> None:
        """Ask it to end, then make it; returns when none of its processes lives."""
        ours = self.processes()
        self._signal(signal.SIGTERM, ours[:1])
        _, alive = psutil.wait_procs(ours, _END_SECONDS)
        self._signal(signal.SIGKILL, [*alive, *self.processes()])
        psutil.wait_procs(alive, _END_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)

    @staticmethod
    def _signal(number: signal.Signals, processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)


# ---- where ------------------------------------------------------------------------------------------------


def recipe_of(kind: str) -> Recipe:
    """The recipe of the engine `kind`; `RigError` when no installed package has one."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if kind not in points:
        raise RigError(f"there is no recipe for the engine {kind!r} (there are: {', '.join(sorted(points))})")
    recipe: Recipe = points[kind].load()
    return recipe


def home_of(recipe: Recipe) -> Path:
    """The folder of its installation, whether or not it is there."""
    base = os.environ.get("STOPGUARD_ENGINES") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "stopguard", "engines"
    )
    return Path(base) / f"{recipe.kind}-{recipe.version}-{_digest(recipe)}"


def _digest(recipe: Recipe) -> str:
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    module = sys.modules[type(recipe).__module__].__file__
    for path in (*([Path(module)] if module else []), *recipe.ingredients):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


# ---- installing -------------------------------------------------------------------------------------------


def install(recipe: Recipe, say: Say = say_to_stderr) -> Path:
    """Its home, installed first where it is not. Takes minutes the first time; `RigError` when it fails."""
    home = home_of(recipe)
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.with_name(home.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark = home / "installed"
        if not mark.exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            began = time.monotonic()
            say(f"installing {recipe.kind} {recipe.version} into {home} (once; this takes minutes) ...")
            recipe.install(home, say)
            seconds = time.monotonic() - began
            mark.write_text(f"{seconds:.0f} seconds\n")
            say(f"installed {recipe.kind} {recipe.version} in {seconds:.0f} s")
    return home


def make_environment(home: Path, say: Say, python: str = sys.executable) -> Path:
    """A virtual environment in `home`/venv; the path of its interpreter."""
    run_logged(home, say, [python, "-m", "venv", "--without-pip", str(home / "venv")])
    return python_of(home)


def python_of(home: Path) -> Path:
    """The interpreter of the environment in `home`."""
    return home / "venv" / "bin" / "python"


def pip(home: Path, say: Say, *arguments: str) -> None:
    """`pip install` into the environment of `home`, with the pip of this interpreter."""
    command = [sys.executable, "-m", "pip", "--python", str(python_of(home)), "--disable-pip-version-check"]
    run_logged(home, say, [*command, "install", "--quiet", "--no-input", *arguments])


def run_logged(
    home: Path, say: Say, command: Sequence[str], environment: Mapping[str, str] | None = None, seconds: float = 3000.0
) -> None:
    """Run one step of an installation; its output goes to `home`/install.log, whose end an error shows."""
    log = home / "install.log"
    say(f"  {' '.join(command)[:160]}")
    with open(log, "ab") as output:
        output.write(f"+ {' '.join(command)}\n".encode())
        output.flush()
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=home,
                env={**_clean_environment(), **(environment or {})},
                timeout=seconds,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RigError(f"{command[0]} could not be run to its end: {error}") from error
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise RigError(f"{' '.join(command)[:200]} ended with {code}; the end of {log}:\n{tail}")


def put_stopguard(home: Path, say: Say) -> None:
    """Install this StopGuard into the environment of `home`, without its dependencies, as an editable one.

    An engine needs no more than the plugin, msgspec and the standard library. Called before each start, since the
    installation is kept longer than a checkout stays in its place; costs nothing when nothing changed.
    """
    project = (_CHECKOUT / "pyproject.toml").read_bytes()
    stamp = home / "stopguard.stamp"
    wanted = hashlib.sha256(str(_CHECKOUT).encode() + project).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        pip(home, say, "--no-deps", "--editable", str(_CHECKOUT))
        stamp.write_text(wanted)


def _clean_environment() -> dict[str, str]:
    """Our environment without what would lead another interpreter astray."""
    astray = ("PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in astray}


# ---- running ----------------------------------------------------------------------------------------------


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def start(
    recipe: Recipe,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    port: int = 0,
    log: Path | None = None,
    say: Say = say_to_stderr,
) -> Iterator[RunningEngine]:
    """The engine, installed where needed, serving; ended with all its processes when the block is left.

    `RigError` when it does not serve in time or ends before; the end of its log is in the message. SIGTERM leaves the
    block too, in the main thread and where nobody else has taken it: otherwise the engine would outlive us.
    """
    with _left_by_sigterm():
        yield from _started(recipe, arguments, environment or {}, options or {}, port, log, say)


@contextlib.contextmanager
def _left_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _started(
    recipe: Recipe,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    port: int,
    log: Path | None,
    say: Say,
) -> Iterator[RunningEngine]:
    home = install(recipe, say)
    port = port or free_port()
    if _somebody_listens(port):
        raise RigError(f"{recipe.kind} cannot be started at port {port}: somebody else listens there")
    launch = recipe.launch(home, port, arguments, options)
    log = log or home / f"serve-{port}.log"
    began = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            launch.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=home,
            env={**_clean_environment(), **launch.environment, **environment},
            start_new_session=True,
        )
    engine = RunningEngine(recipe.kind, process, f"http://127.0.0.1:{port}", launch, log)
    try:
        _await_ready(engine, began + launch.ready_seconds)
        engine.started_seconds = time.monotonic() - began
        memory = engine.memory_bytes()
        say(
            f"{recipe.kind} {recipe.version} serves at {engine.url} after {engine.started_seconds:.0f} s"
            f" ({memory / 2**30:.1f} GiB in {len(engine.processes())} processes)"
        )
        yield engine
    finally:
        engine.memory_bytes()
        engine.stop()
        say(f"{recipe.kind} ended; it held {engine.memory_bytes_max / 2**30:.1f} GiB at most when looked at")


def _somebody_listens(port: int) -> bool:
    """Then whoever that is would answer in the place of an engine that never came up."""
    with socket.socket() as asked:
        asked.settimeout(1.0)
        return asked.connect_ex(("127.0.0.1", port)) == 0


def _await_ready(engine: RunningEngine, due_at: float) -> None:
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while True:
            if engine.process.poll() is not None:
                raise RigError(
                    f"{engine.kind} ended with {engine.process.returncode} before it served; the end of {engine.log}:\n"
                    f"{engine.tail()}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if client.get(engine.url + engine.launch.ready_path).status_code == httpx.codes.OK:
                    return
            if time.monotonic() > due_at:
                raise RigError(
                    f"{engine.kind} does not serve after {engine.launch.ready_seconds:.0f} s;"
                    f" the end of {engine.log}:\n{engine.tail()}"
                )
            time.sleep(0.25)
