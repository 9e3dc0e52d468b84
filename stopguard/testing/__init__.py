"""What others test with: a virtual clock, a seeded storm of stops, and its report.

`storm` runs clients, StopGuard's heart and the reference engine in one virtual time, from one seed;
the same storm stands behind `stopguard demo`, the storm tests and the comparison of policies.
"""

from stopguard.testing.clock import VirtualClock
from stopguard.testing.plan import ClientPlan, Ending, StormPlan, plan_storm
from stopguard.testing.report import StormReport
from stopguard.testing.storm import Storm, StormConfig

__all__ = [
    "ClientPlan",
    "Ending",
    "Storm",
    "StormConfig",
    "StormPlan",
    "StormReport",
    "VirtualClock",
    "plan_storm",
]
