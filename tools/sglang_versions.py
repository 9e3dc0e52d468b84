"""Which hook points of StopGuard's plugin the versions of SGLang have: a table for docs/engines/sglang.md.

    python tools/sglang_versions.py 0.5.21 0.5.22 0.5.23

Each version's wheel is fetched without its dependencies, and its sources are read, not run. (Inside a running SGLang
the plugin asks in the same words, and names what is missing in one line of the log.)
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from stopguard_sglang import plugin_front, plugin_hooks
from stopguard_sglang.plugin import Hook


class Package:
    """One wheel's sources."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = zipfile.ZipFile(wheel)
        self._names = {name for name in self._wheel.namelist() if name.endswith(".py")}
        self._classes: dict[str, ast.ClassDef] | None = None

    def has(self, target: str) -> bool:
        """Whether there is `package.module.function`, or `package.module.Class.method`, inherited ones included."""
        owner, _, name = target.rpartition(".")
        tree = self._module(owner)
        if tree is not None:
            return any(name in _defined(node) for node in tree.body)
        module, _, kind = owner.rpartition(".")
        tree = self._module(module)
        found = [] if tree is None else [node for node in tree.body if isinstance(node, ast.ClassDef)]
        return any(self._inherits(node, name) for node in found if node.name == kind)

    def _inherits(self, kind: ast.ClassDef, name: str, depth: int = 8) -> bool:
        if any(name in _defined(node) for node in kind.body):
            return True
        bases = [base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in kind.bases]
        return depth > 0 and any(
            self._inherits(self._all()[base], name, depth - 1) for base in bases if base in self._all()
        )

    def _module(self, dotted: str) -> ast.Module | None:
        path = f"{dotted.replace('.', '/')}.py"
        return ast.parse(self._wheel.read(path)) if path in self._names else None

    def _all(self) -> dict[str, ast.ClassDef]:
        if self._classes is None:
            trees = (ast.parse(self._wheel.read(name)) for name in self._names if "/srt/managers/" in name)
            self._classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
        return self._classes


def _defined(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module or class defines or imports."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.ImportFrom | ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name
    elif isinstance(node, ast.If | ast.Try):
        for inner in node.body:
            yield from _defined(inner)


def found_in(version: str, hooks: list[Hook]) -> list[bool]:
    """Which of `hooks` the version has."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, f"sglang=={version}"], check=True)
        package = Package(next(Path(folder).glob("*.whl")))
        return [package.has(hook.target) for hook in hooks]


def main() -> None:
    """Print the table in Markdown."""
    versions = sys.argv[1:]
    hooks = [*plugin_hooks.hooks(), *plugin_hooks.leak_hooks(), *plugin_front.hooks()]
    columns = [found_in(version, hooks) for version in versions]
    rows = [["hook point", *versions], ["---"] * (len(versions) + 1)]
    for number, hook in enumerate(hooks):
        rows.append([f"`{hook.name}`", *("yes" if column[number] else "no" for column in columns)])
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in rows))


if __name__ == "__main__":
    main()
