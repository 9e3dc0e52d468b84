"""Four layers become one configuration, and whatever is wrong is one line that says where and what to do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from stopguard.config import Address, InvalidConfiguration, Loaded, load
from stopguard.config.layers import settings
from stopguard.stops import ClientPolicy

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = {"engines": ["openai=http://127.0.0.1:8000"]}


def problems(**layers: Any) -> list[str]:
    """What is wrong with these layers."""
    with pytest.raises(InvalidConfiguration) as caught:
        load(**layers)
    return list(caught.value.problems)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Write a file and return its path."""

    def write(text: str) -> Path:
        path = tmp_path / "stopguard.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_defaults_serve_on_loopback() -> None:
    configuration = load(flags=ENGINE).configuration
    assert configuration.listen.addresses == (Address("127.0.0.1", 8080),)
    assert configuration.admin.listen == Address("127.0.0.1", 9090)
    assert configuration.journal.path is None
    assert configuration.engines["openai"].url == "http://127.0.0.1:8000"


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults(written: Any) -> None:
    file = written('[timeouts]\nhead_seconds = 1\nbody_seconds = 1\nconnect_seconds = 1\n[log]\nlevel = "error"\n')
    environment = {
        "STOPGUARD_TIMEOUTS_HEAD_SECONDS": "2",
        "STOPGUARD_TIMEOUTS_BODY_SECONDS": "2",
        "STOPGUARD_LOG_LEVEL": "debug",
    }
    loaded = load(file=file, environment=environment, flags={**ENGINE, "timeouts.head_seconds": "3"})
    timeouts = loaded.configuration.timeouts
    assert (timeouts.head_seconds, timeouts.body_seconds, timeouts.connect_seconds) == (3.0, 2.0, 1.0)
    assert timeouts.stall_seconds == 30.0
    assert loaded.configuration.log.level == "debug"
    assert loaded.origins["timeouts.body_seconds"] == "STOPGUARD_TIMEOUTS_BODY_SECONDS"
    assert loaded.origins["timeouts.connect_seconds"] == str(file)


def test_engines_of_all_layers_stand_side_by_side_and_a_higher_one_replaces_by_name(written: Any) -> None:
    file = written(
        '[engines.gpu0]\nkind = "openai"\nurl = "http://10.0.0.1:8000"\nconcurrent_requests = 7\n'
        '[engines.gpu1]\nurl = "http://10.0.0.2:8000"\n'
    )
    environment = {"STOPGUARD_ENGINES": "openai=http://10.0.0.3:1,openai=http://10.0.0.3:2"}
    engines = load(
        file=file, environment=environment, flags={"engines": ["gpu0:other=http://10.0.0.9:8000"]}
    ).configuration.engines
    assert {name: (entry.kind, entry.url) for name, entry in engines.items()} == {
        "gpu0": ("other", "http://10.0.0.9:8000"),
        "gpu1": ("openai", "http://10.0.0.2:8000"),
        "openai": ("openai", "http://10.0.0.3:1"),
        "openai-2": ("openai", "http://10.0.0.3:2"),
    }
    assert engines["gpu0"].concurrent_requests == 7


def test_a_policy_by_flag_is_the_default_or_a_routes() -> None:
    policies = load(flags={**ENGINE, "policies": ["grace=5", "/v1/embeddings=drain", "chat=grace=2"]}).configuration
    assert policies.policies.default == ClientPolicy(5.0)
    assert policies.policies.routes == {"/v1/embeddings": ClientPolicy(None), "chat": ClientPolicy(2.0)}


