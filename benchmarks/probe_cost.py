"""What the probe costs inside the real vLLM: CPU time of the scheduler's thread in StopGuard's hooks, a step.

    python -m benchmarks.probe_cost

One start; 1, 8 and 32 greedy streams, all tokens of which are told to a gateway's collector meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from time import sleep

import click

from stopguard.gateway.probing import ProbeSettings, Probing
from stopguard.gateway.server import Gateway
from stopguard.testing import rig
from stopguard.testing.conformance import Subject

TOKEN = "0123456789abcdef0123456789abcdef"
PLUGIN = Path(__file__).with_name("probe_cost_plugin") / "stopguard_probe_cost.py"


def _plugins(folder: Path) -> Path:
    plugins = folder / "plugins"
    information = plugins / "stopguard_probe_cost-1.dist-info"
    information.mkdir(parents=True)
    shutil.copy(PLUGIN, plugins)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stopguard-probe-cost\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nstopguard_cost = stopguard_probe_cost:register\n"
    )
    return plugins


def _read(file: Path) -> tuple[int, int, int]:
    found = json.loads(file.read_text())
    return found["nanoseconds"], found["steps"], found["requests"]


async def _streams(subject: Subject, count: int, tokens: int) -> None:
    asked = [await subject.ask(subject.shape.prompt(subject.number()), tokens=tokens) for _ in range(count)]
    for one in asked:
        await subject.text_of(one)


@click.command(help=__doc__)
@click.option("--tokens", default=400, show_default=True, help="Tokens of each stream.")
def main(tokens: int) -> None:
    """Print microseconds a step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cost, socket = folder / "cost.json", folder / "probe.sock"
        probing: list[Probing] = []

        async def prepare(gateway: Gateway) -> None:
            probing.append(Probing(gateway, ProbeSettings(listen=(str(socket),), token=TOKEN), {"vllm": "vllm"}))
            await probing[0].start()

        environment = {
            "STOPGUARD_COLLECTOR": str(socket),
            "STOPGUARD_COLLECTOR_TOKEN": TOKEN,
            "STOPGUARD_COST_FILE": str(cost),
        }
        options = {"plugins": ("stopguard_cost",), "plugin_folders": (_plugins(folder),)}
        with (
            rig.start(rig.recipe_of("vllm"), environment=environment, options=options) as engine,
            Subject("vllm", engine.url, model=engine.model, prepare=prepare) as subject,
        ):
            while not subject.gateway.fleet.members[0].profile.probed:
                sleep(0.1)
            subject.run(lambda: _streams(subject, 2, 100))
            print("running  steps  µs a step in hooks")
            for count in (1, 8, 32):
                before = _read(cost)
                subject.run(lambda count=count: _streams(subject, count, tokens))  # type: ignore[misc]
                after = _read(cost)
                steps = after[1] - before[1]
                print(f"{count:7}  {steps:5}  {(after[0] - before[0]) / 1000 / max(1, steps):.1f}")
            subject.run(lambda: asyncio.wait_for(probing[0].close(), 10.0))


if __name__ == "__main__":
    main()
