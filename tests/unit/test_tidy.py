"""The tidy test: what ruff and mypy cannot know about this repository.

Each check is a function from a file to complaints. `test_each_check_can_fail` feeds every check a file that it must
complain about, so that none of them passes because it looks at nothing.
"""

from __future__ import annotations

import ast
import gc
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 600

HEART = ["errors", "ledger", "stops"]
LOWER_HALF = [*HEART, "listening", "probe", "config", "engines", "telemetry", "preemption"]
MAY_IMPORT: dict[str, list[str]] = {
    "errors": [],
    "listening": ["errors"],
    "ledger": ["errors"],
    "stops": ["errors", "ledger", "probe"],  # of the probe only its event schema
    "probe": ["errors", "listening"],
    "config": [*HEART, "probe"],
    "engines": [*HEART, "probe", "config"],
    "telemetry": [*HEART, "probe", "config", "engines"],
    "preemption": [*HEART, "probe", "config", "engines", "telemetry"],
    "gateway": LOWER_HALF,
    "admin": [*LOWER_HALF, "gateway"],
    "audit": [*LOWER_HALF, "gateway", "admin"],
    "middleware": LOWER_HALF,
    "refengine": [*HEART, "listening", "probe"],
    "testing": [*HEART, "probe", "engines", "preemption", "gateway", "refengine", "audit"],
    "cli": [*LOWER_HALF, "gateway", "admin", "audit", "middleware", "refengine", "testing"],
}
"""Part of stopguard -> the other parts that it may import. A new part needs a row, which is a decision."""

INSIDE_ENGINES = re.compile(
    r"stopguard/(probe/(__init__|wire|sender)\w*|middleware)\.py|adapters/stopguard_\w+/plugin\w*\.py"
)
"""Modules that engines load: of ours they import only `errors`, `probe`, `middleware`, of libraries only msgspec."""

PURE = re.compile(r"stopguard/(ledger|stops|preemption)/(?!journal)")
IMPURE = {
    *("asyncio", "concurrent", "datetime", "multiprocessing", "selectors", "signal", "socket", "sqlite3", "ssl"),
    *("subprocess", "threading", "time", "anyio", "fastapi", "httptools", "httpx", "uvicorn", "uvloop"),
}

ENGINE_NAME = re.compile(r"vllm|sglang|llama_?\.?cpp|trtllm|tensorrt|deepinfer", re.IGNORECASE)

# Joined from halves, so that this file passes its own check.
BANNED: dict[str, str] = {
    r"(?<![\w/.-])/" + r"work(?![\w-])": "a path of somebody's machine",
    r"(?<![\w-])shared" + "/": "a folder outside the repository",
    "/opt/" + "(wheels|pypi)": "a path of somebody's machine",
    "/tmp/" + "sg": "a path of somebody's machine",
    r"pypi\." + r"org|python" + r"hosted\.org|registry\." + r"npmjs|proxy\.go" + r"lang\.org|deb\.deb" + r"ian\.org": (
        "the host of a package registry"
    ),
    "sub-?" + "agent|this work" + "place|helper " + "session": "how the code came about",
    r"[Dd]esign" + r"(\.md| §| section)": "a document outside the repository (docs/rules.md has the rules by number)",
    r"\bissue " + r"#?[1-9]\b": "an issue without its repository (write owner/name#number)",
    r"\b(TO" + "DO|FIX" + "ME|XX" + r"X)\b": "unfinished work (finish it, or write down why it is right)",
}
TEXT_SUFFIXES = {"", ".py", ".pyi", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".sh", ".cfg", ".html", ".js"}
SKIPPED_FOLDERS = {"build", "dist", "htmlcov", "node_modules", "__pycache__"}


