"""Programs of other packages that the tests drive, and what happens when one is missing."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

__all__ = ["missing", "needs"]


def needs(program: str, package: str) -> str:
    """The path of `program`. Without it a test fails in continuous integration and is skipped elsewhere."""
    path = shutil.which(program)
    if path is None:
        missing(f"{program} is not installed: apt-get install {package}")
    return path


def missing(reason: str) -> NoReturn:
    """Fail where everything has to be there (`CI=true`), else skip, with the reason."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    pytest.skip(reason)
