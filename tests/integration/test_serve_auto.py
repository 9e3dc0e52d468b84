"""`stopguard serve --engine auto=URL`: the engine is asked, waited for, and named after what it is."""

from __future__ import annotations

import httpx

from stopguard.testing.rig import free_port
from tests.integration.serving import Gateway, chat, ended, engine, start


def test_an_engine_is_recognised_and_used() -> None:
    with engine() as url:
        process = start(
            *("serve", "--engine", f"auto={url}", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
            *("--log-format", "json"),
        )
        with ended(process):
            assert process.stderr is not None
            gateway = Gateway(process, process.stderr)
            assert gateway.ready["engines"] == [{"name": "ref", "kind": "ref"}]
            said = gateway.event("identified")
            assert (said["engine"], said["kind"], said["best_evidence"]) == ("ref", "ref", "gauge")
            assert said["version"].startswith("vllm; stopguard ")
            with httpx.Client(trust_env=False, timeout=30.0) as client:
                assert client.post(f"{gateway.url}/v1/chat/completions", json=chat(4, stream=False)).status_code == 200
                (line,) = client.get(f"{gateway.admin}/engines").json()["engines"]
                metrics = client.get(f"{gateway.admin}/metrics").text
    assert (line["kind"], line["version"], line["gauge_unit"]) == ("ref", said["version"], "blocks")
    assert f'stopguard_engine_info{{engine="ref",kind="ref",version="{said["version"][:64]}"}} 1.0' in metrics
    assert any('"event": "auto"' in text and "is ref" in text for text in gateway.lines)


def test_an_engine_that_starts_later_is_waited_for() -> None:
    port = free_port()
    process = start(
        *("serve", "--engine", f"mine:auto=http://127.0.0.1:{port}", "--listen", "127.0.0.1:0", "--admin", "off"),
        *("--log-format", "json"),
    )
    with ended(process):
        assert process.stderr is not None
        line = process.stderr.readline()
        while "does not say what it is yet" not in line:
            assert line, "it did not wait"
            line = process.stderr.readline()
        with engine("--port", str(port), "--policy", "sglang", "--no-truth"):
            gateway = Gateway(process, process.stderr)
            assert gateway.ready["engines"] == [{"name": "mine", "kind": "sglang"}]


def test_nobody_there_is_one_line_and_no_start() -> None:
    process = start(
        "serve",
        *("--engine", f"auto=http://127.0.0.1:{free_port()}", "--listen", "127.0.0.1:0", "--admin", "off"),
        environment={"STOPGUARD_IDENTIFY_SECONDS": "0.3"},
    )
    with ended(process):
        assert process.stderr is not None
        text = process.stderr.read()
        assert process.wait(30) != 0
    assert "does not answer: start it first, raise identify_seconds" in text.strip().splitlines()[-1]
    assert "Traceback" not in text