def test_off_takes_away_what_is_there_by_default(written: Any) -> None:
    file = written('[timeouts]\nqueue_seconds = "off"\n[admin]\nlisten = "off"\n[journal]\npath = "off"\n')
    configuration = load(file=file, flags=ENGINE).configuration
    assert configuration.timeouts.queue_seconds is None
    assert configuration.admin.listen is None
    assert configuration.journal.path is None


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("STOPGUARD_LISTEN", "0.0.0.0:80, [::1]:81", "listen.addresses", (Address("0.0.0.0", 80), Address("::1", 81))),
        ("STOPGUARD_LISTEN_ADDRESSES", "localhost:80", "listen.addresses", (Address("localhost", 80),)),
        ("STOPGUARD_LISTEN_REUSE_PORT", "Yes", "listen.reuse_port", True),
        ("STOPGUARD_ADMIN", "off", "admin.listen", None),
        ("STOPGUARD_LIMITS_CONNECTIONS", "12", "limits.connections", 12),
        ("STOPGUARD_TIMEOUTS_TOTAL_SECONDS", "1.5", "timeouts.total_seconds", 1.5),
        ("STOPGUARD_TIMEOUTS_QUEUE_SECONDS", "off", "timeouts.queue_seconds", None),
        ("STOPGUARD_POLICY", "drain", "policies.default", ClientPolicy(None)),
        ("STOPGUARD_POLICIES_ROUTES", "chat=stop,audio=grace=3", "policies.routes.audio", ClientPolicy(3.0)),
        ("STOPGUARD_JOURNAL_POLICY", "0.25", "journal.policy", 0.25),
        ("STOPGUARD_JOURNAL_POLICY", "all", "journal.policy", "all"),
        ("STOPGUARD_HALF_CLOSE", "allow", "liveness.half_close", "allow"),
        ("STOPGUARD_IDEMPOTENCY", "join", "idempotency", "join"),
    ],
)
def test_the_environment_speaks_every_type(variable: str, text: str, key: str, value: object) -> None:
    found: Any = load(environment={variable: text}, flags=ENGINE).configuration
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value


def test_every_setting_has_a_variable_and_no_two_share_one() -> None:
    variables = [variable for one in settings() for variable in one.variables]
    assert len(variables) == len(set(variables))
    assert "STOPGUARD_TIMEOUTS_HEAD_SECONDS" in variables
    # What Kubernetes sets for a Service called stopguard must never be taken for a setting.
    assert not {"STOPGUARD_PORT", "STOPGUARD_SERVICE_HOST", "STOPGUARD_SERVICE_PORT"} & set(variables)


def test_a_variable_that_means_nothing_is_a_warning_but_not_the_ones_of_an_orchestrator() -> None:
    environment = {
        "STOPGUARD_LISTN": "127.0.0.1:1",
        "STOPGUARD_PORT": "tcp://10.0.0.1:8080",
        "STOPGUARD_PORT_8080_TCP_ADDR": "10.0.0.1",
        "STOPGUARD_SERVICE_PORT_HTTP": "8080",
        "STOPGUARD_DEBUG": "1",
        "STOPGUARD_ENGINES_NOBODY_API_KEY": "hunter2",
        "PATH": os.defpath,
    }
    assert load(environment=environment, flags=ENGINE).warnings == (
        "the environment variable STOPGUARD_LISTN means nothing: did you mean STOPGUARD_LISTEN?",
        "the environment variable STOPGUARD_ENGINES_NOBODY_API_KEY means nothing: no engine has this name",
    )


