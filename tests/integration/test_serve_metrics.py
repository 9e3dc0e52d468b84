"""`/metrics` of a running gateway says what its book says."""

from __future__ import annotations

import httpx

from tests.integration.serving import chat, engine, gateway


def value(text: str, start: str) -> float:
    """The sum over the series whose line begins with `start`; there must be one."""
    lines = [line for line in text.splitlines() if line.startswith(start)]
    assert lines
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_metrics_and_books_agree() -> None:
    with engine() as url, gateway(url) as server, httpx.Client(trust_env=False, timeout=20.0) as client:
        for _ in range(3):
            answer = client.post(f"{server.url}/v1/chat/completions", json=chat(4, stream=False))
            assert answer.status_code == 200
        reply = client.get(f"{server.admin}/metrics")
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/plain")
        delivered = value(reply.text, 'stopguard_tokens_total{disposition="delivered"')
        assert delivered == 12.0
        assert value(reply.text, "stopguard_engine_up{") == 1.0
        open_metrics = client.get(f"{server.admin}/metrics", headers={"accept": "application/openmetrics-text"})
        assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
        assert open_metrics.text.endswith("# EOF\n")
