"""Run all tests: those of the real engines beside the others, since they mostly wait and the others mostly compute.

    python -m tools.all_tests [ARGUMENTS OF PYTEST]

The engines are installed first, outside any test's time limit. Their output goes to build/engines.log and is printed
when both have ended. With arguments it is one ordinary run of pytest.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import click

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "build" / "engines.log"
ENGINES = "tests/engines"
PYTEST = (sys.executable, "-m", "pytest")


def main(arguments: list[str]) -> int:
    """Run them; 0 when all have passed."""
    if arguments:
        return subprocess.run([*PYTEST, *arguments], cwd=ROOT, check=False).returncode
    LOG.parent.mkdir(exist_ok=True)
    click.echo(f"The real engines are installed and tested meanwhile: tail -f {LOG.relative_to(ROOT)}")
    with LOG.open("wb") as log, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(_engines, log)
        others = subprocess.run([*PYTEST, "--ignore", ENGINES], cwd=ROOT, check=False).returncode
        if not beside.done():
            click.echo("waiting for the tests of the real engines ...")
        engines = beside.result()
    click.echo(LOG.read_text(errors="replace"))
    return others or engines


def _engines(log: IO[bytes]) -> int:
    """Install the engines, then test them. Ctrl-C reaches these processes as it reaches us."""
    for command in ([sys.executable, "-m", "tools.engines"], [*PYTEST, "-s", "-p", "no:cacheprovider", ENGINES]):
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
