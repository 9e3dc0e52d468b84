"""Compares StopGuard's relay with its peers, side by side, on one machine and one upstream stub.

::

    python benchmarks/relay.py                          # everything, three rounds (under 20 minutes)
    python benchmarks/relay.py --quick                  # one round of what needs no installation (2 to 3 minutes)
    python benchmarks/relay.py --peers direct,stopguard,nginx --rounds 5 --output run.json --markdown run.md

See docs/benchmarks.md for what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it also runs where the checkout is not installed

from benchmarks.relay_bench import report, rounds, summary
from benchmarks.relay_bench.peers import BASELINE, PEERS
from benchmarks.relay_bench.processes import plan_processors, running_on

CHECKOUT = Path(__file__).resolve().parent.parent


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/relay.py", description="Compare relays side by side.")
    parser.add_argument("--peers", help=f"comma-separated, of: {', '.join(PEERS)}; default: all")
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="one short round; without --peers: no Python peers")
    parser.add_argument("--seconds", type=float, help="length of each load; default: 2, with --quick 1.5")
    parser.add_argument("--samples", type=int, help="closes a window and round; default: 64, with --quick 32")
    parser.add_argument("--no-pin", action="store_true", help="let the operating system place the processes")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write everything, raw rounds included")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the report as a page")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target of StopGuard's was missed")
    parser.add_argument(
        "--cache",
        type=Path,
        default=CHECKOUT / ".bench",
        help="where peers are installed and write their logs; default: .bench",
    )
    chosen = parser.parse_args(arguments)
    if chosen.peers:
        names = list(dict.fromkeys(name.strip() for name in chosen.peers.split(",") if name.strip()))
        unknown = [name for name in names if name not in PEERS]
        if unknown or not names:
            parser.error(f"unknown peers: {', '.join(unknown) or 'none given'}; choose from: {', '.join(PEERS)}")
    else:
        names = [name for name, peer in PEERS.items() if not (chosen.quick and peer.needs_environment)]
    chosen.peers = tuple(names)
    for option, least in (("rounds", 1), ("samples", 1), ("seconds", 0.5)):
        value = getattr(chosen, option)
        if value is not None and value < least:
            parser.error(f"--{option} must be at least {least}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    chosen = parse(arguments)
    began_at = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began_at:5.0f} s] {line}", flush=True)

    work = chosen.cache.resolve() / "logs"
    work.mkdir(parents=True, exist_ok=True)
    plan = rounds.Plan(
        peers=chosen.peers,
        rounds=chosen.rounds or (1 if chosen.quick else 3),
        seconds=chosen.seconds or (1.5 if chosen.quick else 2.0),
        window_samples=chosen.samples or (32 if chosen.quick else 64),
        processors=plan_processors(pin=not chosen.no_pin),
        cache=chosen.cache.resolve(),
        work=work,
    )
    with running_on(plan.processors.client):
        results = uvloop.run(rounds.run(plan, say))
    if BASELINE not in results:
        say(f"{BASELINE} was not among the peers: no ratios")
    summaries = summary.summarize(results)
    verdicts = summary.verdicts(summaries)
    machine = report.machine_line(plan)
    found, remarks = report.tables(summaries, verdicts), report.notes(summaries)
    report.show(machine, found, remarks)
    if chosen.markdown is not None:
        page = report.markdown(machine, found, report.spread_table(summaries), remarks)
        chosen.markdown.write_text(page, encoding="utf-8")
    if chosen.output is not None:
        chosen.output.write_text(report.to_json(machine, results, summaries, verdicts), encoding="utf-8")
    return 1 if chosen.check and any(verdict.reached is False for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
