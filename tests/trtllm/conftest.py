"""These tests run on asyncio; the gateway's own tests run it on uvloop too."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
