"""The one logger, whose lines look like the engine's."""

from __future__ import annotations

import logging
import sys

__all__ = ["logger"]

logger = logging.getLogger("tensorrt_llm")
if not logger.handlers:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [TRT-LLM] [%(levelname).1s] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
