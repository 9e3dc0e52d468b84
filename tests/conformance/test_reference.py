"""The conformance suite over the reference engine's own adapter, and over the adapter that knows nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stopguard.testing.conformance import Conformance, Subject
from tests.conformance.imitations import Imitation, imitation

POLICIES = ("vllm", "sglang", "llamacpp", "trtllm", "deepinfer")


@pytest.fixture(params=POLICIES, scope="class")
def engine(request: pytest.FixtureRequest) -> Iterator[Imitation]:
    with imitation(request.param, truth=True) as serving:
        yield serving
        assert serving.snapshot().settled


@pytest.fixture(scope="class")
def subject(engine: Imitation) -> Iterator[Subject]:
    with Subject("ref", engine.url) as subject:
        yield subject


class TestReferenceEngine(Conformance):
    """Its own adapter, whatever engine it imitates."""
