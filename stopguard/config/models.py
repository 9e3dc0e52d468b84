"""Every setting: its type, its default, and what it does. docs/configuration.md is generated from this module.

The tables of the data plane (`limits`, `timeouts`, `liveness`, the engines' connections) have the names and the
defaults of `stopguard.gateway.settings`; a test holds the two against each other. `off` is how "there is none"
is written, since TOML has no null.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from stopguard.config.fields import Count, Seconds, Section, names
from stopguard.config.preemption import PreemptionEntry
from stopguard.config.probe import ProbeEntry
from stopguard.config.resume import ResumeEntry
from stopguard.config.values import NAME, OFF, Address, parse_address, parse_policy
from stopguard.stops import ClientPolicy

__all__ = [
    "Aborts",
    "Admin",
    "Books",
    "Configuration",
    "ConnectionSettings",
    "EngineEntry",
    "JournalSettings",
    "LimitSettings",
    "ListenSettings",
    "LivenessSettings",
    "LogSettings",
    "PolicySettings",
    "ServerTls",
    "StopSettings",
    "Tenant",
    "TimeoutSettings",
    "UpstreamTls",
]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TOKEN_LENGTH_MIN = 16


def _from_text(parse: Callable[[str], Any]) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _off_is_none(value: Any) -> Any:
    return None if value == OFF else value


def _list_to_tuple(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _engine_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name for an engine: use letters, digits, '.', '_', '-', at most 64")
    return name


def _journal_policy(policy: str | float) -> str | float:
    if policy not in ("all", "stops") and (isinstance(policy, str) or not 0 <= policy <= 1):
        raise ValueError(f"{policy!r} is not one of all, stops, or a share of the normal finishes from 0 to 1")
    return policy


SecondsOrOff = Annotated[Seconds | None, BeforeValidator(_off_is_none)]
FilePath = Annotated[Path, _from_text(Path)]
ListenAddress = Annotated[Address, _from_text(parse_address)]
AddressOrOff = Annotated[ListenAddress | None, BeforeValidator(_off_is_none)]
Policy = Annotated[ClientPolicy, _from_text(parse_policy)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_list_to_tuple)]


class ServerTls(Section):
    """HTTPS for clients of ours."""

    certificate_file: FilePath = Field(description="The certificate chain, PEM.")
    key_file: FilePath = Field(description="Its private key, PEM.")
    key_password: SecretStr | None = Field(default=None, description="What the key is encrypted with.")
    client_ca_file: FilePath | None = Field(
        default=None, description="Only clients with a certificate of this CA are served."
    )


class UpstreamTls(Section):
    """HTTPS to an engine."""

    ca_file: FilePath | None = Field(
        default=None, description="The CA of the engine's certificate, instead of the system's."
    )
    certificate_file: FilePath | None = Field(
        default=None, description="Our own certificate, where the engine wants one."
    )
    key_file: FilePath | None = Field(default=None, description="Its private key.")
    verify: bool = Field(
        default=True, description="`false` accepts any certificate. Anybody on the way can then read along."
    )

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("key_file needs certificate_file beside it")
        return self


class ListenSettings(Section):
    """The data port: what clients use in the engine's place."""

    addresses: Annotated[tuple[ListenAddress, ...], BeforeValidator(_list_to_tuple)] = Field(
        default=(Address("127.0.0.1", 8080),),
        min_length=1,
        max_length=16,
        description="Where to listen, `HOST:PORT`, one or a list.",
        json_schema_extra=names(variable="STOPGUARD_LISTEN", flag="--listen"),
    )
    backlog: Count = Field(default=4096, description="Connections that the kernel may hold before they are accepted.")
    reuse_port: bool = Field(default=False, description="Let several processes share the port (SO_REUSEPORT).")
    tls: ServerTls | None = Field(default=None, description="HTTPS on the data port.")


