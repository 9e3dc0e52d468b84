"""What the probe costs inside a real engine: CPU time of the scheduler's own thread, a step.

    python -m benchmarks.probe_cost [vllm] [sglang]

One start an engine. 1, 8 and 32 greedy streams of the same prompts, again and again in one process, with StopGuard's
hooks taken off and put back in between: `on - off` is the difference of all that the thread uses, `hooks` is what is
measured in the hooks themselves, call by call. A collector in a gateway listens all the time.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import click
import msgspec

from stopguard.gateway.probing import ProbeSettings
from stopguard.testing import rig
from stopguard.testing.conformance import Subject

TOKEN = "0123456789abcdef0123456789abcdef"
PLUGIN = Path(__file__).with_name("probe_cost_plugin") / "stopguard_probe_cost.py"
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
RUNNING = (1, 8, 32)
ANSWER_SECONDS = 30.0
#: What the design allows: so much a step at 32 running requests, and so much a request that has changed in it.
STEP_MICROSECONDS, CHANGED_MICROSECONDS = 30, 2


class Reading(msgspec.Struct, frozen=True):
    number: int
    used_ns: int
    ours_ns: dict[str, int]
    clock_ns: int
    steps: int
    requests: int


class Round(msgspec.Struct, frozen=True):
    """One round of streams, in microseconds of the thread a step."""

    mode: str
    steps: int
    requests: float
    used: float
    ours: dict[str, float]


class Switch:
    """The plugin in the engine's process, by files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0

    def turn(self, mode: str) -> Reading:
        """What was used until now; from now on `mode`."""
        self._number += 1
        (self.folder / "order.new").write_text(f"{self._number} {mode}")
        (self.folder / "order.new").rename(self.folder / "order")
        due_at = monotonic() + ANSWER_SECONDS
        while True:
            answer = self.folder / "answer"
            if answer.exists():
                reading = msgspec.json.decode(answer.read_bytes(), type=Reading)
                if reading.number == self._number:
                    return reading
            assert monotonic() < due_at, "the plugin in the engine does not answer"
            sleep(0.005)


def _installed(kind: str, folder: Path) -> Path:
    plugins = folder / "plugins"
    information = plugins / "stopguard_probe_cost-1.dist-info"
    information.mkdir(parents=True)
    shutil.copy(PLUGIN, plugins)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stopguard-probe-cost\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        f"[{GROUPS[kind]}]\nstopguard_cost = stopguard_probe_cost:register_{kind}\n"
    )
    return plugins


async def _streams(subject: Subject, count: int, tokens: int) -> None:
    """`count` streams at once from the engine itself; the same ones each time."""
    calls = [subject.shape.call(subject.shape.prompt(number + 1), tokens=tokens) for number in range(count)]
    replies = [(await subject.direct.open(call)).reply for call in calls]
    for reply in replies:
        assert await subject.direct.wait(lambda reply=reply: reply.ended, 300.0)  # type: ignore[misc]
        assert reply.complete, reply.errors or reply.failure


def _round(subject: Subject, switch: Switch, mode: str, count: int, tokens: int) -> Round:
    before = switch.turn(mode)
    subject.run(lambda: _streams(subject, count, tokens))
    after = switch.turn(mode)
    steps = after.steps - before.steps
    return Round(
        mode,
        steps,
        (after.requests - before.requests) / steps,
        (after.used_ns - before.used_ns) / 1000 / steps,
        {name: (after.ours_ns[name] - before.ours_ns[name]) / 1000 / steps for name in after.ours_ns},
    )


def _measure(subject: Subject, switch: Switch, count: int, tokens: int, pairs: int) -> dict[str, Any]:
    _round(subject, switch, "on", count, tokens)  # prompts are in the prefix cache from now on, for both alike
    rounds = []
    for number in range(pairs):
        order = ("on", "off") if number % 2 else ("off", "on")
        rounds += [_round(subject, switch, mode, count, tokens) for mode in order]
    timed = _round(subject, switch, "timed", count, tokens)
    on, off = ([each.used for each in rounds if each.mode == mode] for mode in ("on", "off"))
    differences = [one - other for one, other in zip(on, off, strict=True)]
    return {
        "running": count,
        "requests_a_step": timed.requests,
        "steps": sum(each.steps for each in rounds) + timed.steps,
        "off": statistics.median(off),
        "on": statistics.median(on),
        "differences": differences,
        "hooks": sum(timed.ours.values()),
        "by_method": timed.ours,
    }


def _line(row: dict[str, Any]) -> str:
    differences = sorted(row["differences"])
    aim = STEP_MICROSECONDS + CHANGED_MICROSECONDS * row["running"]
    return (
        f"{row['running']:7}  {row['requests_a_step']:15.1f}  {row['steps']:6}  {row['off']:7.0f}  {row['on']:7.0f}"
        f"  {statistics.median(differences):8.1f}  ({differences[0]:.0f} to {differences[-1]:.0f})"
        f"  {row['hooks']:6.1f}  {aim:4}"
    )


def _engine(kind: str, tokens: int, pairs: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        socket = str(folder / "probe.sock")
        plugins = _installed(kind, folder)
        environment = {
            "STOPGUARD_COLLECTOR": socket,
            "STOPGUARD_COLLECTOR_TOKEN": TOKEN,
            "STOPGUARD_COST_FOLDER": str(folder),
            "PYTHONPATH": str(plugins),
            # Else it spins for its helpers whenever something else has their core, and that would be measured.
            "OMP_NUM_THREADS": "1",
        }
        options = {"plugins": ("stopguard_cost",), "plugin_folders": (plugins,)} if kind == "vllm" else {}
        probes = ProbeSettings(listen=(socket,), token=TOKEN)
        with (
            rig.start(rig.recipe_of(kind), environment=environment, options=options) as engine,
            Subject(kind, engine.url, model=engine.model, probes=probes) as subject,
        ):
            subject.run(lambda: _streams(subject, 2, 100))
            print(f"{kind}, microseconds of the scheduler's thread a step\n")
            print("running  requests a step   steps      off       on    on - off  (of each pair)  hooks   aim")
            rows = []
            switch = Switch(folder)
            for count in RUNNING:
                rows.append(_measure(subject, switch, count, tokens, pairs))
                print(_line(rows[-1]), flush=True)
            return rows


@click.command(help=__doc__)
@click.argument("kinds", nargs=-1, type=click.Choice(sorted(GROUPS)))
@click.option("--tokens", default=400, show_default=True, help="Tokens of each stream.")
@click.option("--pairs", default=5, show_default=True, help="Rounds with the hooks and without, of each.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(kinds: tuple[str, ...], tokens: int, pairs: int, json_file: Path | None) -> None:
    """Print microseconds a step."""
    found = {kind: _engine(kind, tokens, pairs) for kind in kinds or tuple(GROUPS)}
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
