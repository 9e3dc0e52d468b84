"""One run of all storms under one Prometheus, for every test of this folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.dashboards.tools import needs
from tests.dashboards.world import World, prometheus, world


class Scraped:
    """A Prometheus that has scraped the storms, which are over; `fired` are the alerts that fired, by job."""

    def __init__(self, address: str, storms: World, fired: dict[str, set[str]], ended_at: float) -> None:
        self.address = address
        self.storms = storms
        self.fired = fired
        self.ended_at = ended_at


@pytest.fixture(scope="session")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """About 40 seconds, once."""
    import time

    import httpx

    program = needs("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with world() as (storms, join):
        jobs = {name: f"/{name}/metrics" for name in storms.storms}
        with prometheus(program, folder, jobs, f"127.0.0.1:{storms.port}") as address:
            fired: dict[str, set[str]] = {}
            over = threading.Event()

            def watch() -> None:
                with httpx.Client(trust_env=False, timeout=5.0) as client:
                    while not over.wait(0.5):
                        alerts = client.get(f"{address}/api/v1/alerts").json()["data"]["alerts"]
                        for alert in alerts:
                            if alert["state"] == "firing":
                                labels = alert["labels"]
                                fired.setdefault(labels["job"], set()).add(labels["alertname"])

            watching = threading.Thread(target=watch)
            watching.start()
            try:
                join()
                ended_at = time.time()
                time.sleep(2.5)  # the last scrape sees the books at rest
            finally:
                over.set()
                watching.join()
            yield Scraped(address, storms, fired, ended_at)
