"""From a configuration to the parts that it describes: engines, settings of the data plane, TLS, the journal.

Everything that can be wrong with files and secrets is found here, before anything listens. This is what
`stopguard serve --check` runs.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from pydantic import SecretStr

from stopguard.config import Address, Configuration, EngineEntry, ServerTls, Tenant, UpstreamTls, read_secret
from stopguard.engines.protocol import Engine
from stopguard.engines.registry import AUTO, BUILT_IN, create
from stopguard.errors import ConfigurationError
from stopguard.gateway.probing import ProbeSettings
from stopguard.gateway.settings import (
    EngineSettings,
    GatewaySettings,
    HalfClose,
    Idempotency,
    Limits,
    Listener,
    Liveness,
    Policies,
    ResumeSettings,
    Timeouts,
)
from stopguard.ledger import BookLimits
from stopguard.ledger.journal import Journal, JournalLimits
from stopguard.preemption import ClassSettings, Mode, PreemptionSettings, TenantStanding
from stopguard.probe.sender import parse_address as parse_probe_address
from stopguard.stops import RetryPolicy, StopConfig

__all__ = [
    "admin_token",
    "book_limits",
    "cautions",
    "client_context",
    "engine_key",
    "engines",
    "gateway_settings",
    "journal_folder",
    "open_journal",
    "preemption_settings",
    "probe_settings",
    "server_context",
    "stop_config",
]

TOKEN_LENGTH_MIN = 16


def gateway_settings(configuration: Configuration, environment: Mapping[str, str]) -> GatewaySettings:
    """The data plane's settings; reads the TLS files and the tenants' keys."""
    listen = configuration.listen
    tls = server_context("listen.tls", listen.tls)
    return GatewaySettings(
        listeners=tuple(
            Listener(
                host=address.host, port=address.port, tls=tls, reuse_port=listen.reuse_port, backlog=listen.backlog
            )
            for address in listen.addresses
        ),
        limits=Limits(**configuration.limits.model_dump()),
        timeouts=Timeouts(**configuration.timeouts.model_dump()),
        liveness=Liveness(
            **{**configuration.liveness.model_dump(), "half_close": HalfClose(configuration.liveness.half_close)}
        ),
        policies=policies(configuration, environment),
        idempotency=Idempotency(configuration.idempotency),
        preemption=preemption_settings(configuration, environment),
        resume=ResumeSettings(**configuration.resume.model_dump()),
        allow_engine_control=configuration.allow_engine_control,
    )


def policies(configuration: Configuration, environment: Mapping[str, str]) -> Policies:
    """Who may leave work behind. Keys are kept as digests only."""
    by_key = {
        digest: tenant.policy
        for digest, (_, tenant) in _tenants_by_key(configuration, environment).items()
        if tenant.policy is not None
    }
    return Policies(default=configuration.policies.default, by_route=dict(configuration.policies.routes), by_key=by_key)


def preemption_settings(configuration: Configuration, environment: Mapping[str, str]) -> PreemptionSettings:
    """Who goes first and who makes room."""
    wanted = configuration.preemption
    plain = wanted.model_dump(exclude={"classes", "mode"})
    standings = {
        digest: TenantStanding(ceiling=tenant.ceiling, usual_class=tenant.usual_class, weight=tenant.weight)
        for digest, (_, tenant) in _tenants_by_key(configuration, environment).items()
    }
    usual = TenantStanding()
    return PreemptionSettings(
        **plain,
        mode=Mode(wanted.mode),
        classes={name: ClassSettings(**each.model_dump()) for name, each in wanted.classes.items()},
        tenants={digest: standing for digest, standing in standings.items() if standing != usual},
    )


def _tenants_by_key(configuration: Configuration, environment: Mapping[str, str]) -> dict[str, tuple[str, Tenant]]:
    """The tenant of each key, by the key's digest."""
    found: dict[str, tuple[str, Tenant]] = {}
    for name, tenant in configuration.policies.tenants.items():
        digests = list(tenant.key_sha256)
        for variable, file in ((tenant.key_env, None), (None, tenant.key_file)):
            what = f"policies.tenants.{name}"
            key = read_secret(what, value=None, variable=variable, file=file, environment=environment)
            if key is not None:
                digests.append(hashlib.sha256(key.encode()).hexdigest())
        for digest in digests:
            other = found.setdefault(digest, (name, tenant))
            if other[1].policy != tenant.policy:
                raise ConfigurationError(f"policies.tenants.{name}: one of its keys has another policy already")
            if _standing(other[1]) != _standing(tenant):
                raise ConfigurationError(f"policies.tenants.{name}: one of its keys is {other[0]}'s, of another class")
    return found


