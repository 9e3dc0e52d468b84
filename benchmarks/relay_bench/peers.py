"""The table of peers: how each is installed, configured and started. Defaults everywhere unless the title says so."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.relay_bench.install import (
    PeerUnavailableError,
    compiled_wheel,
    package_version,
    program_version,
    python_environment,
    system_program,
)
from benchmarks.relay_bench.processes import free_port
from benchmarks.relay_bench.wire import MODEL

_CHECKOUT = Path(__file__).resolve().parents[2]

BASELINE = "nginx"
"""The peer that ratios are taken against."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a peer needs to know to be started."""

    listen_port: int
    upstream_port: int
    api_key: str
    """A random key, 64 characters long (LiteLLM refuses weak ones); every peer is sent it, only LiteLLM looks at it."""
    cache: Path
    work: Path
    """A directory of this run for configurations and logs."""

    @property
    def upstream_url(self) -> str:
        """The stub's base URL, without a path."""
        return f"http://127.0.0.1:{self.upstream_port}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that serves on the setting's port until it is terminated."""

    command: list[str]
    version: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """One row of the comparison."""

    name: str
    title: str
    prepare: Callable[[Setting], Launch] | None
    """Installs what is missing and says how to start it; None is the stub itself, with no proxy between."""
    needs_environment: bool = False
    """True where a virtual environment has to be built first, which ``--quick`` leaves out."""
    ready_seconds: float = 30.0


def random_key() -> str:
    """A key long and random enough for the strictest peer."""
    return "sk-" + secrets.token_hex(32)


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _stopguard(setting: Setting, *, compiled: bool = True) -> Launch:
    """StopGuard as a compiled wheel (see tools/compiled_wheel.py), or this checkout as it stands."""
    executables = Path(sys.executable).parent
    if compiled:
        executables = python_environment(setting.cache, "stopguard-compiled", [str(compiled_wheel(setting.cache))])
    program = executables / "stopguard"
    if not program.exists():
        raise PeerUnavailableError("no stopguard command beside this Python; install the checkout: pip install -e .")
    command = [str(program), "serve", "--engine", f"openai={setting.upstream_url}"]
    command += ["--listen", f"127.0.0.1:{setting.listen_port}", "--admin", f"127.0.0.1:{free_port()}"]
    return Launch(command, package_version(program.parent, "stopguard"))


def _bare_relay(setting: Setting) -> Launch:
    command = [
        sys.executable,
        "-m",
        "benchmarks.relay_bench.bare_relay",
        str(setting.listen_port),
        str(setting.upstream_port),
    ]
    return Launch(command, "this checkout", {"PYTHONPATH": str(_CHECKOUT)})