class Source:
    """One file: its path relative to the repository, its text, and its syntax tree when it is Python."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    @cached_property
    def tree(self) -> ast.Module:
        # A collection in the middle of it makes CPython 3.11 lose count of its recursion (python/cpython#106905).
        gc.disable()
        try:
            return ast.parse(self.text, self.path)
        finally:
            gc.enable()

    @property
    def part(self) -> str:
        """`ledger` for stopguard/ledger/book.py, `errors` for stopguard/errors.py, "" outside stopguard/."""
        folders = Path(self.path).with_suffix("").parts
        return folders[1] if folders[0] == "stopguard" and folders[1] != "__init__" else ""

    def imports(self) -> Iterator[tuple[int, str]]:
        """Yield (line, full dotted name) of everything imported, at any depth, type-checking imports included."""
        package = Path(self.path).parent.parts
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = [*package[: len(package) - node.level + 1]] if node.level else []
                base += node.module.split(".") if node.module else []
                for alias in node.names:
                    yield node.lineno, ".".join([*base, alias.name])


def length(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines > LINES_MAX:
        yield f"{lines} lines, at most {LINES_MAX}: it has more than one idea"


def module_docstring(source: Source) -> Iterator[str]:
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield "no module docstring"


def import_direction(source: Source) -> Iterator[str]:
    part = source.part
    if part and part not in MAY_IMPORT:
        yield f"`{part}` has no row in MAY_IMPORT of tests/unit/test_tidy.py"
        return
    for line, name in source.imports():
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "stopguard" and part and target in MAY_IMPORT and target not in [part, *MAY_IMPORT[part]]:
            yield f"line {line}: `{part}` must not import `{target}`"
        if part and re.fullmatch(r"stopguard_\w+", top):
            yield f"line {line}: the core imports the adapter {top}; adapters are found by entry point"


def lean_inside_engines(source: Source) -> Iterator[str]:
    if not INSIDE_ENGINES.fullmatch(source.path):
        return
    for line, name in source.imports():
        ours = name.startswith("stopguard.") and name.split(".")[1] not in {"errors", "probe", "middleware"}
        library = name.partition(".")[0] in IMPURE - {"asyncio", "socket", "time", "threading", "selectors", "signal"}
        if ours or library:
            yield f"line {line}: {name} is imported inside an engine; only the standard library and msgspec may be"


def sans_io(source: Source) -> Iterator[str]:
    if not PURE.match(source.path):
        return
    for line, name in source.imports():
        if name.partition(".")[0] in IMPURE:
            yield f"line {line}: `{name}` in the sans-I/O heart; time and I/O come from outside"


def engine_names(source: Source) -> Iterator[str]:
    """Identifiers and strings name no engine; docstrings and comments may, and so may the strings of `cli`."""
    if source.part in {"", "refengine"}:
        return
    prose = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        is_text = isinstance(node, ast.Constant)
        if is_text and (id(node) in prose or source.part == "cli"):
            continue
        for _, value in ast.iter_fields(node):
            names = value if isinstance(value, list) else [value]
            for name in names:
                if isinstance(name, str) and ENGINE_NAME.search(name):
                    yield f"line {getattr(node, 'lineno', '?')}: the core names an engine: {name!r}"


def suppressions(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if re.search(r"#\s*type:\s*ignore(?!\[[\w, -]+\])", line):
            yield f"line {number}: a type suppression without a code"


def no_print(source: Source) -> Iterator[str]:
    if source.part == "cli":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {node.lineno}: print() outside the command line"


def banned_words(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        for pattern, why in BANNED.items():
            found = re.search(pattern, line)
            if found:
                yield f"line {number}: {found.group()!r} is {why}"


def no_test_packages(source: Source) -> Iterator[str]:
    if source.path.startswith("tests/") and source.path.endswith("/__init__.py"):
        yield "test folders have no __init__.py (importlib mode, see docs/contributing.md)"


MODULE_CHECKS: list[Callable[[Source], Iterator[str]]] = [
    *(length, module_docstring, import_direction, lean_inside_engines, sans_io, engine_names, suppressions, no_print),
]
FILE_CHECKS: list[Callable[[Source], Iterator[str]]] = [banned_words, no_test_packages]


def files() -> Iterator[Source]:
    """Yield every text file of the repository, generated and installed ones aside."""
    pending = [ROOT]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            hidden = path.name.startswith(".") and path.name != ".ci"
            if path.is_dir():
                if not hidden and path.name not in SKIPPED_FOLDERS:
                    pending.append(path)
            elif not hidden and path.suffix in TEXT_SUFFIXES and not path.is_symlink():
                yield Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def complaints(source: Source, checks: list[Callable[[Source], Iterator[str]]]) -> list[str]:
    return [f"{source.path}: {complaint}" for check in checks for complaint in check(source)]


def test_modules_are_tidy() -> None:
    modules = [source for source in files() if re.match(r"(stopguard|adapters)/.*\.py$", source.path)]
    assert any(source.path == "stopguard/errors.py" for source in modules)
    assert "\n".join(line for source in modules for line in complaints(source, MODULE_CHECKS)) == ""


def test_files_are_tidy() -> None:
    everything = list(files())
    assert {".ci/run", "Makefile", "README.md"} <= {source.path for source in everything}
    assert "\n".join(line for source in everything for line in complaints(source, FILE_CHECKS)) == ""


def test_the_import_table_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {part for part, lower in MAY_IMPORT.items() if set(lower) <= done} - done
        assert ready, f"a cycle among {sorted(set(MAY_IMPORT) - done)}"
        done |= ready


DOC = '"""Doc."""\n'


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (length, "stopguard/ledger/book.py", "\n" * (LINES_MAX + 1)),
        (module_docstring, "stopguard/ledger/book.py", "x = 1\n"),
        (import_direction, "stopguard/ledger/book.py", "from stopguard.stops import machine\n"),
        (import_direction, "stopguard/ledger/book.py", "from stopguard import stops\n"),
        (import_direction, "stopguard/ledger/book.py", "from ..stops.machine import x\n"),
        (import_direction, "stopguard/stops/machine.py", "def f():\n    import stopguard.gateway.relay\n"),
        (import_direction, "stopguard/gateway/relay.py", "if TYPE_CHECKING:\n    from stopguard.cli import main\n"),
        (import_direction, "stopguard/errors.py", "import stopguard.ledger\n"),
        (import_direction, "stopguard/novelty/thing.py", DOC),
        (import_direction, "stopguard/gateway/routes.py", "import stopguard_anything.adapter\n"),
        (lean_inside_engines, "stopguard/probe/sender.py", "import httpx\n"),
        (lean_inside_engines, "stopguard/probe/wire.py", "from stopguard.ledger import Book\n"),
        (lean_inside_engines, "adapters/stopguard_vllm/plugin.py", "from stopguard import gateway\n"),
        (sans_io, "stopguard/ledger/book.py", "import time\n"),
        (sans_io, "stopguard/stops/controller.py", "from asyncio import sleep\n"),
        (engine_names, "stopguard/gateway/routes.py", "def is_vllm(): ...\n"),
        (engine_names, "stopguard/gateway/routes.py", "kind = 'sglang'\n"),
        (engine_names, "stopguard/gateway/routes.py", "kind = f'{x} llama.cpp'\n"),
        (engine_names, "stopguard/gateway/routes.py", "from x import TensorRT as y\n"),
        (engine_names, "stopguard/engines/registry.py", "f(llama_cpp=1)\n"),
        (engine_names, "stopguard/cli/serve.py", "def trtllm_url(): ...\n"),
        (suppressions, "stopguard/errors.py", "x = 1  # type: " + "ignore\n"),
        (no_print, "stopguard/gateway/relay.py", "print(1)\n"),
        (banned_words, "README.md", "see shared" + "/notes\n"),
        (banned_words, "README.md", "cd /wor" + "k/main\n"),
        (banned_words, "README.md", "from https://py" + "pi.org/simple\n"),
        (banned_words, "stopguard/errors.py", "# TO" + "DO later\n"),
        (banned_words, "stopguard/errors.py", "# see Design" + " §4\n"),
        (no_test_packages, "tests/unit/__init__.py", ""),
    ],
)
def test_each_check_can_fail(check: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    assert list(check(Source(path, text)))


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (
            import_direction,
            "stopguard/cli/serve.py",
            "from stopguard.gateway import serve\nfrom stopguard import ledger\n",
        ),
        (import_direction, "stopguard/stops/machine.py", "from . import causes\nfrom ..ledger import Book\n"),
        (sans_io, "stopguard/ledger/journal.py", "import sqlite3, threading\n"),
        (sans_io, "stopguard/gateway/relay.py", "import asyncio\n"),
        (engine_names, "stopguard/engines/base.py", '"""vLLM answers 200 here."""\nx = 1  # SGLang too\n'),
        (engine_names, "stopguard/cli/serve.py", "help = 'for example vllm=http://127.0.0.1:8000'\n"),
        (engine_names, "stopguard/refengine/policies.py", "class VllmPolicy: ...\n"),
        (
            lean_inside_engines,
            "stopguard/probe/sender.py",
            "import socket, msgspec\nfrom stopguard.probe import wire\n",
        ),
        (suppressions, "stopguard/errors.py", "x = 1  # type: " + "ignore[arg-type]\n"),
        (no_print, "stopguard/cli/explain.py", "print(1)\n"),
        (banned_words, "README.md", "The network is shared; a workload; see vllm-project/vllm#31503, issue 31503.\n"),
    ],
)
def test_no_check_complains_of_what_is_right(check: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    assert list(check(Source(path, text))) == []
