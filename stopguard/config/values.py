"""The values that are written as text: addresses, policies, engines, secrets. Each has one parser, used by all layers.

A parser raises `ValueError` with one line that says how to write the value; who reads the layer adds where
the value came from.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stopguard.errors import ConfigurationError
from stopguard.stops import ClientPolicy

__all__ = [
    "OFF",
    "Address",
    "environment_name",
    "format_policy",
    "parse_address",
    "parse_engine",
    "parse_policy",
    "parse_route_policy",
    "read_secret",
]

OFF = "off"
"""How "there is none" is written, in a language (TOML) that has no null."""

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_SECRET_BYTES_MAX = 65_536


class Address(NamedTuple):
    """Where to listen. `host` is an IP address or a name, without brackets."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than localhost counts as reachable by others."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """``127.0.0.1:8080``, ``localhost:8080``, ``[::1]:8080``. Port 0 lets the operating system choose."""
    host, colon, port_text = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is not an address: put an IPv6 address in brackets, like [::1]:8080")
    if not colon or not host or not port_text.isascii() or not port_text.isdecimal() or int(port_text) > 65_535:
        raise ValueError(f"{text!r} is not an address: write HOST:PORT, like 127.0.0.1:8080 (0.0.0.0 is every network)")
    return Address(host, int(port_text))


def parse_policy(text: str) -> ClientPolicy:
    """``stop``, ``drain`` or ``grace=SECONDS``: what happens to the work when its client leaves."""
    word = text.strip()
    if word == "stop":
        return ClientPolicy()
    if word == "drain":
        return ClientPolicy(None)
    name, equals, seconds_text = word.partition("=")
    if name == "grace" and equals:
        try:
            seconds = float(seconds_text.removesuffix("s"))
        except ValueError:
            seconds = -1.0
        if 0 < seconds < float("inf"):
            return ClientPolicy(seconds)
    raise ValueError(f"{text!r} is not a policy: write stop, drain or grace=SECONDS (like grace=5)")


def format_policy(policy: ClientPolicy) -> str:
    """`policy` as it is written in a configuration."""
    if policy.grace_seconds is None:
        return "drain"
    return "stop" if policy.stops_at_once else f"grace={policy.grace_seconds:g}"


def parse_route_policy(text: str) -> tuple[str, ClientPolicy]:
    """``POLICY`` (the default: the route is empty) or ``ROUTE=POLICY``, like ``/v1/embeddings=drain``."""
    route, equals, policy = text.strip().partition("=")
    if equals and route != "grace":
        return route, parse_policy(policy)
    return "", parse_policy(text)


def parse_engine(text: str) -> tuple[str, str, str]:
    """``KIND=URL`` or ``NAME:KIND=URL``: (name, kind, url), the name empty where none was given."""
    left, equals, url = text.strip().partition("=")
    name, _, kind = left.rpartition(":")
    if not equals or not kind or "://" in left:
        raise ValueError(
            f"{text!r} is not an engine: write KIND=URL or NAME:KIND=URL, like openai=http://127.0.0.1:8000"
        )
    if name and not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name for an engine: use letters, digits, '.', '_', '-', at most 64")
    return name, kind, url


def environment_name(text: str) -> str:
    """`text` as a part of the name of an environment variable: ``gpu-0`` becomes ``GPU_0``."""
    return re.sub(r"[^A-Z0-9]", "_", text.upper())


def read_secret(
    what: str, *, value: str | None, variable: str | None, file: Path | None, environment: Mapping[str, str]
) -> str | None:
    """The secret that one of three ways gives: written down, in the environment, in a file. `None` where none does.

    `ConfigurationError` when more than one way is used, or the one that is used leads to nothing. The
    text of an error never holds the secret.
    """
    if sum(way is not None for way in (value, variable, file)) > 1:
        raise ConfigurationError(f"{what}: give the value, the variable or the file, not more than one")
    if variable is not None:
        value = environment.get(variable)
        if not value:
            raise ConfigurationError(f"{what}: the environment variable {variable} is not set")
    elif file is not None:
        value = _read_file(what, file)
    if value is None:
        return None
    if not value.isascii() or not value.isprintable() or value != value.strip() or not value:
        raise ConfigurationError(f"{what}: it must be one line of printable ASCII without spaces around it")
    return value


def _read_file(what: str, file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(_SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(f"{what}: cannot read {file}: {error.strerror or error}") from error
    if len(data) > _SECRET_BYTES_MAX:
        raise ConfigurationError(f"{what}: {file} is longer than {_SECRET_BYTES_MAX} bytes: is it the right file?")
    text = data.decode("utf-8", "replace").strip("\r\n")
    if not text:
        raise ConfigurationError(f"{what}: {file} is empty")
    return text
