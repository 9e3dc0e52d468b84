"""What StopGuard asks of an engine, and the engine that any OpenAI-compatible server is.

Start at `protocol`. Engine-specific knowledge lives in adapter packages, found by entry point.
"""

from stopguard.engines.openai import OpenAIEngine
from stopguard.engines.protocol import AbortReply, Engine, EngineUnreachable, Identity, IdPlacement, ModelEntry

__all__ = ["AbortReply", "Engine", "EngineUnreachable", "IdPlacement", "Identity", "ModelEntry", "OpenAIEngine"]
