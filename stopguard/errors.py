"""Every error that StopGuard raises, in one tree: whose fault it is comes first.

`StopGuardError` is abstract. Its five children say who has to act:

* `ClientError`        the request was wrong (bad framing, unknown id, wrong credentials);
* `EngineError`        the engine or the network to it failed;
* `ConfigurationError` the operator asked for something impossible;
* `StorageError`       the disk under the journal failed;
* `BookkeepingError`   StopGuard itself broke a rule of its books (always a bug, never hidden).

Each error carries `status_hint`, the HTTP status that fits it, and `exit_code`, the
command line's. The text of an error is one line that a user can act on.
"""

from __future__ import annotations

__all__ = [
    "BookkeepingError",
    "ClientError",
    "ConfigurationError",
    "EngineError",
    "LimitReached",
    "StopGuardError",
    "StorageError",
]


class StopGuardError(Exception):
    """The base of all errors; abstract, so that whose fault it was can never be left open."""

    exit_code: int = 2
    status_hint: int = 500

    def __init__(self, message: str) -> None:
        if type(self) is StopGuardError:
            raise TypeError("StopGuardError is abstract: raise one of its children, which say whose fault it is")
        super().__init__(message)


class ClientError(StopGuardError):
    """The client sent something that cannot be served as it is."""

    status_hint = 400


class EngineError(StopGuardError):
    """An engine, or the way to it, failed."""

    exit_code = 2
    status_hint = 502


class ConfigurationError(StopGuardError):
    """The operator's configuration or command line cannot work."""

    exit_code = 2


class StorageError(StopGuardError):
    """The disk or the file under the journal failed; the books in memory are unharmed."""

    exit_code = 2


class BookkeepingError(StopGuardError):
    """A rule of the books was about to be broken; nothing was changed."""

    exit_code = 70


class LimitReached(StopGuardError):
    """A limit was reached: the caller must come back later or raise the limit.

    `limit_name` and `limit` say which one; nothing was changed.
    """

    status_hint = 503

    def __init__(self, limit_name: str, limit: int, advice: str) -> None:
        super().__init__(f"{limit_name} reached ({limit}): {advice}")
        self.limit_name = limit_name
        self.limit = limit
