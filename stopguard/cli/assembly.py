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

from stopguard.config import Address, Configuration, EngineEntry, ServerTls, UpstreamTls, read_secret
from stopguard.engines.protocol import Engine
from stopguard.engines.registry import create
from stopguard.errors import ConfigurationError
from stopguard.gateway.settings import (
    EngineSettings,
    GatewaySettings,
    HalfClose,
    Idempotency,
    Limits,
    Listener,
    Liveness,
    Policies,
    Timeouts,
)
from stopguard.ledger import BookLimits
from stopguard.ledger.journal import Journal, JournalLimits
from stopguard.stops import ClientPolicy, RetryPolicy, StopConfig

__all__ = [
    "admin_token",
    "book_limits",
    "cautions",
    "client_context",
    "engines",
    "gateway_settings",
    "journal_folder",
    "open_journal",
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
        allow_engine_control=configuration.allow_engine_control,
    )


def policies(configuration: Configuration, environment: Mapping[str, str]) -> Policies:
    """Who may leave work behind. Keys are kept as digests only."""
    by_key: dict[str, ClientPolicy] = {}
    for name, tenant in configuration.policies.tenants.items():
        for digest in tenant.key_sha256:
            _add_key(by_key, digest, tenant.policy, name)
        for variable, file in ((tenant.key_env, None), (None, tenant.key_file)):
            what = f"policies.tenants.{name}"
            key = read_secret(what, value=None, variable=variable, file=file, environment=environment)
            if key is not None:
                _add_key(by_key, hashlib.sha256(key.encode()).hexdigest(), tenant.policy, name)
    return Policies(default=configuration.policies.default, by_route=dict(configuration.policies.routes), by_key=by_key)


def _add_key(by_key: dict[str, ClientPolicy], digest: str, policy: ClientPolicy, name: str) -> None:
    if by_key.setdefault(digest, policy) != policy:
        raise ConfigurationError(f"policies.tenants.{name}: one of its keys has another policy already")


def engines(configuration: Configuration, environment: Mapping[str, str]) -> list[tuple[Engine, EngineSettings]]:
    """The engines and how each is used, in the order of the configuration."""
    shared = configuration.connections.model_dump()
    result = []
    for name, entry in configuration.engines.items():
        key = read_secret(
            f"engines.{name}.api_key",
            value=_reveal(entry.api_key),
            variable=entry.api_key_env,
            file=entry.api_key_file,
            environment=environment,
        )
        tls = client_context(f"engines.{name}.tls", entry)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        engine = create(entry.kind, name, entry.url, headers=dict(headers), tls=tls)
        _tune_aborts(engine, configuration)
        own = {
            field: value
            for field in ("concurrent_requests", "idle_connections", "idle_seconds")
            if (value := getattr(entry, field)) is not None
        }
        result.append((engine, EngineSettings(**{**shared, **own}, tls=tls, extra_headers=tuple(headers.items()))))
    return result


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
    if configuration.allow_engine_control:
        lines.append("allow_engine_control: any client may abort everything at an engine that has such a route")
    return lines
