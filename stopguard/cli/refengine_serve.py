"""`stopguard refengine serve`: the reference engine behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import os

import click

from stopguard.refengine.policies import POLICIES

__all__ = ["command"]


@click.command(name="serve")
@click.option(
    "--policy", type=click.Choice(list(POLICIES)), default="vllm", show_default=True, help="Engine to imitate."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option("--blocks", type=click.IntRange(1), default=512, show_default=True, help="KV blocks in the pool.")
@click.option("--block-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens a block.")
@click.option("--max-running", type=click.IntRange(1), default=32, show_default=True, help="Sequences in a batch.")
@click.option("--max-model-tokens", type=click.IntRange(2), default=4096, show_default=True, help="Context, in tokens.")
@click.option("--pipeline-depth", type=click.IntRange(1, 8), help="Batches in flight (default: the engine's own).")
@click.option("--fault", "faults", multiple=True, metavar="NAME[:PROBABILITY]", help="A seeded defect; repeatable.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed and calls, same ids and outputs.")
@click.option("--speed", type=click.FloatRange(0.01, 1000), default=1.0, show_default=True, help="Times real time.")
@click.option("--step-seconds", type=click.FloatRange(0.0001, 10), help="Base duration of a step (default 0.008).")
@click.option("--eos-probability", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Chance of the end after each token.")  # fmt: skip
@click.option("--probe", metavar="ADDRESS", envvar="STOPGUARD_COLLECTOR", show_envvar=True,
              help="Report to the collector at tcp://HOST:PORT or a Unix socket's path, with the token in "
                   "STOPGUARD_COLLECTOR_TOKEN.")  # fmt: skip
@click.option("--model", default="base", show_default=True, help="Name of the model; MODEL:NAME is its LoRA NAME.")
@click.option("--dev-mode", is_flag=True, help="vLLM's development routes: /abort_requests, /pause, /resume.")
@click.option("--no-truth", is_flag=True, help="Leave out the routes under /ref/.")
def command(
    policy: str,
    host: str,
    port: int,
    blocks: int,
    block_tokens: int,
    max_running: int,
    max_model_tokens: int,
    pipeline_depth: int | None,
    faults: tuple[str, ...],
    seed: int,
    speed: float,
    step_seconds: float | None,
    eos_probability: float,
    probe: str | None,
    model: str,
    dev_mode: bool,
    no_truth: bool,
) -> None:
    """Serve the OpenAI API, with the manners and the stop behaviour of one engine.

    One line with the URL is printed when it is ready. SIGTERM and Ctrl-C end it cleanly.
    """
    from stopguard.refengine.engine import ReferenceEngine
    from stopguard.refengine.http_driver import RealClock
    from stopguard.refengine.http_face import Face, FaceOptions
    from stopguard.refengine.http_openai import CallDefaults
    from stopguard.refengine.http_server import run
    from stopguard.refengine.interface import EngineConfig, StepCost
    from stopguard.refengine.probe import ReferenceProbe

    config = EngineConfig(
        blocks=blocks,
        block_tokens=block_tokens,
        max_running=max_running,
        max_model_tokens=max_model_tokens,
        max_batch_tokens=max(EngineConfig().max_batch_tokens, 2 * max_running),
        pipeline_depth=pipeline_depth,
        step_cost=StepCost() if step_seconds is None else StepCost(base_seconds=step_seconds),
    )
    options = FaceOptions(
        defaults=CallDefaults(model=model, eos_probability=eos_probability), dev_mode=dev_mode, truth=not no_truth
    )
    face = Face(ReferenceEngine(config, policy, faults, seed), RealClock(speed), options, seed=seed)
    watched = ReferenceProbe.from_environment(face, probe, dict(os.environ))
    wrong = f", faults {', '.join(faults)}" if faults else ""
    try:
        run(face, host, port, lambda url: click.echo(f"refengine ready: {url} (policy {policy}{wrong})"))
    finally:
        if watched is not None:
            watched.close()
