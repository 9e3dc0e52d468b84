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

from stopguard.engines.openai import OpenAIEngine
from stopguard.engines.protocol import Engine
from stopguard.errors import ConfigurationError

__all__ = ["GROUP", "create", "kinds"]

GROUP = "stopguard.adapters"
BUILT_IN = "openai"


def kinds(adapters: Iterable[EntryPoint] | None = None) -> tuple[str, ...]:
    """The names of all kinds of engine, the built-in one first."""
    return (BUILT_IN, *sorted(_adapters(adapters)))


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
    if kind == BUILT_IN:
        return OpenAIEngine(name, base_url, headers=headers, tls=tls)
    found = _adapters(adapters).get(kind)
    if found is None:
        known = kinds(adapters)
        near = difflib.get_close_matches(kind, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(
            f"engine {name}: there is no adapter called {kind!r} here (there are: {', '.join(known)}){hint}"
        )
    try:
        adapter = found.load()
        engine = adapter(name, base_url, headers=headers, tls=tls)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"engine {name}: the adapter {kind} ({found.value}) cannot be used: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(engine, Engine):
        raise ConfigurationError(f"engine {name}: the adapter {kind} ({found.value}) does not make an engine")
    return engine


def _adapters(given: Iterable[EntryPoint] | None) -> dict[str, EntryPoint]:
    points = entry_points(group=GROUP) if given is None else given
    return {point.name: point for point in points if point.name != BUILT_IN}