def _nginx(setting: Setting) -> Launch:
    program = system_program("nginx", "nginx-light")
    home = setting.work / "nginx"
    home.mkdir(exist_ok=True)
    temporary = "\n".join(
        f"  {kind}_temp_path {home}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # Started by root, nginx would run its worker as nobody, who cannot write the temporary files.
    user = "user root;" if os.name == "posix" and os.geteuid() == 0 else ""
    configuration = _write(
        home / "nginx.conf",
        f"""daemon off; {user} worker_processes 1; worker_rlimit_nofile 16384; pid {home}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
{temporary}
  client_max_body_size 64m;
  keepalive_requests 100000000;
  upstream engine {{ server 127.0.0.1:{setting.upstream_port}; keepalive 256; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{setting.listen_port} backlog=4096;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
""",
    )
    command = [program, "-p", str(home), "-c", str(configuration), "-e", "stderr"]
    return Launch(command, program_version([program, "-v"]))


def _haproxy(setting: Setting, *options: str) -> Launch:
    program = system_program("haproxy", "haproxy")
    configuration = _write(
        setting.work / f"haproxy-{setting.listen_port}.cfg",
        f"""global
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
{"".join(f"  option {option}{os.linesep}" for option in options)}
frontend clients
  bind 127.0.0.1:{setting.listen_port} backlog 4096
  default_backend engine
backend engine
  server engine 127.0.0.1:{setting.upstream_port}
""",
    )
    return Launch([program, "-db", "-f", str(configuration)], program_version([program, "-v"]))


def _router(setting: Setting, distribution: str, *more: str) -> Launch:
    executables = python_environment(setting.cache, distribution, [distribution])
    arguments = [str(executables / distribution), *more, "--worker-urls", setting.upstream_url]
    arguments += ["--host", "127.0.0.1", "--port", str(setting.listen_port)]
    arguments += ["--prometheus-port", str(free_port())]
    return Launch(arguments, package_version(executables, distribution))


def _sglang_router(setting: Setting, *more: str) -> Launch:
    return _router(setting, "sglang-router", "launch", *more)


def _vllm_router(setting: Setting, *more: str) -> Launch:
    return _router(setting, "vllm-router", *more)


_ROUND_ROBIN = ("--policy", "round_robin")
"""The routers' cheapest policy: no prefix tree, no tokens asked of the engine."""


def _litellm(setting: Setting) -> Launch:
    executables = python_environment(setting.cache, "litellm", ["litellm[proxy]"])
    configuration = _write(
        setting.work / "litellm.yaml",
        f"""model_list:
  - model_name: {MODEL}
    litellm_params:
      model: openai/{MODEL}
      api_base: {setting.upstream_url}/v1
      api_key: {setting.api_key}
general_settings:
  master_key: {setting.api_key}
""",
    )
    command = [str(executables / "litellm"), "--config", str(configuration), "--host", "127.0.0.1"]
    command += ["--port", str(setting.listen_port), "--num_workers", "1", "--telemetry", "False"]
    # Without these it fetches its price lists from the Internet when it starts.
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True"}
    return Launch(command, package_version(executables, "litellm"), environment)


def _fastapi_httpx(setting: Setting) -> Launch:
    requirements = ["fastapi", "httpx", "uvicorn", "uvloop", "httptools"]
    executables = python_environment(setting.cache, "fastapi-httpx", requirements)
    command = [str(executables / "python"), "-m", "uvicorn", "--app-dir", str(Path(__file__).parent)]
    command += ["--host", "127.0.0.1", "--port", str(setting.listen_port), "--no-access-log"]
    command += ["--log-level", "warning", "fastapi_proxy:app"]
    version = f"{package_version(executables, 'fastapi')} + {package_version(executables, 'httpx')}"
    return Launch(command, version, {"RELAY_BENCH_UPSTREAM": setting.upstream_url})


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("direct", "direct (no proxy)", None),
        Peer("stopguard", "StopGuard, compiled", _stopguard),
        Peer("stopguard_pure", "StopGuard, pure Python", lambda setting: _stopguard(setting, compiled=False)),
        Peer("bare_relay", "bare relay (the floor)", _bare_relay),
        Peer("nginx", "nginx, 1 worker", _nginx),
        Peer("haproxy", "HAProxy", _haproxy),
        Peer("haproxy_abortonclose", "HAProxy, abortonclose", lambda setting: _haproxy(setting, "abortonclose")),
        Peer("sglang_router", "sglang-router", _sglang_router, needs_environment=True, ready_seconds=60),
        Peer(
            "sglang_router_round_robin",
            "sglang-router, round robin",
            lambda setting: _sglang_router(setting, *_ROUND_ROBIN),
            needs_environment=True,
            ready_seconds=60,
        ),
        Peer("vllm_router", "vllm-router", _vllm_router, needs_environment=True, ready_seconds=60),
        Peer(
            "vllm_router_round_robin",
            "vllm-router, round robin",
            lambda setting: _vllm_router(setting, *_ROUND_ROBIN),
            needs_environment=True,
            ready_seconds=60,
        ),
        Peer("litellm", "LiteLLM", _litellm, needs_environment=True, ready_seconds=240),
        Peer("fastapi_httpx", "FastAPI + httpx", _fastapi_httpx, needs_environment=True),
    )
}
"""All peers by name, in the order of the report."""
