from __future__ import annotations

import subprocess
import sys

CODE = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from stopguard.cli.descriptors import raise_limit
assert raise_limit() == hard, raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
assert raise_limit() == hard
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=30)
