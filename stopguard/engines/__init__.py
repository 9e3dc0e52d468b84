"""What StopGuard asks of an engine, and the engine that any OpenAI-compatible server is.

Start at `protocol`. Engine-specific knowledge lives in adapter packages, found by entry point.
"""

from stopguard.engines.capabilities import Capabilities, GaugeUnit, LaunchNeeds, derived_evidence
from stopguard.engines.openai import Connection, OpenAIEngine
from stopguard.engines.protocol import AbortReply, Engine, EngineUnreachable, Identity, IdPlacement, ModelEntry
from stopguard.engines.recognition import EngineFacts, RouteAnswer

__all__ = [
    "AbortReply",
    "Capabilities",
    "Connection",
    "Engine",
    "EngineFacts",
    "EngineUnreachable",
    "GaugeUnit",
    "IdPlacement",
    "Identity",
    "LaunchNeeds",
    "ModelEntry",
    "OpenAIEngine",
    "RouteAnswer",
    "derived_evidence",
]