def test_an_engines_key_comes_from_the_environment_under_the_engines_name(written: Any) -> None:
    file = written('[engines.gpu-0]\nurl = "https://10.0.0.1:8000"\napi_key_file = "/run/old"\n')
    loaded = load(file=file, environment={"STOPGUARD_ENGINES_GPU_0_API_KEY": "hunter2"})
    entry = loaded.configuration.engines["gpu-0"]
    assert (entry.api_key_env, entry.api_key_file) == ("STOPGUARD_ENGINES_GPU_0_API_KEY", None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[timeouts]\nhead_second = 3", "timeouts.head_second is not a known key; did you mean head_seconds?"),
        ("workres = 2", "workres is not a known key; did you mean workers?"),
        (
            "[log]\nzebra = 1",
            "log.zebra is not a known key; known here: format, level",
        ),
        ('[engines.a]\nurl = "ftp://x"', "engines.a: 'ftp://x' is no base URL: write it like http://127.0.0.1:8000"),
        ("[engines.a]\n", "engines.a.url is missing"),
        (
            '[engines."b c"]\nurl = "http://x"',
            "engines.b c: 'b c' is not a name for an engine: use letters, digits, '.', '_', '-', at most 64",
        ),
        (
            '[listen]\naddresses = "8080"',
            "listen.addresses.0: '8080' is not an address: write HOST:PORT, like 127.0.0.1:8080 "
            "(0.0.0.0 is every network)",
        ),
        (
            '[admin]\nlisten = "0.0.0.0:9090"',
            "admin: 0.0.0.0:9090 can be reached by others: set admin.token_file or STOPGUARD_ADMIN_TOKEN, "
            "or listen on 127.0.0.1",
        ),
        (
            '[policies]\ndefault = "drian"',
            "policies.default: 'drian' is not a policy: write stop, drain or grace=SECONDS (like grace=5)",
        ),
        (
            '[policies.tenants.t]\npolicy = "drain"',
            "policies.tenants.t: it needs a key: give key_sha256, key_env or key_file",
        ),
        ("[liveness]\nkeep_alive_probes = -1", "liveness.keep_alive_probes must be at least 0, not -1"),
        ('idempotency = "jion"', "idempotency must be one of 'off', 'supersede', 'join', not 'jion'"),
        ("[timeouts]\nqueue_seconds = -1", "timeouts.queue_seconds must be more than 0, not -1"),
        ('[timeouts]\ntotal_seconds = "never"', "timeouts.total_seconds must be a number, not 'never'"),
        ("[limits]\nconnections = 1.5", "limits.connections must be a whole number, not 1.5"),
        ("[books]\nrecent = true", "books.recent must be a whole number, not True"),
        (
            "[journal]\npolicy = 2",
            "journal.policy: 2.0 is not one of all, stops, or a share of the normal finishes from 0 to 1",
        ),
        ("listen = 3", "listen must be a table, not 3"),
        ("workers = 4", "workers is 4, and this version has 1: start more replicas instead"),
        (
            '[listen]\naddresses = "127.0.0.1:9090"',
            "listen and admin both want 127.0.0.1:9090: give them different ports",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_the_key(written: Any, text: str, line: str) -> None:
    file = written(text)
    found = problems(file=file, flags=ENGINE)
    assert [one.removeprefix(f"{file}: ") for one in found] == [line]


def test_all_problems_are_told_at_once_each_with_its_origin(written: Any) -> None:
    file = written('[timeouts]\nhead_second = 3\n[log]\nformat = "xml"\n')
    found = problems(
        file=file,
        environment={"STOPGUARD_LIMITS_CONNECTIONS": "many"},
        flags={**ENGINE, "policies": ["maybe"], "listen.addresses": ["nowhere"]},
    )
    assert [one.partition(": ")[0] for one in found] == [
        "--listen",
        str(file),
        "STOPGUARD_LIMITS_CONNECTIONS",
        str(file),
        "--policy",
    ]
    assert all("\n" not in one for one in found)


def test_no_engine_is_said_before_anything_is_started() -> None:
    assert problems()[0].startswith("there is no engine: give --engine KIND=URL")
    assert isinstance(load(need_engines=False), Loaded)


@pytest.mark.parametrize(
    ("text", "start"),
    [("a = ", "is not TOML: Invalid value"), (b"\xff\xfe", "is not UTF-8 text"), (None, ": No such file or directory")],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, text: str | bytes | None, start: str) -> None:
    file = tmp_path / "stopguard.toml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    (line,) = problems(file=file, flags=ENGINE)
    assert line.removeprefix(str(file)).lstrip().startswith(start)


def test_one_setting_under_two_names_is_ambiguous() -> None:
    environment = {"STOPGUARD_LISTEN": "127.0.0.1:1", "STOPGUARD_LISTEN_ADDRESSES": "127.0.0.1:2"}
    assert problems(environment=environment, flags=ENGINE) == [
        "STOPGUARD_LISTEN_ADDRESSES and STOPGUARD_LISTEN are the same setting: set one of them"
    ]


def test_no_secret_is_ever_shown(written: Any) -> None:
    secret = "correct-horse-battery"
    file = written(f'[engines.a]\nurl = "http://user:{secret}@x"\n[admin]\ntoken = "{secret}"\ntoken_file = "x"\n')
    environment = {"STOPGUARD_ADMIN_TLS_KEY_PASSWORD": secret}
    assert secret not in str(problems(file=file, environment=environment))
    shown = repr(load(environment={"STOPGUARD_ADMIN_TOKEN": secret}, flags=ENGINE))
    assert "admin=" in shown
    assert secret not in shown
    assert problems(environment={"STOPGUARD_ADMIN_TOKEN": "short"}, flags=ENGINE) == [
        "STOPGUARD_ADMIN_TOKEN: admin: the token is shorter than 16 characters: try `openssl rand -hex 32`"
    ]
