"""Run by the engine's interpreter once: lets a torchvision built for CUDA be imported beside a torch for the CPU.

Its `_C.so` cannot be loaded there, so the operators of which `torchvision/_meta_registrations.py` registers fake
versions do not exist, and `import torchvision` raises. The lines that go before it declare the schemas of those that
are missing. A torchvision that fits its torch has them, and nothing changes.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

MARK = "# Declares operators that a build for another device could not bring (put here by StopGuard's test rig).\n"
LINES = """import torch as _torch

_declared = _torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(_torch.ops.torchvision, _name):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Put the lines at the head of the module, unless they are there."""
    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        sys.exit("torchvision is not installed here")
    module = pathlib.Path(found.submodule_search_locations[0]) / "_meta_registrations.py"
    text = module.read_text()
    if not text.startswith(MARK):
        module.write_text(MARK + LINES + text)


if __name__ == "__main__":
    main()
