"""`python -m stopguard_trtllm` prints the folder for `trtllm-serve --custom_module_dirs`."""

from __future__ import annotations

import sys
from pathlib import Path

__all__: list[str] = []

sys.stdout.write(f"{Path(__file__).resolve().parent / 'patch'}\n")