def _standing(tenant: Tenant) -> tuple[str, str, float]:
    return tenant.usual_class, tenant.ceiling, tenant.weight


def engines(configuration: Configuration, environment: Mapping[str, str]) -> list[tuple[Engine, EngineSettings]]:
    """The engines and how each is used, in the order of the configuration."""
    shared = configuration.connections.model_dump()
    result = []
    for name, entry in configuration.engines.items():
        key = engine_key(name, entry, environment)
        tls = client_context(f"engines.{name}.tls", entry)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # One that is yet to be asked what it is (`--check`): whatever it is, it is at least this.
        kind = BUILT_IN if entry.kind == AUTO else entry.kind
        engine = create(kind, name, entry.url, headers=dict(headers), tls=tls)
        _tune_aborts(engine, configuration)
        own = {
            field: value
            for field in ("concurrent_requests", "idle_connections", "idle_seconds")
            if (value := getattr(entry, field)) is not None
        }
        result.append((engine, EngineSettings(**{**shared, **own}, tls=tls, extra_headers=tuple(headers.items()))))
    return result


def engine_key(name: str, entry: EngineEntry, environment: Mapping[str, str]) -> str | None:
    """The key that is sent to an engine in the place of the client's; `None` where there is none."""
    return read_secret(
        f"engines.{name}.api_key",
        value=_reveal(entry.api_key),
        variable=entry.api_key_env,
        file=entry.api_key_file,
        environment=environment,
    )


def _tune_aborts(engine: Engine, configuration: Configuration) -> None:
    """What the operator says about knocking goes before what the adapter says."""
    wanted = configuration.aborts.model_dump(exclude_none=True)
    if wanted:
        retry: RetryPolicy = msgspec.structs.replace(engine.profile.retry, **wanted)
        engine.profile = msgspec.structs.replace(engine.profile, retry=retry)


def stop_config(configuration: Configuration) -> StopConfig:
    """The controller's patience."""
    return StopConfig(**configuration.stops.model_dump())


def book_limits(configuration: Configuration) -> BookLimits:
    """The book's limits."""
    return BookLimits(**configuration.books.model_dump())


def open_journal(configuration: Configuration) -> Journal | None:
    """Open the journal, if there is to be one; raises `StorageError` when it cannot be written."""
    wanted = configuration.journal
    if wanted.path is None:
        return None
    return Journal.open(
        wanted.path,
        policy=wanted.policy,
        limits=JournalLimits(age_seconds=wanted.keep_seconds, file_bytes=wanted.file_bytes),
        flush_seconds=wanted.flush_seconds,
        check=wanted.check,
    )


def admin_token(configuration: Configuration) -> str | None:
    """The token of the admin port; `None` only where it listens on loopback alone."""
    admin = configuration.admin
    token = read_secret("admin.token", value=_reveal(admin.token), variable=None, file=admin.token_file, environment={})
    if token is not None and len(token) < TOKEN_LENGTH_MIN:
        raise ConfigurationError(
            f"admin.token: it is shorter than {TOKEN_LENGTH_MIN} characters: try `openssl rand -hex 32`"
        )
    return token


def probe_settings(configuration: Configuration) -> ProbeSettings | None:
    """Where probes report; `None` when nobody listens for them."""
    probe = configuration.probe
    if not probe.listen:
        return None
    token = read_secret("probe.token", value=_reveal(probe.token), variable=None, file=probe.token_file, environment={})
    if token is None or len(token) < TOKEN_LENGTH_MIN:
        raise ConfigurationError(
            f"probe.token: it is shorter than {TOKEN_LENGTH_MIN} characters: try `openssl rand -hex 32`"
        )
    return ProbeSettings(listen=probe.listen, token=token, gone_seconds=probe.gone_seconds)


