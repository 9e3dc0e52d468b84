from __future__ import annotations

import pytest

from stopguard.ledger import Evidence, RequestLedgers, StopSummary
from stopguard.stops import Engine, Tracked, retry_advice

SAFE = {Engine.UNDISPATCHED, Engine.WITHDRAWN, Engine.SHELVED, Engine.STOPPED}


@pytest.mark.parametrize("engine", list(Engine), ids=lambda engine: engine.name)
def test_safe_only_where_it_cannot_run_twice(engine: Engine) -> None:
    tracked = Tracked(RequestLedgers("r1", 1.0, engine="e", model="m"), 1.0)
    tracked.machine.engine = engine
    advice = retry_advice(tracked)
    assert advice.safe == (engine in SAFE)
    assert advice.header() == f"{'safe' if advice.safe else 'unsafe'}; reason={advice.reason}"


def test_a_confirmed_stop_says_how_it_is_known() -> None:
    tracked = Tracked(RequestLedgers("r1", 1.0, engine="e", model="m"), 1.0)
    tracked.machine.engine = Engine.STOPPED
    assert retry_advice(tracked).reason == "confirmed stopped (engine)"
    tracked.ledgers.stop = StopSummary(semantics="cancel", source="api", reason="api", observed_at=1.0)
    tracked.ledgers.stop.evidence = Evidence.PROBE
    assert retry_advice(tracked).header() == "safe; reason=confirmed stopped (probe)"
