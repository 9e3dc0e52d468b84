"""The configuration and the data plane speak of the same settings; files and keys are read before anything listens."""

from __future__ import annotations

import hashlib
import ssl
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from pydantic import BaseModel

from stopguard import config
from stopguard.cli import assembly
from stopguard.config import Configuration, load
from stopguard.errors import ConfigurationError
from stopguard.gateway import settings as gateway
from stopguard.ledger import BookLimits
from stopguard.preemption import PreemptionSettings
from stopguard.stops import ClientPolicy, RetryPolicy, StopConfig

if TYPE_CHECKING:
    from pathlib import Path


def configured(**flags: Any) -> Configuration:
    flags.setdefault("engines", ["openai=http://127.0.0.1:8000"])
    return load(flags=flags).configuration


@pytest.mark.parametrize(
    ("section", "struct", "without"),
    [
        (config.LimitSettings, gateway.Limits, set()),
        (config.TimeoutSettings, gateway.Timeouts, set()),
        (config.LivenessSettings, gateway.Liveness, set()),
        (config.ConnectionSettings, gateway.EngineSettings, {"tls", "extra_headers"}),
        (config.StopSettings, StopConfig, {"book_errors"}),
        (config.PreemptionEntry, PreemptionSettings, {"mode", "classes", "tenants"}),
        (config.Books, BookLimits, set()),
    ],
)
def test_names_and_defaults_are_those_of_what_is_configured(
    section: type[BaseModel], struct: type[msgspec.Struct], without: set[str]
) -> None:
    there = {field.name: field.default for field in msgspec.structs.fields(struct) if field.name not in without}
    here = {name: field.default for name, field in section.model_fields.items() if name not in without}
    assert here == there


def test_the_defaults_give_the_data_planes_defaults() -> None:
    assert assembly.gateway_settings(configured(), {}) == gateway.GatewaySettings()


def test_an_engine_has_its_own_values_and_its_key() -> None:
    configuration = Configuration.model_validate(
        {
            "connections": {"idle_seconds": 2.0},
            "engines": {
                "a": {"url": "http://127.0.0.1:1", "concurrent_requests": 3, "api_key_env": "KEY"},
                "b": {"url": "http://127.0.0.1:2"},
            },
            "aborts": {"tries": 5, "factor": 3.0},
        }
    )
    (first, its), (second, others) = assembly.engines(configuration, {"KEY": "hunter2"})
    assert (first.name, first.base_url) == ("a", "http://127.0.0.1:1")
    assert (its.concurrent_requests, its.idle_seconds) == (3, 2.0)
    assert its.extra_headers == (("Authorization", "Bearer hunter2"),)
    assert (others.concurrent_requests, others.extra_headers) == (16_384, ())
    assert second.profile.retry == RetryPolicy(tries=5, factor=3.0)
    with pytest.raises(ConfigurationError, match=r"engines.a.api_key: the environment variable KEY is not set"):
        assembly.engines(configuration, {})


def test_a_kind_that_nobody_offers_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no adapter called 'opanai' here.*did you mean openai"):
        assembly.engines(configured(engines=["opanai=http://127.0.0.1:8000"]), {})


def test_a_tenants_keys_are_kept_as_digests(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    digest = "ab" * 32
    configuration = Configuration.model_validate(
        {
            "policies": {
                "tenants": {
                    "batch": {
                        "policy": "drain",
                        "key_sha256": [digest],
                        "key_env": "KEY",
                        "key_file": str(tmp_path / "key"),
                    }
                }
            }
        }
    )
    by_key = assembly.gateway_settings(configuration, {"KEY": "from-environment"}).policies.by_key
    drain = ClientPolicy(None)
    assert by_key == {
        digest: drain,
        hashlib.sha256(b"from-file").hexdigest(): drain,
        hashlib.sha256(b"from-environment").hexdigest(): drain,
    }


def test_one_key_has_one_policy() -> None:
    tenants = {name: {"policy": name, "key_sha256": ["ab" * 32]} for name in ("stop", "drain")}
    configuration = Configuration.model_validate({"policies": {"tenants": tenants}})
    with pytest.raises(ConfigurationError, match="has another policy already"):
        assembly.gateway_settings(configuration, {})


def test_tls_files_are_read_at_once_and_what_is_wrong_with_them_is_said(tmp_path: Path) -> None:
    (tmp_path / "garbage.pem").write_text("not a certificate")
    garbage, missing = str(tmp_path / "garbage.pem"), str(tmp_path / "missing.pem")
    for certificate, message in ((missing, "cannot read .*missing.pem: No such file"), (garbage, "cannot be used")):
        tls = config.ServerTls.model_validate({"certificate_file": certificate, "key_file": garbage})
        with pytest.raises(ConfigurationError, match=message):
            assembly.server_context("listen.tls", tls)
    entry = config.EngineEntry.model_validate({"url": "https://127.0.0.1:1", "tls": {"ca_file": garbage}})
    with pytest.raises(ConfigurationError, match="has no usable certificates"):
        assembly.client_context("engines.a.tls", entry)


def test_only_https_engines_have_a_context_and_unchecked_is_unchecked() -> None:
    plain = config.EngineEntry.model_validate({"url": "http://127.0.0.1:1"})
    checked = config.EngineEntry.model_validate({"url": "https://127.0.0.1:1"})
    unchecked = config.EngineEntry.model_validate({"url": "https://127.0.0.1:1", "tls": {"verify": False}})
    assert assembly.client_context("x", plain) is None
    context = assembly.client_context("x", checked)
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    context = assembly.client_context("x", unchecked)
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)


def test_what_may_surprise_is_said(tmp_path: Path) -> None:
    configuration = Configuration.model_validate(
        {
            "engines": {
                "a": {"url": "https://10.0.0.1", "tls": {"verify": False}},
                "b": {"url": "http://10.0.0.2", "api_key_env": "KEY"},
                "c": {"url": "http://127.0.0.1", "api_key_env": "KEY"},
            },
            "admin": {"listen": "0.0.0.0:9090", "token_file": "x"},
            "allow_engine_control": True,
        }
    )
    assert [line.partition(":")[0] for line in assembly.cautions(configuration)] == [
        *("engines.a", "engines.b", "admin", "allow_engine_control")
    ]
    assert assembly.cautions(configured()) == []


def test_an_admin_token_from_a_file_is_as_long_as_one_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    configuration = Configuration.model_validate({"admin": {"token_file": str(file)}})
    file.write_text("short\n")
    with pytest.raises(ConfigurationError, match="shorter than 16 characters"):
        assembly.admin_token(configuration)
    file.write_text("long-enough-for-a-token\n")
    assert assembly.admin_token(configuration) == "long-enough-for-a-token"


def test_a_journal_needs_its_folder(tmp_path: Path) -> None:
    configuration = Configuration.model_validate({"journal": {"path": str(tmp_path / "absent" / "x.journal")}})
    with pytest.raises(ConfigurationError, match="there is no folder"):
        assembly.journal_folder(configuration)
