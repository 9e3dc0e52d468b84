"""The values that are written as text, and the secrets behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stopguard.config import Address, format_policy, parse_address, parse_engine, parse_policy, read_secret
from stopguard.errors import ConfigurationError
from stopguard.stops import ClientPolicy

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("127.0.0.1:8080", Address("127.0.0.1", 8080), True),
        ("127.9.9.9:1", Address("127.9.9.9", 1), True),
        ("[::1]:8080", Address("::1", 8080), True),
        ("localhost:0", Address("localhost", 0), True),
        ("0.0.0.0:80", Address("0.0.0.0", 80), False),
        ("[::]:80", Address("::", 80), False),
        ("gateway.example:80", Address("gateway.example", 80), False),
    ],
)
def test_an_address_is_read_and_written_back(text: str, address: Address, loopback: bool) -> None:
    assert parse_address(text) == address
    assert str(address) == text
    assert address.is_loopback is loopback


@pytest.mark.parametrize("text", ["", "8080", ":8080", "::1:8080", "host:", "host:x", "host:65536", "host:-1", "h:²"])
def test_what_is_no_address_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        parse_address(text)


@pytest.mark.parametrize("text", ["stop", "drain", "grace=5", "grace=0.5"])
def test_a_policy_is_read_and_written_back(text: str) -> None:
    assert format_policy(parse_policy(text)) == text


def test_a_grace_may_have_its_unit() -> None:
    assert parse_policy(" grace=5s ") == ClientPolicy(5.0)


@pytest.mark.parametrize("text", ["", "grace", "grace=", "grace=0", "grace=-1", "grace=inf", "grace=nan", "stop=1"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a policy"):
        parse_policy(text)


def test_an_engine_has_a_kind_a_url_and_perhaps_a_name() -> None:
    assert parse_engine("openai=http://h:1") == ("", "openai", "http://h:1")
    assert parse_engine("gpu0:openai=http://h:1/v=1") == ("gpu0", "openai", "http://h:1/v=1")


@pytest.mark.parametrize("text", ["", "http://h:1", "=http://h:1", "gpu0:=http://h:1", "-x:openai=http://h:1"])
def test_what_is_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_engine(text)


def test_a_secret_comes_from_one_of_three_ways(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    environment = {"KEY": "from-environment"}
    assert read_secret("k", value=None, variable=None, file=None, environment={}) is None
    assert read_secret("k", value="given", variable=None, file=None, environment={}) == "given"
    assert read_secret("k", value=None, variable="KEY", file=None, environment=environment) == "from-environment"
    assert read_secret("k", value=None, variable=None, file=file, environment={}) == "from-file"
    with pytest.raises(ConfigurationError, match="not more than one"):
        read_secret("k", value="given", variable="KEY", file=None, environment=environment)


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", " spaced ", "tab\there", "x" * 70_000, "ünïcode"])
def test_a_file_that_holds_no_usable_secret_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    file = tmp_path / "key"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        read_secret("engines.a.api_key", value=None, variable=None, file=file, environment={})
    assert str(caught.value).startswith("engines.a.api_key: ")
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_secret_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match="the environment variable KEY is not set"):
        read_secret("k", value=None, variable="KEY", file=None, environment={})
