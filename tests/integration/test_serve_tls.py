"""TLS on every side: clients to the gateway, the gateway to an engine, and callers to the admin port."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.integration.serving import Gateway, chat, ended, engine, start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

PASSWORD = "a-password-of-the-key"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a self-signed certificate for 127.0.0.1 and its encrypted key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-passout", f"pass:{PASSWORD}"),
        ],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def settings(certificate: Path) -> str:
    """The lines of a configuration whose two ports speak TLS."""
    pair = (
        f'certificate_file = "{certificate}/cert.pem"\n'
        f'key_file = "{certificate}/key.pem"\n'
        f'key_password = "{PASSWORD}"\n'
    )
    return (
        f'[listen]\naddresses = "127.0.0.1:0"\n[listen.tls]\n{pair}'
        f'[admin]\nlisten = "127.0.0.1:0"\n[admin.tls]\n{pair}[log]\nformat = "json"\n'
    )


@pytest.fixture(scope="module")
def trusting(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificate / "cert.pem")
    return context


@pytest.fixture(scope="module")
def two_gateways(settings: str, certificate: Path) -> Iterator[tuple[Gateway, Gateway]]:
    """A gateway with TLS in front of an engine, and one with TLS in front of that gateway."""
    inner_file, outer_file = certificate / "inner.toml", certificate / "outer.toml"
    with engine("--step-seconds", "0.02") as engine_url:
        inner_file.write_text(f'[engines.e]\nurl = "{engine_url}"\n{settings}')
        inner_process = start("serve", "--config", str(inner_file))
        with ended(inner_process):
            assert inner_process.stderr is not None
            inner = Gateway(inner_process, inner_process.stderr)
            tls = f'[engines.inner.tls]\nca_file = "{certificate}/cert.pem"\n'
            outer_file.write_text(f'[engines.inner]\nurl = "{inner.url}"\n{tls}{settings}')
            outer_process = start("serve", "--config", str(outer_file))
            with ended(outer_process):
                assert outer_process.stderr is not None
                yield inner, Gateway(outer_process, outer_process.stderr)


def test_a_request_passes_through_tls_on_both_sides(
    two_gateways: tuple[Gateway, Gateway], trusting: ssl.SSLContext
) -> None:
    _, outer = two_gateways
    assert outer.url.startswith("https://")
    assert outer.admin.startswith("https://")
    with httpx.Client(verify=trusting, trust_env=False, timeout=20.0) as client:
        response = client.post(f"{outer.url}/v1/chat/completions", json=chat(3, stream=False))
        assert (response.status_code, response.json()["usage"]["completion_tokens"]) == (200, 3)
        assert client.get(f"{outer.admin}/healthz").json() == {"status": "ok"}


def test_leaving_is_seen_through_tls_and_passed_on(
    two_gateways: tuple[Gateway, Gateway], trusting: ssl.SSLContext
) -> None:
    with httpx.Client(verify=trusting, trust_env=False, timeout=20.0) as client:
        _, outer = two_gateways
        with client.stream("POST", f"{outer.url}/v1/chat/completions", json=chat(3000)) as response:
            assert next(response.iter_lines()).startswith("data: ")
        for server in two_gateways:
            while not (ends := client.get(f"{server.admin}/stops").json()["ended"]):
                pass
            assert (ends[0]["stop"]["semantics"], ends[0]["stop"]["source"]) == ("cancel", "client")


def test_who_does_not_trust_it_gets_nothing(two_gateways: tuple[Gateway, Gateway]) -> None:
    _, outer = two_gateways
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        client.get(f"{outer.url}/v1/models")


def test_the_keys_password_is_never_said(two_gateways: tuple[Gateway, Gateway]) -> None:
    for server in reversed(two_gateways):
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert PASSWORD not in "\n".join(server.lines)
