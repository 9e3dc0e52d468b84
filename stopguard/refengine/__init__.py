"""The reference engine: a deterministic scheduler with the stop behaviour of five real engines.

Sans-I/O: `ReferenceEngine` takes commands and the time, and gives frames and outputs. A driver (the
HTTP face, the storm harness, a test) owns the clock and calls `step` when `next_event_at` says so.
"""

from __future__ import annotations

from stopguard.refengine.engine import ReferenceEngine
from stopguard.refengine.faults import FAULTS, Fault
from stopguard.refengine.interface import (
    AbortAnswer,
    DuplicateRequest,
    EngineConfig,
    EngineCrashed,
    EngineSnapshot,
    Gauges,
    Health,
    NotSupported,
    Output,
    PoolCorrupted,
    RequestRejected,
    RequestSpec,
    RequestView,
    SamplingParameters,
    StepCost,
    StepResult,
    Usage,
)
from stopguard.refengine.model import decode, encode
from stopguard.refengine.policies import DEFAULT_POLICY, POLICIES, Policy

__all__ = [
    "DEFAULT_POLICY",
    "FAULTS",
    "POLICIES",
    "AbortAnswer",
    "DuplicateRequest",
    "EngineConfig",
    "EngineCrashed",
    "EngineSnapshot",
    "Fault",
    "Gauges",
    "Health",
    "NotSupported",
    "Output",
    "Policy",
    "PoolCorrupted",
    "ReferenceEngine",
    "RequestRejected",
    "RequestSpec",
    "RequestView",
    "SamplingParameters",
    "StepCost",
    "StepResult",
    "Usage",
    "decode",
    "encode",
]
