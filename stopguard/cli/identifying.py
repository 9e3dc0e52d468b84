"""`--engine auto=URL`: the engines are asked what they are, before anything listens.

An engine often takes longer to start than the gateway, so it is asked again until it answers or
`identify_seconds` have passed. What it is found to be stands in the configuration afterwards, as if it had been
written there; an engine that was named `auto` for want of a better name is called after what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from time import monotonic

from stopguard.cli.assembly import client_context, engine_key
from stopguard.config import Configuration, EngineEntry
from stopguard.engines import EngineUnreachable
from stopguard.engines.recognition import Recognised, ask_over_http, recognise
from stopguard.engines.registry import AUTO, BUILT_IN
from stopguard.errors import EngineError

__all__ = ["identified", "unknown_engines"]

_PAUSE_SECONDS = 0.5

Say = Callable[[str], None]


def unknown_engines(configuration: Configuration) -> list[str]:
    """The names of the engines whose kind is yet to be found."""
    return [name for name, entry in configuration.engines.items() if entry.kind == AUTO]


async def identified(configuration: Configuration, environment: Mapping[str, str], say: Say) -> Configuration:
    """`configuration` with the kind of every engine. `say` gets one line an engine.

    Raises `EngineError` when one does not answer in time.
    """
    unknown = unknown_engines(configuration)
    if not unknown:
        return configuration
    due_at = monotonic() + configuration.identify_seconds
    asked = [_identify(name, configuration.engines[name], environment, due_at, say) for name in unknown]
    found = dict(zip(unknown, await asyncio.gather(*asked), strict=True))
    engines: dict[str, EngineEntry] = {}
    for name, entry in configuration.engines.items():
        if name not in found:
            engines[name] = entry
            continue
        kind = found[name].kind
        engines[_name_for(name, kind, configuration, engines)] = entry.model_copy(update={"kind": kind})
    return configuration.model_copy(update={"engines": engines})


def _name_for(name: str, kind: str, configuration: Configuration, taken: Mapping[str, EngineEntry]) -> str:
    """`name`, or the kind where the name says nothing (`auto`, `auto-2`)."""
    head, _, number = name.partition("-")
    if head != AUTO or (number and not number.isdecimal()):
        return name
    wanted, count = kind, 2
    while wanted in taken or wanted in configuration.engines:
        wanted, count = f"{kind}-{count}", count + 1
    return wanted


async def _identify(
    name: str, entry: EngineEntry, environment: Mapping[str, str], due_at: float, say: Say
) -> Recognised:
    key = engine_key(name, entry, environment)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    client, ask = ask_over_http(entry.url, headers=headers, tls=client_context(f"engines.{name}.tls", entry))
    waits = False
    try:
        while True:
            found = None
            with contextlib.suppress(EngineUnreachable):
                found = await recognise(ask)
            # While it starts it may answer with 503 to everything; a model list says that it is there.
            if found is not None and (found.kind != BUILT_IN or found.facts.models):
                break
            if monotonic() >= due_at:
                why = "does not answer" if found is None else "answers, but lists no models, and no adapter knows it"
                raise EngineError(
                    f"engine {name} at {entry.url} {why}: start it first, raise identify_seconds, "
                    "or name its kind (KIND=URL) instead of auto"
                )
            if not waits:
                waits = True
                say(f"engine {name} at {entry.url} does not say what it is yet: waiting for it")
            await asyncio.sleep(min(_PAUSE_SECONDS, max(0.01, due_at - monotonic())))
    finally:
        await client.aclose()
    if found.kind == BUILT_IN:
        say(
            f"engine {name} at {entry.url} is none that an adapter knows: it is treated as {BUILT_IN}, "
            "and no stop can be proved there"
        )
    else:
        say(f"engine {name} at {entry.url} is {found.kind}")
    return found