class Admin(Section):
    """The admin port: everything about every request, and stops for all of them. See docs/admin.md."""

    listen: AddressOrOff = Field(
        default=Address("127.0.0.1", 9090),
        description="Where to listen, or `off`. Other than loopback needs a token.",
        json_schema_extra=names(variable="STOPGUARD_ADMIN", flag="--admin"),
    )
    token: SecretStr | None = Field(
        default=None, description="What callers must send as `Authorization: Bearer TOKEN`."
    )
    token_file: FilePath | None = Field(default=None, description="A file with the token, better than writing it here.")
    tls: ServerTls | None = Field(default=None, description="HTTPS on the admin port.")

    @model_validator(mode="after")
    def _reachable_only_with_a_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("give token or token_file, not both")
        if self.token is not None and len(self.token.get_secret_value()) < _TOKEN_LENGTH_MIN:
            raise ValueError(f"the token is shorter than {_TOKEN_LENGTH_MIN} characters: try `openssl rand -hex 32`")
        open_to_others = self.listen is not None and not self.listen.is_loopback
        if open_to_others and self.token is None and self.token_file is None:
            raise ValueError(
                f"{self.listen} can be reached by others: set admin.token_file or STOPGUARD_ADMIN_TOKEN, "
                "or listen on 127.0.0.1"
            )
        return self


class ConnectionSettings(Section):
    """How engines are used. Each engine may have its own values, beside its `url`."""

    concurrent_requests: Count = Field(
        default=16_384, description="Requests at one engine at the same time; more wait here."
    )
    idle_connections: Count = Field(
        default=256, description="Connections kept open to one engine while nothing uses them."
    )
    idle_seconds: Seconds = Field(
        default=4.0, description="How long they are kept. Stay below the engine's own limit (uvicorn closes after 5 s)."
    )
    failures_to_eject: Count = Field(
        default=3, description="Failures in a row after which an engine gets no new requests."
    )
    ejected_seconds: Seconds = Field(default=1.0, description="How long, the first time. It doubles with each time.")
    ejected_longest_seconds: Seconds = Field(default=30.0, description="And never more than this.")
    refresh_seconds: Seconds = Field(default=10.0, description="How often an engine's list of models is read.")


