"""StopGuard: every stop of an LLM request made fast, acknowledged and accounted for.

A stop that is sent is not a stop that happened. The packages, each importing only those before it:

* `stopguard.ledger`     the five ledgers of a request, as double entry, and their journal;
* `stopguard.stops`      what a stop is and how it proceeds: tables, deadlines, retries, escalation;
* `stopguard.probe`      what an engine's scheduler says, and how it travels;
* `stopguard.engines`    what StopGuard asks of an engine;
* `stopguard.gateway`    the data plane, and beside it `admin`, `audit`, `preemption`;
* `stopguard.refengine`  a deterministic engine to learn and to test with;
* `stopguard.cli`        the command line.

This module stays empty of imports: engines load StopGuard's plugin from here, and pay for what they import.
"""

__version__ = "0.1.0"
