"""The probe's event schema: what an engine's own scheduler says, one frame a step.

An event is about one request and is a fact, never an intention: `AbortApplied` means that the
scheduler took the request out, not that somebody asked for it. Amounts are differences unless the
name says `_now`. `at` is seconds on the *engine's* monotonic clock; the collector knows the offset.

A frame carries only the requests that changed in that step. Frames are numbered: a hole in the
numbers is a gap, and the books ask for a `Snapshot` and say `gap` until it has come.

Structs are encoded as msgpack arrays with a short tag, so a frame of 32 changes stays near 1 KB. A
field may be added at the end with a default; anything else raises `SCHEMA_VERSION`.

The conversation
----------------
Each message is a 4-byte big-endian length and so many bytes of msgpack, in both directions. Neither side says
anything of worth before the other has proved that it knows the token, which itself never travels:

    engine                                   collector
    Greeting(schema, nonce)          ──▶
                                     ◀──     Challenge(schema, nonce, proof over both nonces)
    Hello(proof, who I am)           ──▶
                                     ◀──     Welcome, or Refused with the reason

Then frames, snapshots, gaps, answers and pongs go one way, commands and pings the other. The first three messages
never change their shape, so that two ends of different versions can at least say so. A later Hello on the same
connection (its proof is not looked at again) replaces what the first one said.
"""

from __future__ import annotations

import hashlib
import hmac
import operator
from typing import Literal

import msgspec

from stopguard.errors import EngineError

__all__ = [
    "HANDSHAKE_BYTES_MAX",
    "MESSAGE_BYTES_MAX",
    "NONCE_BYTES",
    "SCHEMA_VERSION",
    "TOKEN_CHARACTERS_MIN",
    "AbortApplied",
    "AbortArrived",
    "AbortNoop",
    "AbortRefused",
    "Action",
    "Added",
    "Answer",
    "BlocksFenced",
    "BlocksHeld",
    "BlocksReturned",
    "Challenge",
    "Command",
    "CommandAnswer",
    "Event",
    "Finished",
    "Frame",
    "FromCollector",
    "FromEngine",
    "Gap",
    "Greeting",
    "Hello",
    "HostHeld",
    "HostReturned",
    "Moved",
    "Ping",
    "Place",
    "Pong",
    "Preempted",
    "ProbeProtocolError",
    "Refusal",
    "Refused",
    "RequestNow",
    "Resumed",
    "SlotKind",
    "SlotReturned",
    "SlotTaken",
    "Snapshot",
    "TokensComputed",
    "TokensDropped",
    "TokensEmitted",
    "Welcome",
    "collector_proof",
    "decode_from_collector",
    "decode_from_engine",
    "decode_frame",
    "encode",
    "encode_frame",
    "engine_proof",
]

SCHEMA_VERSION = 2
MESSAGE_BYTES_MAX = 8 * 1024 * 1024
"""A snapshot of 50,000 requests fits."""
HANDSHAKE_BYTES_MAX = 64 * 1024
NONCE_BYTES = 32
TOKEN_CHARACTERS_MIN = 16

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
    """One step's changes and the totals after it. Blocks in blocks, `at` in engine seconds.

    `sequence` counts 1, 2, 3, ... for as long as the process lives. Each block of the pool is in use, free
    (`blocks_free_now`), or free and still filled with a prefix (`blocks_cached_now`): never in two of these.
    """

    sequence: int
    step: int
    at: float
    events: list[Event]
    running_now: int
    waiting_now: int
    blocks_free_now: int
    blocks_cached_now: int


# ---- the conversation -----------------------------------------------------------------------

Action = Literal["abort", "preempt", "hold", "resume", "prioritise", "snapshot"]
Answer = Literal["applied", "accepted", "unknown", "gone", "refused", "unsupported", "failed"]
Refusal = Literal["schema", "token", "full", "protocol"]


class ProbeProtocolError(EngineError):
    """The other end of a probe's connection sent what it may not."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """One message of the conversation."""


class Greeting(_Message, frozen=True, tag="greeting"):
    """The engine's first message. `nonce` is `NONCE_BYTES` random bytes."""

    schema_version: int
    nonce: bytes


class Challenge(_Message, frozen=True, tag="challenge"):
    """The collector's answer; `proof` is `collector_proof` and shows that it knows the token."""

    schema_version: int
    nonce: bytes
    proof: bytes


class Hello(_Message, frozen=True, tag="hello"):
    """Who speaks. `proof` is `engine_proof`; empty in a later hello on the same connection.

    `name` is the gateway's name for the engine where its operator gave one, else empty. `role` is what this process
    is inside the engine (engine, scheduler, api, ...), `rank` its data-parallel rank out of `ranks`, `process` its pid;
    `instance` is random and stays the same across reconnects. `blocks_total` blocks of `block_tokens` tokens each are
    the KV pool (0: not known, or this process has none). `commands` are the actions that this process carries out.
    `hooks_attached` and `hooks_missing` name hook points. `at` is now, on the engine's monotonic clock, in seconds.
    """

    proof: bytes
    engine: str
    engine_version: str
    instance: str
    name: str = ""
    role: str = "engine"
    rank: int = 0
    host: str = ""
    process: int = 0
    at: float = 0.0
    blocks_total: int = 0
    block_tokens: int = 0
    commands: tuple[Action, ...] = ()
    hooks_attached: tuple[str, ...] = ()
    hooks_missing: tuple[str, ...] = ()
    frames_dropped: int = 0
    ranks: int = 1