class EngineEntry(Section):
    """One engine. The name of its table is its name in metrics, books and messages."""

    kind: str = Field(
        default="openai",
        min_length=1,
        description="Which adapter speaks to it. `openai` is any server with OpenAI's API; others come as packages; "
        "`auto` asks it at the start, and finds the adapter that knows it.",
    )
    url: str = Field(description="Its base URL, without the path of a route: `http://127.0.0.1:8000`.")
    api_key: SecretStr | None = Field(
        default=None, description="Sent to the engine as a bearer token, in the place of what the client sent."
    )
    api_key_env: str | None = Field(default=None, description="The environment variable that holds this key.")
    api_key_file: FilePath | None = Field(default=None, description="The file that holds this key.")
    tls: UpstreamTls | None = Field(default=None, description="How to check an `https` engine.")
    concurrent_requests: Count | None = Field(default=None, description="Instead of `connections.concurrent_requests`.")
    idle_connections: Count | None = Field(default=None, description="Instead of `connections.idle_connections`.")
    idle_seconds: Seconds | None = Field(default=None, description="Instead of `connections.idle_seconds`.")

    @model_validator(mode="after")
    def _usable(self) -> Self:
        try:
            parts = urlsplit(self.url)
            hostname, _ = parts.hostname, parts.port
        except ValueError:
            parts, hostname = None, None
        if parts is None or parts.scheme not in ("http", "https") or not hostname or parts.query or parts.fragment:
            raise ValueError(f"{_without_credentials(self.url)!r} is no base URL: write it like http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise ValueError("a URL is no place for a password: use api_key_env or api_key_file")
        if sum(way is not None for way in (self.api_key, self.api_key_env, self.api_key_file)) > 1:
            raise ValueError("give api_key, api_key_env or api_key_file, not more than one")
        if self.tls is not None and parts.scheme == "http":
            raise ValueError(f"tls is set, but {self.url} is http: write https")
        return self


class LimitSettings(Section):
    """How much of everything. Reaching a limit is an error that says so."""

    connections: Count = Field(default=32_768, description="Connections of clients.")
    head_bytes: Count = Field(default=65_536, description="The head of a request.")
    header_count: Count = Field(default=128, description="Headers of a request.")
    target_bytes: Count = Field(default=16_384, description="The target (path and query) of a request.")
    body_bytes: Count = Field(default=64 * 1024 * 1024, description="The body of a request.")
    buffered_body_bytes: Count = Field(
        default=1024 * 1024 * 1024, description="All request bodies together that wait to be sent to an engine."
    )
    pipelined_requests: Count = Field(
        default=16, description="Complete requests that wait on one connection behind the one in progress."
    )
    write_buffer_bytes: Count = Field(
        default=65_536, description="What may wait for one slow client, before its engine's stream is paused."
    )
    concurrent_requests: Count = Field(default=16_384, description="Requests in StopGuard at the same time.")
    queued_requests: Count = Field(
        default=1024, description="Requests that wait for an engine to have room; one more is answered 429."
    )
    response_head_bytes: Count = Field(default=65_536, description="The head of an engine's response.")
    cancel_waiters: Count = Field(default=1024, description="Calls of the cancel API that wait (`?wait=settled`).")
    group_ids: Count = Field(default=1000, description="Ids in one call of the cancel API.")
    recent_requests: Count = Field(default=4096, description="Finished requests that the cancel API still knows.")
    joined_bytes: Count = Field(
        default=4 * 1024 * 1024,
        description="What is kept of a response that another request may join (see `idempotency`).",
    )


class TimeoutSettings(Section):
    """How long everything may take, in seconds. `off` means no such limit, where that is allowed."""

    head_seconds: Seconds = Field(default=10.0, description="A client may take to send the head of a request.")
    body_seconds: Seconds = Field(default=120.0, description="And its body.")
    keep_alive_seconds: Seconds = Field(
        default=75.0, description="A client's connection may rest between two requests."
    )
    stall_seconds: Seconds = Field(
        default=30.0, description="A client may leave a full buffer unread; then it has left."
    )
    linger_seconds: Seconds = Field(
        default=2.0, description="A refused upload is read on, so that the refusal can be read."
    )
    connect_seconds: Seconds = Field(default=5.0, description="Connecting to an engine.")
    queue_seconds: SecondsOrOff = Field(default=60.0, description="A request may wait for an engine to have room.")
    first_token_seconds: SecondsOrOff = Field(
        default=None, description="Until the first byte of output. Per request: `X-StopGuard-First-Token-Timeout`."
    )
    total_seconds: SecondsOrOff = Field(
        default=None, description="From arrival to end. Per request: `X-StopGuard-Timeout`."
    )
    idle_stream_seconds: SecondsOrOff = Field(default=None, description="Between two pieces of a stream.")
    longest_total_seconds: SecondsOrOff = Field(
        default=None, description="The most that a client may ask for with `X-StopGuard-Timeout`."
    )
    cancel_wait_seconds: Seconds = Field(
        default=60.0, description="The most that `?wait=settled&timeout=` may ask for."
    )
    abort_seconds: Seconds = Field(default=5.0, description="An engine's abort interface may take to answer.")
    drain_seconds: Seconds = Field(default=30.0, description="On shutdown, until requests that still run are stopped.")


class LivenessSettings(Section):
    """How a client that vanished without a word is found. The defaults take 15 seconds at most."""

    half_close: Literal["cancel", "allow"] = Field(
        default="cancel",
        description="What a client means that closes its sending side only: `cancel`, it left (a full close looks "
        "the same); `allow`, it waits for the response, and one that really left is noticed only when something is "
        "written to it: for an answer that is not streamed never.",
        json_schema_extra=names(variable="STOPGUARD_HALF_CLOSE", flag="--half-close"),
    )
    keep_alive_idle_seconds: int = Field(default=5, ge=0, description="TCP keep-alive: silence before the first probe.")
    keep_alive_interval_seconds: int = Field(
        default=3, ge=0, description="Between two probes. 0 is the system's value."
    )
    keep_alive_probes: int = Field(default=3, ge=0, description="Unanswered probes until the client has left.")
    user_timeout_seconds: float = Field(
        default=12.0,
        ge=0,
        allow_inf_nan=False,
        description="TCP_USER_TIMEOUT: how long sent bytes may stay unacknowledged.",
    )


class Tenant(Section):
    """Somebody with a policy or a class of their own, known by their API keys. No key needs to stand in this file."""

    policy: Policy | None = Field(
        default=None, description="`stop`, `drain` or `grace=SECONDS`. Without it the route's policy counts."
    )
    usual_class: str = Field(
        default="", description="The class of its requests, instead of `preemption.default_class`."
    )
    ceiling: str = Field(default="", description="The most that it may ask for, instead of `preemption.ceiling`.")
    weight: float = Field(
        default=1.0, gt=0, le=1000, description="Its share of a queue that others wait in, relative to theirs."
    )
    key_sha256: Texts = Field(
        default=(),
        max_length=10_000,
        description="SHA-256 of each key, 64 hexadecimal digits: `printf %s KEY | sha256sum`.",
    )
    key_env: str | None = Field(default=None, description="The environment variable that holds one more key.")
    key_file: FilePath | None = Field(default=None, description="The file that holds one more key.")

    @model_validator(mode="after")
    def _has_keys(self) -> Self:
        for digest in self.key_sha256:
            if not _DIGEST.fullmatch(digest):
                raise ValueError("key_sha256 must be 64 hexadecimal digits in lower case: printf %s KEY | sha256sum")
        if not self.key_sha256 and self.key_env is None and self.key_file is None:
            raise ValueError("it needs a key: give key_sha256, key_env or key_file")
        return self


class PolicySettings(Section):
    """What happens to the work when its client leaves. By tenant goes before by route, which goes before `default`."""

    default: Policy = Field(
        default=ClientPolicy(),
        description="`stop` at once, `drain` (let it finish, for billing), or `grace=SECONDS`.",
        json_schema_extra=names(variable="STOPGUARD_POLICY", flag="--policy"),
    )
    routes: dict[str, Policy] = Field(
        default={},
        max_length=256,
        description="By path (`/v1/embeddings`) or kind of route (`chat`, `completions`, `responses`, `messages`, "
        "`embeddings`, `rerank`, `audio`, `native`, `other`).",
        json_schema_extra=names(flag="--policy"),
    )
    tenants: dict[str, Tenant] = Field(default={}, max_length=10_000, description="By API key.")


class StopSettings(Section):
    """How patient a stop is, in seconds."""

    settle_seconds: Seconds = Field(
        default=10.0, description="From a stop (or a finish) to five closed ledgers. What is open later is a leak."
    )
    tell_seconds: Seconds = Field(
        default=0.5,
        description="A client that is still connected waits for the ack, so that it can be told `safe to retry`.",
    )
    preempt_seconds: Seconds = Field(default=5.0, description="Until a preemption that nobody confirmed has failed.")
    write_off_seconds: Seconds = Field(
        default=300.0, description="How long an overdue request is kept open for a late end."
    )
    gauge_apart_seconds: Seconds = Field(
        default=0.05, description="How far apart two readings of an engine's gauges must be to count as two."
    )


class Aborts(Section):
    """How often to knock at an engine's doors. `off` leaves what the engine's adapter says."""

    tries_per_door: Annotated[Count | None, BeforeValidator(_off_is_none)] = Field(
        default=None, description="Knocks at one door before the next door is tried."
    )
    tries: Annotated[Count | None, BeforeValidator(_off_is_none)] = Field(default=None, description="Knocks in all.")
    first_wait_seconds: SecondsOrOff = Field(default=None, description="After the first knock.")
    factor: Annotated[Annotated[float, Field(ge=1, le=100)] | None, BeforeValidator(_off_is_none)] = Field(
        default=None, description="By how much the wait grows with each knock."
    )
    longest_wait_seconds: SecondsOrOff = Field(default=None, description="And never more than this.")


class Books(Section):
    """The limits of the book that all requests are in."""

    open_requests: Count = Field(default=100_000, description="Requests whose books are open.")
    recent: Count = Field(default=256, description="Closed requests that are remembered whole, for the admin port.")
    entries_per_request: Count = Field(default=4096, description="Entries of one request.")
    engine_models: Count = Field(default=256, description="Pairs of engine and model with totals of their own.")
    overdue: Count = Field(default=10_000, description="Requests with something overdue.")
    leaks: Count = Field(default=10_000, description="Leaks that are remembered.")


class JournalSettings(Section):
    """The journal on the disk: what happened, also after a crash. `stopguard explain ID` reads it."""

    path: Annotated[FilePath | None, BeforeValidator(_off_is_none)] = Field(
        default=None,
        description="The file, made when it is missing. `off`: no journal.",
        json_schema_extra=names(variable="STOPGUARD_JOURNAL", flag="--journal"),
    )
    policy: Annotated[str | float, AfterValidator(_journal_policy)] = Field(
        default="stops",
        description="Which normal finishes are kept whole: `all`, none (`stops`), or a share from 0 to 1. Stops, "
        "failures and leaks always are.",
    )
    keep_seconds: Seconds = Field(default=7 * 86_400.0, description="What is older is deleted.")
    file_bytes: Count = Field(default=512 * 1024 * 1024, description="When the file is larger, the oldest is deleted.")
    flush_seconds: Seconds = Field(default=0.25, description="How often it is written: what a crash can lose.")
    check: bool = Field(default=True, description="Read the whole file at the start, to find damage.")


class LogSettings(Section):
    """What is said while it runs, on stderr, one line an event. Never a secret, never a prompt."""

    format: Literal["text", "json"] = Field(
        default="text", description="For people or for programs.", json_schema_extra=names(flag="--log-format")
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="From which weight on.", json_schema_extra=names(flag="--log-level")
    )


class Configuration(Section):
    """Everything that can be set."""

    engines: dict[Annotated[str, AfterValidator(_engine_name)], EngineEntry] = Field(
        default={},
        max_length=256,
        description="The engines, by name.",
        json_schema_extra=names(flag="--engine"),
    )
    listen: ListenSettings = ListenSettings()
    admin: Admin = Admin()
    policies: PolicySettings = PolicySettings()
    liveness: LivenessSettings = LivenessSettings()
    idempotency: Literal["off", "supersede", "join"] = Field(
        default="supersede",
        description="What a request does whose `Idempotency-Key` belongs to one that is still alive: `supersede` stops "
        "the earlier one, and confirms it, first; `join` gets the earlier one's response; `off` ignores the key.",
    )
    timeouts: TimeoutSettings = TimeoutSettings()
    limits: LimitSettings = LimitSettings()
    connections: ConnectionSettings = ConnectionSettings()
    stops: StopSettings = StopSettings()
    aborts: Aborts = Aborts()
    books: Books = Books()
    preemption: PreemptionEntry = PreemptionEntry()
    resume: ResumeEntry = ResumeEntry()
    probe: ProbeEntry = ProbeEntry()
    journal: JournalSettings = JournalSettings()
    log: LogSettings = LogSettings()
    allow_engine_control: bool = Field(
        default=False,
        description="Whether clients may call an engine's own control routes (abort everything, pause, …).",
    )
    identify_seconds: Seconds = Field(
        default=60.0, description="How long the start waits for engines of the kind `auto` to say what they are."
    )
    workers: int = Field(default=1, description="Processes of the data plane. 1 in this version.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.workers != 1:
            raise ValueError(f"workers is {self.workers}, and this version has 1: start more replicas instead")
        for name, tenant in self.policies.tenants.items():
            for wanted_class in (tenant.usual_class, tenant.ceiling):
                if wanted_class and wanted_class not in self.preemption.classes:
                    known = ", ".join(sorted(self.preemption.classes))
                    raise ValueError(f"policies.tenants.{name}: {wanted_class!r} is no class; there are: {known}")
        wanted = self.admin.listen
        if wanted is not None and wanted.port and wanted in self.listen.addresses:
            raise ValueError(f"listen and admin both want {wanted}: give them different ports")
        return self


def _without_credentials(url: str) -> str:
    """`url` without what stands before an ``@``, which may be a password."""
    return re.sub(r"//[^/@]*@", "//…@", url)
