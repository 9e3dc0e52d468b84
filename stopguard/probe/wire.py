"""The probe's event schema: what an engine's own scheduler says, one frame a step.

An event is about one request and is a fact, never an intention: `AbortApplied` means that the
scheduler took the request out, not that somebody asked for it. Amounts are differences unless the
name says `_now`. `at` is seconds on the *engine's* monotonic clock; the collector knows the offset.

A frame carries only the requests that changed in that step. Frames are numbered: a hole in the
numbers is a gap, and the books ask for a `Snapshot` and say `gap` until it has come.

Structs are encoded as msgpack arrays with a short tag, so a frame of 32 changes stays near 1 KB. A
field may be added at the end with a default; anything else raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "SCHEMA_VERSION",
    "AbortApplied",
    "AbortArrived",
    "AbortNoop",
    "AbortRefused",
    "Added",
    "BlocksFenced",
    "BlocksHeld",
    "BlocksReturned",
    "Event",
    "Finished",
    "Frame",
    "HostHeld",
    "HostReturned",
    "Moved",
    "Place",
    "Preempted",
    "Resumed",
    "SlotKind",
    "SlotReturned",
    "SlotTaken",
    "TokensComputed",
    "TokensDropped",
    "TokensEmitted",
    "decode_frame",
    "encode_frame",
]

SCHEMA_VERSION = 1

Place = Literal["waiting", "running", "preempted", "paused", "transferring", "gone"]
SlotKind = Literal["lora", "encoder", "grammar", "speculative"]


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One fact about one request. `request_id` is the id that StopGuard gave it."""

    request_id: str
    at: float


class Added(_Event, frozen=True, tag="add"):
    """The scheduler has the request. `parent_id` names the request whose child it is (`n` > 1), else is empty."""

    prompt_tokens: int
    parent_id: str = ""


class Moved(_Event, frozen=True, tag="mov"):
    """The request now sits in `place`; `gone` is said exactly once, when the scheduler has forgotten it."""

    place: Place


class BlocksHeld(_Event, frozen=True, tag="hld"):
    """`blocks` more KV blocks belong to the request (references: a shared prefix block counts for each holder)."""

    blocks: int


class BlocksFenced(_Event, frozen=True, tag="fnc"):
    """`blocks` were given up but may still be written by a step in flight; reusable once step `fence` is done."""

    blocks: int
    fence: int


class BlocksReturned(_Event, frozen=True, tag="ret"):
    """`blocks` are reusable again (back in the pool, or in the prefix cache and evictable)."""

    blocks: int
    fenced: bool = False


class HostHeld(_Event, frozen=True, tag="hoh"):
    """`blocks` of the request's KV were copied to the host, to be restored when it resumes."""

    blocks: int


class HostReturned(_Event, frozen=True, tag="hor"):
    """`blocks` of host memory were given back: restored, or no longer wanted."""

    blocks: int


class SlotTaken(_Event, frozen=True, tag="slt"):
    """The request took a slot beside the KV blocks."""

    kind: SlotKind
    slots: int = 1


class SlotReturned(_Event, frozen=True, tag="slr"):
    """The request gave a slot back."""

    kind: SlotKind
    slots: int = 1


class TokensComputed(_Event, frozen=True, tag="cmp"):
    """`tokens` were sampled by the model and have not left the engine."""

    tokens: int


class TokensEmitted(_Event, frozen=True, tag="emt"):
    """`tokens` were handed to the engine's front end for the client."""

    tokens: int


class TokensDropped(_Event, frozen=True, tag="drp"):
    """`tokens` will never be delivered: `stale` when they came after the stop took effect, else `discarded`."""

    tokens: int
    stale: bool = False


class AbortArrived(_Event, frozen=True, tag="aar"):
    """The scheduler has read the abort; it has not acted."""


class AbortApplied(_Event, frozen=True, tag="aap"):
    """The scheduler took the request out because of the abort: this is the ack."""


class AbortNoop(_Event, frozen=True, tag="ano"):
    """The abort named a request that the scheduler does not have (unknown, finished, or aborted before)."""


class AbortRefused(_Event, frozen=True, tag="arf"):
    """The scheduler will not apply the abort now; try again after `retry_after_seconds`."""

    retry_after_seconds: float = 0.0


class Preempted(_Event, frozen=True, tag="pre"):
    """The request lost its room and lives on; `recompute_tokens` must be computed again when it returns."""

    recompute_tokens: int


class Resumed(_Event, frozen=True, tag="res"):
    """A preempted request runs again."""


class Finished(_Event, frozen=True, tag="fin"):
    """The request ended: `reason` is the engine's own word (stop, length, abort, error, …)."""

    reason: str


Event = (
    Added
    | Moved
    | BlocksHeld
    | BlocksFenced
    | BlocksReturned
    | HostHeld
    | HostReturned
    | SlotTaken
    | SlotReturned
    | TokensComputed
    | TokensEmitted
    | TokensDropped
    | AbortArrived
    | AbortApplied
    | AbortNoop
    | AbortRefused
    | Preempted
    | Resumed
    | Finished
)


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="frame"):
    """One step's changes and the totals after it. Blocks in blocks, `at` in engine seconds."""

    sequence: int
    step: int
    at: float
    events: list[Event]
    running_now: int
    waiting_now: int
    blocks_free_now: int
    blocks_cached_now: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """One frame as msgpack."""
    return _encoder.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """The frame in `data`; `msgspec.DecodeError` (of which `ValidationError` is a kind) when it is not one."""
    return _decoder.decode(data)
