"""The table `[resume]`: how a stream that was cut goes on. See docs/resume.md."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stopguard.config.fields import Count, Seconds, Section

__all__ = ["ResumeEntry"]


class ResumeEntry(Section):
    """How a stream that was cut goes on, at the same engine or at another one. See docs/resume.md."""

    failover: bool = Field(
        default=False,
        description="Continue a stream whose engine was lost at another engine that serves the same model.",
    )
    failovers: Annotated[int, Field(ge=0)] = Field(
        default=2, description="How often one request may be continued that way."
    )
    tries: Count = Field(
        default=5, description="Attempts to continue that may fail in a row before the stream ends with an error."
    )
    ack_seconds: Seconds = Field(
        default=1.0, description="How long the engine of a preempted stream has to show that it let go of it."
    )
    comment_seconds: Seconds = Field(
        default=10.0, description="How often a comment keeps the connection of a parked stream awake."
    )
    kept_tokens: Count = Field(
        default=262_144, description="Tokens of one answer that are kept; a longer one cannot be continued any more."
    )
    parked_requests: Count = Field(default=1024, description="Streams that may be parked at the same time.")
