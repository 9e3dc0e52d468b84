"""The adapter conformance suite over TensorRT-LLM's adapter, in front of the stand-in with the patch and without."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from stopguard.testing.conformance import Conformance, Subject
from tests.trtllm.rig import launched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(params=[False, True], ids=["stock", "patched"], scope="class")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    log = tmp_path_factory.mktemp("trtllm") / "log"
    with launched(log, patch=request.param, return_perf_metrics=True) as engine:
        question = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        due = time.monotonic() + 20
        while True:
            # It has to have run once: before its first iteration it shows nothing.
            try:
                assert httpx.post(f"{engine.url}/v1/completions", json=question, trust_env=False).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < due
                time.sleep(0.02)
        with Subject("trtllm", engine.url, slots=4) as subject:
            yield subject


class TestTensorRTLLM(Conformance):
    """One door, no ids, and totals of the last iteration."""
