"""Run all tests: first those that need no engine, then the engines are installed and those of the real ones run.

    python -m tools.all_tests [ARGUMENTS OF PYTEST]

One after the other, since two cores that start an engine leave too little for tests with deadlines; the installation
stands between them, outside any test's time limit. With arguments it is one ordinary run of pytest.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINES = "tests/engines"
PYTEST = (sys.executable, "-m", "pytest")


def main(arguments: list[str]) -> int:
    """Run them; 0 when all have passed."""
    if arguments:
        return _run([*PYTEST, *arguments])
    others = _run([*PYTEST, "--ignore", ENGINES])
    engines = _run([sys.executable, "-m", "tools.engines"]) or _run([*PYTEST, "-p", "no:cacheprovider", ENGINES])
    return others or engines


def _run(command: list[str]) -> int:
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
