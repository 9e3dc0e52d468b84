"""What ends an audit before it has a verdict; each is one line that says what to do."""

from __future__ import annotations

from stopguard.errors import ConfigurationError, EngineError

__all__ = ["AuditRefused", "CredentialsRefused", "ModelUnknown", "TargetLost", "TargetUnreachable"]


class TargetUnreachable(EngineError):
    """Nobody answers at the address, or not what an OpenAI-compatible server answers."""


class TargetLost(EngineError):
    """The target answered before and does not any more."""


class CredentialsRefused(ConfigurationError):
    """The target wants a key, or another one."""


class ModelUnknown(ConfigurationError):
    """The target does not serve this model."""


class AuditRefused(ConfigurationError):
    """The audit would not be safe or could prove nothing as it was asked for."""
