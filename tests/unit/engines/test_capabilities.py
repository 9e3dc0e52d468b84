"""What can be proved follows from the doors and the gauges."""

from __future__ import annotations

from stopguard.engines import Capabilities, GaugeUnit, OpenAIEngine, derived_evidence
from stopguard.ledger import Evidence
from stopguard.stops import CLOSE_CONNECTION, Door, DoorKind, EngineProfile


def test_evidence_is_the_best_of_what_there_is() -> None:
    plain = EngineProfile(name="e")
    assert derived_evidence(plain, gauges=False) is Evidence.SENT
    assert derived_evidence(plain, gauges=True) is Evidence.GAUGE
    call = Door(name="abort", kind=DoorKind.CALL, worth=Evidence.ACCEPTED)
    assert derived_evidence(EngineProfile(name="e", doors=(call, CLOSE_CONNECTION)), gauges=False) is Evidence.ACCEPTED
    ends = EngineProfile(name="e", doors=(call, CLOSE_CONNECTION), stream_end_is_ack=True)
    assert derived_evidence(ends, gauges=False) is Evidence.STREAM_CLOSED
    assert derived_evidence(EngineProfile(name="e", probed=True), gauges=True) is Evidence.PROBE


def test_of_an_unknown_server_nothing_is_claimed() -> None:
    assert OpenAIEngine("e", "http://127.0.0.1:1").capabilities == Capabilities()
    assert Capabilities().gauge_unit is GaugeUnit.NONE
