"""Which kinds of engine there are: `openai`, and whatever installed packages offer.

An adapter package names its engine class under the entry-point group ``stopguard.adapters``
(``NAME = "PACKAGE.adapter:CLASS"``). The class is called as `OpenAIEngine` is: `(name, base_url, *, headers,
tls)`. A package that cannot be loaded is an error only for those who ask for its kind.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from stopguard.engines.openai import OpenAIEngine
from stopguard.engines.protocol import Engine
from stopguard.errors import ConfigurationError

__all__ = ["AUTO", "BUILT_IN", "GROUP", "adapter_class", "adapters_of", "create", "kinds"]

GROUP = "stopguard.adapters"
BUILT_IN = "openai"
AUTO = "auto"
"""The kind that stands for whatever `stopguard.engines.recognition` finds."""


def kinds(adapters: Iterable[EntryPoint] | None = None) -> tuple[str, ...]:
    """The names of all kinds of engine, the built-in one first."""
    return (BUILT_IN, *sorted(adapters_of(adapters)))


def create(
    kind: str,
    name: str,
    base_url: str,
    *,
    headers: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    adapters: Iterable[EntryPoint] | None = None,
) -> Engine:
    """The engine `name` at `base_url`, spoken to by the adapter for `kind`.

    Raises `ConfigurationError` when there is no such kind, or its package is broken.
    """
    adapter, origin = _load(kind, name, adapters)
    try:
        engine = adapter(name, base_url, headers=headers, tls=tls)
    except ConfigurationError:
        raise
    except Exception as error:
        raise _unusable(name, kind, origin, error) from error
    if not isinstance(engine, Engine):
        raise ConfigurationError(f"engine {name}: the adapter {kind} ({origin}) does not make an engine")
    return engine


def adapter_class(kind: str, adapters: Iterable[EntryPoint] | None = None) -> Any:
    """What the adapter's package offers for `kind`, mostly a class; `ConfigurationError` as `create` raises it."""
    return _load(kind, kind, adapters)[0]


def _load(kind: str, name: str, adapters: Iterable[EntryPoint] | None) -> tuple[Any, str]:
    """The adapter and where it comes from."""
    if kind == BUILT_IN:
        return OpenAIEngine, OpenAIEngine.__module__
    found = adapters_of(adapters).get(kind)
    if found is None:
        known = kinds(adapters)
        near = difflib.get_close_matches(kind, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(
            f"engine {name}: there is no adapter called {kind!r} here (there are: {', '.join(known)}){hint}"
        )
    try:
        return found.load(), found.value
    except Exception as error:
        raise _unusable(name, kind, found.value, error) from error


def _unusable(name: str, kind: str, origin: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"engine {name}: the adapter {kind} ({origin}) cannot be used: {type(error).__name__}: {error}"
    )


def adapters_of(given: Iterable[EntryPoint] | None) -> dict[str, EntryPoint]:
    """The adapters that installed packages offer (or `given`), by kind. The built-in kind cannot be replaced."""
    points = entry_points(group=GROUP) if given is None else given
    return {point.name: point for point in points if point.name not in (BUILT_IN, AUTO)}
