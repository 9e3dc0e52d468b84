"""A plugin for vLLM that measures StopGuard's own: the thread's CPU time in its hooks, step by step.

`STOPGUARD_COST_FILE` names a file that is rewritten every fifty steps: nanoseconds in hooks since the start, steps, and
requests in the last step. What the clock itself costs is measured at the start and taken off.
"""

from __future__ import annotations

import json
import os
from time import thread_time_ns
from typing import Any

EVERY_STEPS = 50


def register() -> None:
    """Called by vLLM in each of its processes; only those with a probe ever call a hook."""
    from stopguard.probe.sender import Guarded

    original = Guarded.__call__
    readings = [thread_time_ns() for _ in range(10_001)]
    clock = (readings[-1] - readings[0]) // 10_000
    spent = {"nanoseconds": 0, "steps": 0}

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        began = thread_time_ns()
        result = original(self, *arguments, **named)
        spent["nanoseconds"] += thread_time_ns() - began - clock
        if self.name == "update_from_output":
            spent["steps"] += 1
            if spent["steps"] % EVERY_STEPS == 0:
                requests = len(arguments[1].num_scheduled_tokens)
                with open(os.environ["STOPGUARD_COST_FILE"], "w") as file:
                    json.dump({**spent, "requests": requests}, file)
        return result

    Guarded.__call__ = call  # type: ignore[method-assign]
