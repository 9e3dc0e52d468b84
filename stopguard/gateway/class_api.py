"""Changing the class of a request that lives, on the data port.

=====================================  ===================================================================
`POST /v1/requests/{id}/class`         `{"class": "urgent"}`: from now on it is of that class; `{id}` is ours, or
                                       the client's own
=====================================  ===================================================================

As everywhere below `/v1/requests/` only the credentials that made a request may do so, and what they get is at most
their tenant's ceiling. The answer says what the class is now, and `lowered_from` where more was asked for.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from stopguard.errors import ClientError
from stopguard.preemption import ClassesOff

if TYPE_CHECKING:
    from stopguard.gateway.exchange import Exchange
    from stopguard.gateway.preempting import Preempting
    from stopguard.gateway.server import Gateway

__all__ = ["change_class", "give_class"]


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """The body."""

    name: str = msgspec.field(name="class")


_decoder = msgspec.json.Decoder(_Wanted)


def change_class(gateway: Gateway, exchanges: list[Exchange], digest: str, body: bytes) -> dict[str, object]:
    """Do what `body` asks, as far as this tenant may. Raises `ClientError`, with the status that fits."""
    try:
        wanted = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientError(f'the body must be {{"class": NAME}}: {error}') from None
    preempting, at = _preempting(gateway), monotonic()
    granted = preempting.classes.grant(digest, header=wanted.name)
    changed = [preempting.reclass(each, granted.priority_class, "its client", at) for each in exchanges]
    answer: dict[str, object] = {"class": granted.priority_class.name, "changed": any(changed)}
    if granted.lowered_from:
        answer["lowered_from"] = granted.lowered_from
    return answer


def give_class(gateway: Gateway, exchange: Exchange, name: str, by: str) -> bool:
    """Give `exchange` the class `name`, whoever made it; whether that changed anything. Raises `ClientError`."""
    preempting = _preempting(gateway)
    return preempting.reclass(exchange, preempting.classes.named(name), by, monotonic())


def _preempting(gateway: Gateway) -> Preempting:
    if gateway.preempting is None:
        raise ClassesOff("there are no classes here: preemption.mode is off")
    return gateway.preempting
