"""Prove that stops work on an engine, or through a gateway, or name what does not: `stopguard audit`.

Read in this order: `plan` (limits), `world` (what a client can do) and `client` (on real sockets), `target` (how an
engine is watched), `stage` and the `scenarios_*` (states, and stops in them), `watch` (evidence), `settle` (what
happens after a stop), `checks` (evidence to verdicts), `verdict`, `runner`, and the reports.
"""

from stopguard.audit.plan import Plan
from stopguard.audit.runner import Audit, chosen
from stopguard.audit.scenario import SCENARIOS, Scenario
from stopguard.audit.verdict import AuditReport, Cell, Outcome, ScenarioReport, exit_code

__all__ = [
    "SCENARIOS",
    "Audit",
    "AuditReport",
    "Cell",
    "Outcome",
    "Plan",
    "Scenario",
    "ScenarioReport",
    "chosen",
    "exit_code",
]
