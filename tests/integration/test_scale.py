"""Many idle streams cancelled at once and many requests on few connections: nothing stays, and memory is bounded.

Short runs of `benchmarks/streams.py` and `benchmarks/soak.py`, with every process of theirs.
"""

from __future__ import annotations

import sys

import pytest

from benchmarks import soak, streams
from benchmarks._scale_run import differences
from benchmarks._soak_load import WINDOWS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

STREAMS = 1000
REQUESTS = 20_000
SHORT_GROWTH_MAX = 0.08
"""What the bounded memories of finished requests may take while they fill, as a share of the whole process."""


def test_a_thousand_idle_streams_cancelled_at_once_leave_nothing() -> None:
    report = streams.run(STREAMS, rounds=2, floor=False)
    assert report.streams == STREAMS
    assert report.left_before_collection == {}
    assert report.left == {}
    assert report.history["leaks found"] == 0
    assert report.history["opened"] == report.history["settled"] + report.history["written off"]
    assert report.history["opened"] == 2 * STREAMS + streams.WARM_UP_STREAMS
    assert report.stream_kib <= streams.STREAM_KIB_MAX
    first, second = report.rounds
    assert first.descriptors > 2 * STREAMS
    # The second time all of it fits where the first time's was.
    assert second.resident_kib - first.resident_kib < 0.25 * streams.STREAM_KIB_MAX
    assert report.exit_code == 0


def test_twenty_thousand_requests_with_cancels_leave_nothing() -> None:
    report = soak.run(REQUESTS, minutes=1.5)
    assert report.failures == {}
    assert report.requests == REQUESTS
    assert report.cancelled == pytest.approx(0.3 * REQUESTS, rel=0.1)
    assert set(report.ended) == {"answer", "stream", *WINDOWS}
    assert report.left_before_collection == {}
    assert report.left == {}
    history = report.history
    assert history["leaks found"] == history["refused"] == 0
    assert history["opened"] == history["settled"] + history["written off"]
    # An upload that breaks off and a connection that is reset at once may never become a request of the gateway's.
    never = report.ended["upload"] + report.ended["at_once"]
    assert REQUESTS - never <= history["opened"] <= REQUESTS - report.ended["upload"]
    assert report.growth < SHORT_GROWTH_MAX
    assert report.exit_code == 0


def test_what_is_left_is_found() -> None:
    before = {"tasks": {"watch": 1}, "open books": 0, "history": {"opened": 1}, "objects": {"Exchange": 0}}
    after = {"tasks": {"watch": 1, "call": 2}, "open books": 3, "history": {"opened": 9}, "objects": {"Exchange": 1}}
    assert differences(before, before) == {}
    assert differences(after, before) == {}
    assert differences(before, after) == {
        "tasks: call": "0 -> 2",
        "open books": "0 -> 3",
        "objects: Exchange": "0 -> 1",
    }


def test_growth_is_measured_after_the_warm_up() -> None:
    def report(*resident_kib: int) -> soak.Report:
        samples = tuple(
            soak.Sample(at_seconds=number, requests=number * 100, resident_kib=kib, anonymous_kib=kib)
            for number, kib in enumerate(resident_kib)
        )
        return soak.Report(
            requests=100 * (len(samples) - 1),
            wanted=0,
            cancelled=0,
            seconds=1.0,
            ended={},
            failures={},
            samples=samples,
            left={},
            left_before_collection={},
            history={},
            unreachable=0,
            grown=(),
            exit_code=0,
        )

    flat = report(10, *[1000] * 10)
    assert (flat.growth, flat.highest, flat.reached) == (0.0, 0.0, True)
    growing = report(10, *range(1000, 1100, 10))
    assert growing.growth == pytest.approx(0.09)
    assert growing.highest == pytest.approx(0.09)
    assert not growing.reached
