"""Peers' set-up: a virtual environment of its own for each Python peer, the system's packages for the others."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSTALL_TIMEOUT_SECONDS = 900
_CHECKOUT = Path(__file__).resolve().parents[2]


class PeerUnavailableError(Exception):
    """A peer that cannot be measured here; the text is the reason shown in its row."""


def python_environment(cache: Path, name: str, requirements: Sequence[str]) -> Path:
    """The directory of executables of a virtual environment that holds ``requirements``, made on first use.

    Raises PeerUnavailableError when the installation fails.
    """
    home = cache / "environments" / name
    executables = home / ("Scripts" if os.name == "nt" else "bin")
    marker = home / "installed.txt"
    wanted = "\n".join(requirements)
    if marker.exists() and marker.read_text() == wanted:
        return executables
    if home.exists():
        shutil.rmtree(home)
    home.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(home)], "virtual environment")
    _run([str(executables / "python"), "-m", "pip", "install", "--quiet", *requirements], "pip install")
    marker.write_text(wanted)
    return executables


def compiled_wheel(cache: Path) -> Path:
    """A wheel of this checkout with its hot path compiled, built once for each state of its sources.

    Raises PeerUnavailableError when there is no compiler or the build fails.
    """
    state = hashlib.sha256()
    for path in [*sorted((_CHECKOUT / "stopguard").rglob("*.py")), _CHECKOUT / "tools" / "compiled_wheel.py"]:
        state.update(path.read_bytes())
    target = cache / "wheels" / state.hexdigest()[:16]
    built = sorted(target.glob("*.whl"))
    if not built:
        _run([sys.executable, str(_CHECKOUT / "tools" / "compiled_wheel.py"), str(target)], "compiling StopGuard")
        built = sorted(target.glob("*.whl"))
    return built[0]


def package_version(executables: Path, distribution: str) -> str:
    """The version of a distribution inside a peer's environment."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return _run([str(executables / "python"), "-c", code], "version").strip()


def system_program(name: str, package: str) -> str:
    """The path of a program, installed through apt-get when it is missing and we are root.

    Raises PeerUnavailableError with what to do when it stays missing.
    """
    found = shutil.which(name)
    if found is not None:
        return found
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PeerUnavailableError(f"{name} is not installed (install the package {package})")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", package], "apt-get", environment)
    found = shutil.which(name)
    if found is None:
        raise PeerUnavailableError(f"{name} is still missing after apt-get install {package}")
    return found


def program_version(command: Sequence[str]) -> str:
    """The first number with dots that a version command prints."""
    for word in _run(command, "version").replace("/", " ").replace("-", " ").split():
        if word[0].isdigit() and "." in word:
            return word
    return "unknown"


def _run(command: Sequence[str], what: str, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_TIMEOUT_SECONDS,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailableError(f"{what} failed: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        raise PeerUnavailableError(f"{what} failed: {lines[-1][:200] if lines else f'exit {done.returncode}'}")
    return done.stdout