class RequestNow(_Message, frozen=True):
    """One request (or part of one) in a snapshot. Amounts are what it has now; tokens are totals so far.

    A token total of -1 says that the engine does not know it. `slots` is by kind.
    """

    request_id: str
    place: Place
    prompt_tokens: int = 0
    parent_id: str = ""
    blocks_held: int = 0
    blocks_fenced: int = 0
    host_blocks: int = 0
    tokens_computed: int = -1
    tokens_emitted: int = -1
    tokens_dropped: int = -1
    slots: dict[SlotKind, int] = {}


class Snapshot(_Message, frozen=True, tag="snapshot"):
    """Every request that the scheduler has, after the frame `sequence`; `command_id` is whose answer it is.

    A request that is not in it is not in the scheduler, and holds nothing: one that is over and whose blocks are not
    all back (they wait behind a fence, say) is in it, with the place `gone`. `complete` False: the engine has more
    than fit here, so that nothing follows from a request's absence.
    """

    command_id: int
    sequence: int
    step: int
    at: float
    requests: list[RequestNow]
    running_now: int
    waiting_now: int
    blocks_free_now: int
    blocks_cached_now: int
    complete: bool = True


class Gap(_Message, frozen=True, tag="gap"):
    """The sender had to drop frames; `frames_dropped` in all so far. What follows is newer than the hole."""

    frames_dropped: int


class CommandAnswer(_Message, frozen=True, tag="answer"):
    """What this process did with a command.

    `applied`: done, as the answer was given. `accepted`: it will be done, events follow. `unknown`: this process does
    not have the request. `gone`: it had it, and it is over. `refused`: not now, again after `retry_after_seconds`.
    `unsupported`: never. `failed`: tried, and `detail` says what happened.
    """

    command_id: int
    answer: Answer
    retry_after_seconds: float = 0.0
    detail: str = ""


class Pong(_Message, frozen=True, tag="pong"):
    """Answers a ping: when it was read and when this was written, on the engine's monotonic clock, in seconds."""

    ping_id: int
    received_at: float
    sent_at: float


class Welcome(_Message, frozen=True, tag="welcome"):
    """The proof was right. Frames may follow."""


class Refused(_Message, frozen=True, tag="refused"):
    """The connection is of no use; `detail` is one line for the operator."""

    refusal: Refusal
    detail: str = ""


class Command(_Message, frozen=True, tag="command"):
    """Do `action` to one request, between two steps; answered by a `CommandAnswer` with its `command_id`.

    `abort` ends it. `preempt` takes its room away and holds it until `resume`. `hold` only keeps it from being
    scheduled. `prioritise` gives it another `priority`, with the engine's own sign. `snapshot` (no request) is
    answered by a `Snapshot` instead.
    """

    command_id: int
    action: Action
    request_id: str = ""
    reason: str = ""
    priority: int = 0


class Ping(_Message, frozen=True, tag="ping"):
    """Measures the clocks; answered by a `Pong`."""

    ping_id: int


FromEngine = Greeting | Hello | Frame | Snapshot | Gap | CommandAnswer | Pong
FromCollector = Challenge | Welcome | Refused | Command | Ping

_encoder = msgspec.msgpack.Encoder(enc_hook=operator.index)  # an engine's own integers (numpy's, say) are integers
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_from_collector: msgspec.msgpack.Decoder[FromCollector] = msgspec.msgpack.Decoder(FromCollector)


def encode_frame(frame: Frame) -> bytes:
    """One frame as msgpack."""
    return _encoder.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """The frame in `data`; `msgspec.DecodeError` (of which `ValidationError` is a kind) when it is not one."""
    return _frame_decoder.decode(data)


def encode(message: FromEngine | FromCollector) -> bytes:
    """One message with its length in front. `ProbeProtocolError` when it is too long to send."""
    payload = _encoder.encode(message)
    if len(payload) > MESSAGE_BYTES_MAX:
        raise ProbeProtocolError(f"a {type(message).__name__} of {len(payload)} bytes is too long to send")
    return len(payload).to_bytes(4, "big") + payload


def decode_from_engine(payload: bytes | bytearray | memoryview) -> FromEngine:
    """What an engine said (without its length). `msgspec.DecodeError` when it makes no sense."""
    return _from_engine.decode(payload)


def decode_from_collector(payload: bytes | bytearray | memoryview) -> FromCollector:
    """What a collector said (without its length). `msgspec.DecodeError` when it makes no sense."""
    return _from_collector.decode(payload)


def collector_proof(token: str, engine_nonce: bytes, collector_nonce: bytes) -> bytes:
    """Shows the engine that the collector knows the token."""
    return _proof(token, b"stopguard collector", engine_nonce, collector_nonce)


def engine_proof(token: str, engine_nonce: bytes, collector_nonce: bytes) -> bytes:
    """Shows the collector that the engine knows the token."""
    return _proof(token, b"stopguard engine", engine_nonce, collector_nonce)


def _proof(token: str, *parts: bytes) -> bytes:
    return hmac.digest(token.encode(), b"|".join(parts), hashlib.sha256)
