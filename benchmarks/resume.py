"""Streams of a real engine, preempted and resumed at random: are they the ones that would have come?

    python -m benchmarks.resume                              300 streams of llama.cpp
    python -m benchmarks.resume vllm --logprobs --streams 60
    python -m benchmarks.resume sglang --url http://127.0.0.1:30000

Without `--url` the engine is installed where needed and started (`stopguard.testing.rig`). Each stream is asked
twice through a gateway, undisturbed and cut one to three times; ids, text, usage, finish reason and log
probabilities must be the same. Everything comes from the engine in small pieces (`tests/resume/cuts.py`), since a
fast engine with a small model would have sent the whole answer before any cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Iterator

import click

from stopguard.engines.registry import create
from stopguard.gateway.server import loop_factory
from stopguard.testing import rig
from tests.resume.cuts import Figures, Trial, compare, cutting, narrow_wire

OPTIONS = {"llamacpp": {"model": "spelled"}}


def trials_for(kind: str, model: str, streams: int, *, logprobs: bool, seed: int) -> list[Trial]:
    """Random requests that never end by themselves; half of those to engines that can say ids ask for them."""
    made = []
    for number in range(streams):
        trial = Trial(number, seed, cuts=random.Random(f"{seed} {number}").choice([1, 1, 2, 3]))
        trial.body |= {"model": model, "ignore_eos": True}
        if kind == "vllm" and trial.rng.random() < 0.5:
            trial.body["return_token_ids"] = True
        if logprobs:
            trial.body["logprobs"] = True if trial.chat else 2
        made.append(trial)
    return made


async def measure(
    kind: str, url: str, model: str, streams: int, *, logprobs: bool = False, seed: int = 1, at_once: int = 1
) -> Figures:
    """All trials against the engine at `url`."""
    async with narrow_wire(url, seed) as wire, cutting([create(kind, kind, wire)]) as cutter:
        trials = trials_for(kind, model, streams, logprobs=logprobs, seed=seed)
        return await compare(cutter, trials, at_once=at_once, say=lambda line: click.echo(line, err=True))


def run(
    kind: str, url: str, model: str, streams: int, *, logprobs: bool = False, seed: int = 1, at_once: int = 1
) -> Figures:
    """`measure`, in a loop of its own."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(measure(kind, url, model, streams, logprobs=logprobs, seed=seed, at_once=at_once))


@contextlib.contextmanager
def serving(kind: str, url: str | None, model: str) -> Iterator[tuple[str, str]]:
    """An engine that runs already, or one that is started for this."""
    if url is not None:
        yield url, model
        return
    with rig.start(rig.recipe_of(kind), options=OPTIONS.get(kind)) as engine:
        yield engine.url, engine.model


@click.command(help=__doc__)
@click.argument("kind", default="llamacpp")
@click.option("--url", help="An engine that runs already.")
@click.option("--model", default="tiny", show_default=True, help="Its model's name.")
@click.option("--streams", default=300, show_default=True, type=click.IntRange(1, 5000))
@click.option("--at-once", default=1, show_default=True, type=click.IntRange(1, 16), help="Streams side by side.")
@click.option("--logprobs", is_flag=True, help="Compare log probabilities as well.")
@click.option("--seed", default=1, show_default=True)
def main(kind: str, url: str | None, model: str, streams: int, at_once: int, logprobs: bool, seed: int) -> None:
    with serving(kind, url, model) as (base_url, served):
        figures = run(kind, base_url, served, streams, logprobs=logprobs, seed=seed, at_once=at_once)
    click.echo(f"{kind}: {figures.line()}")
    for what in [*figures.differing, *figures.ties, *figures.unsteady][:20]:
        click.echo(f"  {what}")
    sys.exit(bool(figures.differing))


if __name__ == "__main__":
    main()
