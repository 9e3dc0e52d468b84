"""These tests run on both event loops: uvloop, which `stopguard serve` uses, and asyncio's own."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(params=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}
