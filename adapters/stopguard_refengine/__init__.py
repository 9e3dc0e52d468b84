"""The adapter for StopGuard's reference engine: what is known of it from outside."""

from stopguard_refengine.adapter import ReferenceEngineAdapter

__all__ = ["ReferenceEngineAdapter"]
