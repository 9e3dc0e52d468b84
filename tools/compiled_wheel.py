"""Build a wheel whose heart and relay are compiled: the same code, about half the CPU a request.

    python tools/compiled_wheel.py dist/

StopGuard is pure Python and installs without a compiler. The modules listed here are the path of every
request; mypyc turns them, unchanged, into extension modules, and the Python files stay in the wheel beside
them. Modules that define `msgspec.Struct` classes cannot be compiled, which is why those stand in modules of
their own.

Needs the development extras (mypy brings mypyc), a C compiler, and the package `wheel`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MODULES = (
    "stopguard/gateway/admission.py",
    "stopguard/gateway/downstream.py",
    "stopguard/gateway/exchange.py",
    "stopguard/gateway/fleet.py",
    "stopguard/gateway/framing.py",
    "stopguard/gateway/identifiers.py",
    "stopguard/gateway/ledgered.py",
    "stopguard/gateway/registry.py",
    "stopguard/gateway/seen_heads.py",
    "stopguard/gateway/server.py",
    "stopguard/gateway/upstream.py",
    "stopguard/ledger/book.py",
    "stopguard/ledger/obligations.py",
    "stopguard/ledger/request.py",
    "stopguard/ledger/vouchers.py",
    "stopguard/stops/controller.py",
    "stopguard/stops/machine.py",
    "stopguard/stops/movements.py",
    "stopguard/stops/observations.py",
    "stopguard/stops/overdue.py",
    "stopguard/stops/straight.py",
    "stopguard/stops/timers.py",
    "stopguard/stops/tracked.py",
)


def build(target: Path) -> Path:
    """Write the compiled wheel into `target` and return its path."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work), str(ROOT))
        pure = next(work.glob("stopguard-*.whl"))
        _run("wheel", "unpack", "--dest", str(work / "unpacked"), str(pure))
        tree = next((work / "unpacked").iterdir())
        # Warnings about what is not installed here are not errors of the build.
        _run("mypyc", "--ignore-missing-imports", *MODULES, cwd=tree)
        shutil.rmtree(tree / "build", ignore_errors=True)
        shutil.rmtree(tree / ".mypy_cache", ignore_errors=True)
        _say_that_it_is_not_pure(tree)
        _run("wheel", "pack", "--dest-dir", str(target), str(tree))
    return max(target.glob("stopguard-*.whl"), key=lambda path: path.stat().st_mtime)


def _say_that_it_is_not_pure(tree: Path) -> None:
    """Rewrite the wheel's tag for this interpreter and platform."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    path = next(tree.glob("*.dist-info")) / "WHEEL"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    lines += ["Root-Is-Purelib: false", f"Tag: {python}-{python}-{platform}"]
    path.write_text("\n".join(line for line in lines if line) + "\n")


def _run(module: str, *arguments: str, cwd: Path | None = None) -> None:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{module} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1] if len(sys.argv) > 1 else 'dist'))}\n")
