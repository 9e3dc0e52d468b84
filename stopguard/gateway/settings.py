"""What can be set about the data plane, with its limits and its defaults.

Plain values, no parsing: the configuration file, the environment and the flags are read elsewhere and
end up here. Every queue, buffer, map and wait of the gateway has its limit in this file; `None` in a
timeout means that there is no such deadline.
"""

from __future__ import annotations

import enum
import ssl

import msgspec

from stopguard.errors import ConfigurationError
from stopguard.preemption.settings import PreemptionSettings
from stopguard.stops import ClientPolicy

__all__ = [
    "EngineSettings",
    "GatewaySettings",
    "HalfClose",
    "Idempotency",
    "Limits",
    "Liveness",
    "Listener",
    "Policies",
    "ResumeSettings",
    "Timeouts",
]


class HalfClose(enum.StrEnum):
    """What a client means that closes its sending side and keeps the other open."""

    CANCEL = "cancel"
    """It left. A full close and a half-close look the same from here, and nearly all are full ones."""
    ALLOW = "allow"
    """It waits for the response. A full close is then only seen by a reset, when something is written."""


class Idempotency(enum.StrEnum):
    """What a request does whose `Idempotency-Key` belongs to one that is still alive."""

    OFF = "off"
    SUPERSEDE = "supersede"
    """The earlier one is stopped, and confirmed stopped, before the new one starts."""
    JOIN = "join"
    """The new one gets the response of the earlier one, from its beginning."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything. Bytes, counts; each more than zero."""

    connections: int = 32_768
    head_bytes: int = 65_536
    header_count: int = 128
    target_bytes: int = 16_384
    body_bytes: int = 64 * 1024 * 1024
    buffered_body_bytes: int = 1024 * 1024 * 1024
    """All request bodies together that wait to be sent to an engine."""
    pipelined_requests: int = 16
    """Complete requests that wait on one connection behind the one in progress."""
    write_buffer_bytes: int = 65_536
    """What may wait for one client that reads slowly, before its engine's stream is paused."""
    concurrent_requests: int = 16_384
    queued_requests: int = 1024
    """Requests that wait in StopGuard for an engine to have room; one more is answered 429."""
    response_head_bytes: int = 65_536
    cancel_waiters: int = 1024
    group_ids: int = 1000
    """Ids in one call of the cancel API."""
    recent_requests: int = 4096
    """Finished requests that the cancel API still knows."""
    joined_bytes: int = 4 * 1024 * 1024
    """What is kept of a response that another request with the same idempotency key may join."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long everything may take, in seconds."""

    head_seconds: float = 10.0
    body_seconds: float = 120.0
    keep_alive_seconds: float = 75.0
    """How long a client's connection may rest between two requests."""
    stall_seconds: float = 30.0
    """How long a client may leave a full buffer unread."""
    linger_seconds: float = 2.0
    """How long a refused upload is read on, so that its client can read the refusal."""
    connect_seconds: float = 5.0
    queue_seconds: float | None = 60.0
    first_token_seconds: float | None = None
    total_seconds: float | None = None
    idle_stream_seconds: float | None = None
    longest_total_seconds: float | None = None
    """The most that a client may ask for with `X-StopGuard-Timeout`."""
    cancel_wait_seconds: float = 60.0
    """The most that `?wait=settled&timeout=` may ask for."""
    abort_seconds: float = 5.0
    """How long an engine's abort interface may take to answer."""
    drain_seconds: float = 30.0
    """On shutdown: how long requests may go on before the rest is stopped."""


class Liveness(msgspec.Struct, frozen=True, kw_only=True):
    """How a client that vanished without a word is found; see `stopguard.gateway.liveness`.

    With the defaults it takes 15 seconds at most. 0 leaves the operating system's value.
    """

    half_close: HalfClose = HalfClose.CANCEL
    keep_alive_idle_seconds: int = 5
    keep_alive_interval_seconds: int = 3
    keep_alive_probes: int = 3
    user_timeout_seconds: float = 12.0


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to the work when its client leaves.

    The most particular one counts: by key before by route before the default. `by_route` has a path
    (``/v1/embeddings``) or a kind of route (``embeddings``); `by_key` the SHA-256 of an API key in
    hexadecimal, so that no secret needs to stand in a configuration file.
    """

    default: ClientPolicy = ClientPolicy()
    by_route: dict[str, ClientPolicy] = {}
    by_key: dict[str, ClientPolicy] = {}


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine is used."""

    concurrent_requests: int = 16_384
    idle_connections: int = 256
    idle_seconds: float = 4.0
    """Connections that rest longer are closed: uvicorn closes them after 5 s, and a request that crosses a
    close can be neither proved sent nor proved unsent."""
    failures_to_eject: int = 3
    ejected_seconds: float = 1.0
    ejected_longest_seconds: float = 30.0
    refresh_seconds: float = 10.0
    """How often its list of models is read."""
    tls: ssl.SSLContext | None = None
    extra_headers: tuple[tuple[str, str], ...] = ()
    """Sent with every request; they take the place of the client's headers of the same name."""


class ResumeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream that was cut goes on; see `stopguard.gateway.parking`."""

    failover: bool = False
    """Continue a stream whose engine was lost at another one that serves the same model."""
    failovers: int = 2
    """How often one request may be continued that way."""
    tries: int = 5
    """Attempts to continue in a row that may fail before the stream is ended with an error."""
    ack_seconds: float = 1.0
    """How long a preempted request's engine has to show that it let go; what takes longer is not waited for."""
    comment_seconds: float = 10.0
    """How often a comment (`: preempted`) keeps the connection of a parked stream awake."""
    kept_tokens: int = 262_144
    """Tokens of one answer that are kept; a longer one is passed on, and cannot be continued any more."""
    parked_requests: int = 1024

    def __post_init__(self) -> None:
        for name in ("tries", "ack_seconds", "comment_seconds", "kept_tokens", "parked_requests"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"resume.{name} must be more than zero, not {getattr(self, name)}")


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """One address to listen on. `tls` makes it HTTPS; `reuse_port` lets several processes share it."""

    host: str = "127.0.0.1"
    port: int = 8080
    tls: ssl.SSLContext | None = None
    reuse_port: bool = False
    backlog: int = 4096


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about the data plane."""

    listeners: tuple[Listener, ...] = (Listener(),)
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    liveness: Liveness = Liveness()
    policies: Policies = Policies()
    idempotency: Idempotency = Idempotency.SUPERSEDE
    preemption: PreemptionSettings = msgspec.field(default_factory=PreemptionSettings)
    resume: ResumeSettings = ResumeSettings()
    allow_engine_control: bool = False
    """Whether clients may call an engine's own control routes (abort everything, pause, …) through us."""

    def __post_init__(self) -> None:
        for group in (self.limits, self.timeouts):
            for name in group.__struct_fields__:
                value = getattr(group, name)
                if value is not None and not value > 0:
                    raise ConfigurationError(f"{name} must be more than zero, not {value}")
