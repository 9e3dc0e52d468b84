"""The compiled wheel does what the sources do: the storms, and every window and way of leaving."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled wheel, unpacked where it can be imported from."""
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no C compiler: apt-get install gcc")
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("compiled")
    built = run(sys.executable, str(ROOT / "tools" / "compiled_wheel.py"), str(folder))
    run(sys.executable, "-m", "wheel", "unpack", "--dest", str(folder / "unpacked"), built.strip().splitlines()[-1])
    return next((folder / "unpacked").iterdir())


def run(*command: str, path: str | None = None) -> str:
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = path
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_what_is_imported_is_compiled(unpacked: Path) -> None:
    code = "import stopguard.ledger.request as a, stopguard.gateway.exchange as b; print(a.__file__, b.__file__)"
    first, second = run(sys.executable, "-P", "-c", code, path=f"{unpacked}:{ROOT}").split()
    for file in (first, second):
        assert Path(file).is_relative_to(unpacked)
        assert file.endswith(".so")


def test_storms_and_windows_pass_with_it(unpacked: Path) -> None:
    # Not the unit tests, which replace methods and list the slots of classes: compiled ones allow neither.
    suites = ["tests/storm", "tests/cancellations"]
    options = ["-q", "-o", "pythonpath=", "-p", "no:cacheprovider", "-m", "not slow and not network_namespace"]
    out = run(sys.executable, "-P", "-m", "pytest", *options, *suites, path=f"{unpacked}:{ROOT}")
    print(out.strip().splitlines()[-1])
