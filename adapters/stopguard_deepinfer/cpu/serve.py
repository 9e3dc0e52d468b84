"""DeepInfer's real scheduler behind the HTTP face, on a CPU; run by the engine's own interpreter.

PYTHON serve.py EXTENSION --port PORT [--aborts between|at-once|guarded] [--blocks 512] [--chunk 64] …
"""

import argparse
import asyncio
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: The engine's environment has no StopGuard: this folder, and that of the adapter packages.
sys.path[:0] = [str(HERE), str(HERE.parents[1])]


def main() -> None:
    """Serve until a signal ends it."""
    driving, serving = importlib.import_module("engine"), importlib.import_module("stopguard_deepinfer.face")
    uvicorn = importlib.import_module("uvicorn")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extension", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--aborts", choices=serving.ABORT_MODES, default="between")
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=64, help="prompt tokens of one step")
    parser.add_argument("--sequences", type=int, default=8, help="sequences that run at once")
    parser.add_argument("--model-tokens", type=int, default=4096)
    parser.add_argument("--step-seconds", type=float, default=0.004, help="how long a forward pass takes")
    given = parser.parse_args()
    sizes = driving.Sizes(
        blocks=given.blocks,
        block_tokens=given.block_tokens,
        chunk_tokens=given.chunk,
        sequences=given.sequences,
        model_tokens=given.model_tokens,
        step_seconds=given.step_seconds,
    )
    engine = driving.SchedulerEngine(given.extension, sizes)
    face = serving.Face(engine, model=given.model, model_tokens=given.model_tokens, aborts=given.aborts)
    config = uvicorn.Config(face, host="127.0.0.1", port=given.port, log_level="warning", lifespan="on")
    asyncio.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