def server_context(what: str, tls: ServerTls | None) -> ssl.SSLContext | None:
    """HTTPS for those who call us, HTTP/1.1 only; `None` without `tls`."""
    if tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(what, context, tls.certificate_file, tls.key_file, _reveal(tls.key_password))
    if tls.client_ca_file is not None:
        _load_authorities(what, context, tls.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(what: str, entry: EngineEntry) -> ssl.SSLContext | None:
    """HTTPS to an engine; `None` for one that speaks HTTP."""
    if not entry.url.startswith("https:"):
        return None
    tls = entry.tls or UpstreamTls()
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if tls.ca_file is not None:
        # Only this CA: whoever names one does not mean "or any other".
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["http/1.1"])
        _load_authorities(what, context, tls.ca_file)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.certificate_file is not None:
        _load_pair(what, context, tls.certificate_file, tls.key_file, None)
    return context


def _load_pair(what: str, context: ssl.SSLContext, certificate: Path, key: Path | None, password: str | None) -> None:
    for file in (certificate, key):
        if file is not None:
            _must_be_readable(what, file)
    try:
        # Without a password OpenSSL would ask for one at the terminal, and wait.
        context.load_cert_chain(certificate, key, password=password or "")
    except (ssl.SSLError, OSError) as error:
        pair = f"{certificate} with {key}" if key is not None else str(certificate)
        raise ConfigurationError(
            f"{what}: {pair} cannot be used: {_ssl_reason(error)} (both must be PEM and belong together)"
        ) from error


def _load_authorities(what: str, context: ssl.SSLContext, file: Path) -> None:
    _must_be_readable(what, file)
    try:
        context.load_verify_locations(file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"{what}: {file} has no usable certificates: {_ssl_reason(error)}") from error


def _must_be_readable(what: str, file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise ConfigurationError(f"{what}: cannot read {file}: {error.strerror or error}") from error


def _ssl_reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else (error.strerror or str(error))


def _reveal(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def journal_folder(configuration: Configuration) -> None:
    """Whether the journal could be made where it is wanted; raises `ConfigurationError` if not."""
    path = configuration.journal.path
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise ConfigurationError(f"journal.path: there is no folder {folder}: make it, or name another file")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigurationError(f"journal.path: {path} cannot be written: look at its permissions and its folder's")


def cautions(configuration: Configuration) -> list[str]:
    """What is allowed and may still surprise."""
    lines = []
    for name, entry in configuration.engines.items():
        if entry.tls is not None and not entry.tls.verify:
            lines.append(f"engines.{name}: its certificate is not checked (tls.verify is false)")
        if entry.url.startswith("http:") and (entry.api_key or entry.api_key_env or entry.api_key_file):
            host = urlsplit(entry.url).hostname or ""
            if not Address(host, 0).is_loopback:
                lines.append(f"engines.{name}: its key travels unencrypted (the URL is http)")
    admin = configuration.admin
    if admin.listen is not None and not admin.listen.is_loopback and admin.tls is None:
        lines.append(f"admin: the token travels unencrypted on {admin.listen} (set admin.tls, or use loopback)")
    wanted = configuration.preemption
    preempting = {name for name, each in wanted.classes.items() if each.preempts}
    ceilings = {wanted.ceiling, *(tenant.ceiling for tenant in configuration.policies.tenants.values())}
    if wanted.mode == "preempt" and not preempting & ceilings:
        lines.append("preemption: nobody may ask for a class that preempts (set policies.tenants.NAME.ceiling)")
    for address in configuration.probe.listen:
        parsed = parse_probe_address(address)
        if isinstance(parsed, tuple) and not Address(*parsed).is_loopback:
            lines.append(f"probe: what probes and the collector say travels unencrypted on {address}")
    if configuration.allow_engine_control:
        lines.append("allow_engine_control: any client may abort everything at an engine that has such a route")
    return lines
