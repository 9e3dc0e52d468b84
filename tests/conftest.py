"""Settings that every test shares.

Hypothesis runs the same examples every time, so that a red run is red again. `STOPGUARD_HYPOTHESIS=deep` looks
for new ones instead: many more, from a fresh seed, which Hypothesis prints when one fails.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile(
    "deep",
    derandomize=False,
    database=None,
    deadline=None,
    print_blob=True,
    max_examples=2000,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("STOPGUARD_HYPOTHESIS", "default"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, the loop that StopGuard runs on."""
    return "asyncio"
