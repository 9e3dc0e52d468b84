"""What the tool that looks at versions of engines makes of books and logs; no engine is started here."""

from __future__ import annotations

import pytest

from stopguard.ledger import Account, Evidence, Ledger, RequestLedgers
from tools.probe_versions import Seen, Trial, grade, in_short, lines_of_ours, table, worst


@pytest.fixture
def ledgers() -> RequestLedgers:
    return RequestLedgers("sg-1", 0.0, engine="e", model="m")


def test_a_ledger_is_worth_its_weakest_end(ledgers: RequestLedgers) -> None:
    assert grade(ledgers, Ledger.QUEUE, probed=True) == ""
    ledgers.post(Account.QUEUE_ARRIVALS, Account.QUEUE_WAITING, 2, 1.0, Evidence.PROBE)
    ledgers.leave(Account.QUEUE_WAITING, Account.QUEUE_GONE, 1, 2.0, Evidence.PROBE)
    assert grade(ledgers, Ledger.QUEUE, probed=True) == "open"
    ledgers.leave(Account.QUEUE_WAITING, Account.QUEUE_GONE, 1, 3.0, Evidence.GAUGE)
    assert grade(ledgers, Ledger.QUEUE, probed=True) == "gauge"


def test_blocks_that_are_still_held_are_no_proof(ledgers: RequestLedgers) -> None:
    ledgers.blocks_taken += 3
    ledgers.blocks_returned += 2
    ledgers.fold(1.0)
    assert grade(ledgers, Ledger.KV, probed=True) == "open"
    ledgers.blocks_returned += 1
    ledgers.fold(2.0)
    assert grade(ledgers, Ledger.KV, probed=True) == "probe"


@pytest.mark.parametrize(("probed", "wanted"), [(True, "probe"), (False, "none")])
def test_tokens_are_proved_by_a_probe_only(ledgers: RequestLedgers, probed: bool, wanted: str) -> None:
    assert grade(ledgers, Ledger.OUTPUT, probed) == ""
    ledgers.tokens_computed += 2
    ledgers.tokens_delivered += 2
    ledgers.fold(1.0)
    assert grade(ledgers, Ledger.OUTPUT, probed) == wanted


def test_the_weakest_of_several_requests_counts() -> None:
    assert worst(["probe", "", "gauge"]) == "gauge"
    assert worst(["probe", "leak", "open"]) == "leak"
    assert worst(["", ""]) == ""


def test_the_log_is_told_once_and_from_our_name_on() -> None:
    log = (
        "(EngineCore pid=7) \x1b[33mWARNING\x1b[0m 11-30 StopGuard's probe is off: no x\n"
        "something else\n"
        "(EngineCore pid=7) INFO 11-30 StopGuard's probe: connected to /tmp/x/probe_versions.sock\n"
        "(EngineCore pid=8) WARNING 11-30 StopGuard's probe is off: no x\n"
    )
    assert lines_of_ours(log) == ("StopGuard's probe is off: no x",)


def test_a_failure_is_told_by_its_end() -> None:
    error = ValueError("pip ended with 1\n" + "WARNING: x\n" * 20 + "ERROR: two versions\nERROR: cannot be")
    assert in_short(error) == "ValueError: pip ended with 1\nERROR: two versions\nERROR: cannot be"


def test_the_table_shows_what_is_missing_and_why_one_was_not_tried() -> None:
    trial = Trial(
        name="cancel, decode",
        outcome="cancel confirmed",
        grades={"queue": "probe", "kv": "gauge", "output": "probe", "link": ""},
        released_seconds=0.0123,
    )
    fine = Seen(
        kind="e",
        version="1.2",
        hooks_attached=("a", "b"),
        hooks_missing=("c",),
        trials=(trial,),
        lines=("StopGuard's plugin: no c",),
        blocks_used_at_the_end=0,
    )
    broken = Seen(kind="e", version="1.1", failure="it needs a GPU")
    text = table([broken, fine])
    head, _, first, second = text.splitlines()[:4]
    assert first.startswith("| 1.1 | not tried |")
    assert second == "| 1.2 | 2 | `c` | probe | gauge | probe | - | 12 ms, - | - | 0 |"
    assert head.count("|") == first.count("|") == second.count("|")
    assert "it needs a GPU" in text
    assert "StopGuard's plugin: no c" in text
    assert "(nothing: all of it is there)" in table([Seen(kind="e", version="1.3")])
