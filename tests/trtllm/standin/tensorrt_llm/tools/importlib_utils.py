"""`--custom_module_dirs`: a directory is imported as a package of its own name, its parent folder first on the path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["import_custom_module_from_dir"]


def import_custom_module_from_dir(custom_module_path: str | Path) -> ModuleType | None:
    """Raises `ImportError`, which ends the start, when the package cannot be imported."""
    path = Path(custom_module_path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.name)
    except ImportError as error:
        raise ImportError(f"Failed to import package {path.name} from {path}: {error}") from error
