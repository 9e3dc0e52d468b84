"""The catalogue of figures: one key, title and unit each, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.relay_bench.windows import WINDOWS


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that a peer has once a round."""

    key: str
    title: str
    unit: str
    digits: int
    lower_is_better: bool = True


REQUEST_MEASURES = (
    Measure("requests_1_per_second", "1 connection", "requests/s", 0, lower_is_better=False),
    Measure("requests_1_p50_ms", "p50", "ms", 3),
    Measure("requests_1_p99_ms", "p99", "ms", 3),
    Measure("added_p50_ms", "added p50", "ms", 3),
    Measure("added_p99_ms", "added p99", "ms", 3),
    Measure("requests_1_processor_us", "CPU, 1 connection", "µs/request", 0),
    Measure("requests_32_per_second", "32 connections", "requests/s", 0, lower_is_better=False),
    Measure("requests_32_p50_ms", "32: p50", "ms", 2),
    Measure("requests_32_p99_ms", "32: p99", "ms", 2),
    Measure("requests_32_busy_share", "32: busy", "share of its CPU", 2),
    Measure("requests_32_processor_us", "CPU, 32 connections", "µs/request", 0),
)

STREAM_MEASURES = (
    Measure("unpaced_chunks_per_second", "32 unpaced streams", "chunks/s", 0, lower_is_better=False),
    Measure("unpaced_processor_us", "CPU, unpaced", "µs/chunk", 1),
    Measure("paced_delivered_share", "200 × 40/s: delivered", "share", 2, lower_is_better=False),
    Measure("paced_processor_us", "CPU, 200 × 40/s", "µs/chunk", 1),
    Measure("background_delivered_share", "64 × 40/s: delivered", "share", 2, lower_is_better=False),
    Measure("resident_mib", "memory at the end", "MiB", 0),
)

WINDOW_MEASURES = tuple(
    measure
    for window in WINDOWS
    for measure in (
        Measure(f"{window.name}_p50_ms", f"{window.title}: p50", "ms", 2),
        Measure(f"{window.name}_p99_ms", f"{window.title}: p99", "ms", 2),
    )
)

MEASURES = {measure.key: measure for measure in (*REQUEST_MEASURES, *STREAM_MEASURES, *WINDOW_MEASURES)}
