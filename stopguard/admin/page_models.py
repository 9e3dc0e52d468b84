"""What the live page and `stopguard top` are told: one moment of everything, bounded in every list."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from stopguard.admin.models import Answer, LeakLine, RequestLine, State

__all__ = ["EngineNow", "Overview", "Stage", "StepTimes", "StopNow", "StopPoint"]

Stage = Literal["notify", "ack", "in-flight output", "release", "settle"]


class StopNow(Answer):
    """A stop in progress."""

    request: RequestLine
    stage: Stage = Field(description="The step that is waited for.")


class StepTimes(Answer):
    """How long after its observation stops had come to one step, over the stops remembered."""

    name: Stage
    stops: int
    p50_seconds: float | None
    p99_seconds: float | None


class StopPoint(Answer):
    """One stop that ended: when, and how long after its observation each step had happened. Null: it did not."""

    ago_seconds: float
    semantics: str
    notify: float | None
    ack: float | None
    output: float | None
    release: float | None
    settle: float | None


class EngineNow(Answer):
    """One engine. Null where it cannot be known."""

    name: str
    kind: str
    healthy: bool
    running: int = Field(description="Requests in its batch, by the books.")
    queued: int = Field(description="Requests for it that do not run: waiting, preempted, or without a connection.")
    stopping: int = Field(description="Requests of it whose stop is in progress: some ledger is not closed.")
    kv_used: float | None = Field(description="The part of its KV blocks that is in use, 0 to 1, by its own gauges.")
    stops_per_minute: float
    settle_p50_seconds: float | None = Field(description="From observed to settled, over the stops remembered.")
    settle_p99_seconds: float | None
    tokens_wasted: int = Field(description="Computed for nobody since the start: discarded and stale.")
    leaks_found: int = Field(description="Among the leaks remembered.")
    leaks_open: int = Field(description="Requests with something overdue now.")
    best_evidence: str
    probed: bool


class Overview(Answer):
    """Everything at one moment."""

    schema_version: Literal[1] = 1
    time: datetime
    version: str
    uptime_seconds: float
    draining: bool
    reasons: list[str] = Field(description="Why no new request can be served; empty when they can.")
    warnings: list[str]
    states: dict[State, int] = Field(description="Open requests by state; states without one are left out.")
    open_requests: int
    overdue_requests: int
    opened: int
    settled: int
    written_off: int
    leaks_found: int
    closed_late: int
    stops_per_minute: float
    tokens_wasted: int
    engines: list[EngineNow]
    stops: list[StopNow] = Field(description="In progress, oldest first.")
    stops_total: int
    steps: list[StepTimes]
    points: list[StopPoint] = Field(description="Stops that ended in the last two minutes, newest first.")
    requests: list[RequestLine] = Field(description="Open, oldest first.")
    ended: list[RequestLine] = Field(description="Closed lately, newest first.")
    leaks: list[LeakLine] = Field(description="Those still open first, then the newest.")
