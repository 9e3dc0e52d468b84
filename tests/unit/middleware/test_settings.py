"""What the guard costs its host at import, and which settings it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from stopguard.middleware import DisconnectGuard


def test_it_imports_only_the_standard_library() -> None:
    """It runs inside engines, whose start it must not burden."""
    code = (
        "import sys; before = set(sys.modules); import stopguard.middleware; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['stopguard']"


@pytest.mark.parametrize("options", [{"listener_seconds": -1}, {"read_ahead_bytes": 0}])
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    with pytest.raises(ValueError):
        DisconnectGuard(application, **options)
