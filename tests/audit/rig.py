"""One audit of a reference engine in virtual time, and the score of many."""

from __future__ import annotations

from typing import Any

from stopguard.audit import Audit, AuditReport, Plan
from stopguard.refengine import EngineConfig
from stopguard.refengine.http_face import FaceOptions
from stopguard.refengine.http_virtual import VirtualServer
from tests.audit.virtual import VirtualWorld

#: Small enough that queue and pool can be filled, large enough that requests outlive the watch.
CONFIG: dict[str, Any] = {
    "blocks": 256,
    "max_running": 8,
    "max_model_tokens": 2048,
    "max_batch_tokens": 256,
    "prefill_chunk_tokens": 128,
}


class Score:
    """What the session's audits came to."""

    def __init__(self) -> None:
        self.faults: dict[str, bool] = {}
        self.exact = 0
        self.healthy: list[bool] = []

    def lines(self) -> list[str]:
        found = []
        if self.faults:
            caught = sum(self.faults.values())
            found.append(
                f"audit: {caught} of {len(self.faults)} seeded faults caught with the right ledger named "
                f"({self.exact} with no other ledger named)"
            )
        if self.healthy:
            accused = self.healthy.count(False)
            found.append(f"audit: {len(self.healthy)} runs over healthy engines, {accused} accused")
        return found


async def audit(
    policy: str = "vllm",
    faults: tuple[str, ...] = (),
    *,
    seed: int = 0,
    scenarios: tuple[str, ...] = (),
    observe: str = "",
    **config: Any,
) -> AuditReport:
    """A whole audit; asserts that it leaves no load behind."""
    server = VirtualServer(
        policy, EngineConfig(**{**CONFIG, **config}), faults, seed=seed, options=FaceOptions(dev_mode=True)
    )
    async with server:
        plan = Plan(seed=seed, scenarios=scenarios)
        report = await Audit(VirtualWorld(server), plan, url="virtual", engine="ref", observe=observe).run()
        assert not server.face.exchanges
        if not faults:
            assert server.snapshot().settled
    return report


def accusations(report: AuditReport) -> list[str]:
    return [f"{name}: {cell.ledger} {cell.text} {cell.detail}" for name, cell in report.accusations()]
