"""Compiles DeepInfer's C++ scheduler for the CPU; run by the interpreter of the engine's own environment.

    PYTHON build.py SOURCES OUTPUT

`SOURCES` is the unpacked source distribution, `OUTPUT` the extension module to write. Needs g++ 12 or newer and a
torch in that environment (its headers, its libraries, its pybind11). Without optimisation it takes about a minute on
two cores; with it much longer, and the scheduler is never what a test waits for.
"""

import importlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHIM = HERE / "shim"
#: DeepInfer's own translation units: bindings of sequence and scheduler (which are headers), and what those refer to.
UNITS = ("engine/pybind_sequence.cpp", "engine/pybind_scheduler.cpp", "engine/zos.cpp")


def has_format(compiler: str) -> bool:
    """Whether the standard library has <format> (GCC 13 and newer)."""
    probe = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
        input=b'#include <format>\nint main() { return int(std::format("{}", 1).size()) - 1; }\n',
        capture_output=True,
        check=False,
    )
    return probe.returncode == 0


def main() -> None:
    """Compile every unit, two at a time, and link."""
    sources, output = Path(sys.argv[1]).resolve() / "csrc", Path(sys.argv[2]).resolve()
    torch: Any = importlib.import_module("torch")  # of the engine's environment, not of ours

    libraries = Path(torch.__file__).parent / "lib"
    includes = Path(torch.__file__).parent / "include"
    compiler = os.environ.get("CXX", "g++")
    shim = [] if has_format(compiler) else [f"-I{SHIM}"]
    flags = [
        *("-O0", "-std=c++20", "-fPIC", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"),
        *shim,
        *(f"-I{sources}", f"-I{includes}", f"-I{includes / 'torch/csrc/api/include'}"),
        f"-I{sysconfig.get_paths()['include']}",
    ]
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        jobs = [
            (unit, Path(scratch) / f"{number}.o")
            for number, unit in enumerate([*(sources / u for u in UNITS), HERE / "module.cpp"])
        ]

        def compile_unit(job: tuple[Path, Path]) -> None:
            subprocess.run([compiler, *flags, "-c", str(job[0]), "-o", str(job[1])], check=True)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(compile_unit, jobs))
        objects = [str(made) for _, made in jobs]
        torch_libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        link = [compiler, "-shared", "-o", str(output), *objects, f"-L{libraries}", *torch_libraries]
        subprocess.run([*link, f"-Wl,-rpath,{libraries}"], check=True)


if __name__ == "__main__":
    main()
