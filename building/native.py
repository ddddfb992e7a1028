# SPDX-License-Identifier: Apache-2.0
"""Compile the CPU kernels once per kind of processor, into one shared library."""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List

from .compiler import compiler

NATIVE = Path(__file__).resolve().parent.parent / "nnabla_adaloss" / "kernels" / "native"
SOURCES = runpy.run_path(str(NATIVE / "__init__.py"))  # without importing the package, which needs nnabla
LIBRARY: Path = SOURCES["LIBRARY"]

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=256"]
LEVELS = {"baseline": []}
if platform.machine() == "x86_64":
    LEVELS.update(avx2=AVX2, avx512=AVX2 + AVX512)

# No fused multiply-add: results are the same on every processor.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fopenmp-simd", "-fPIC", "-fvisibility=hidden", "-pthread"]
WARNINGS = ["-Wall", "-Wextra"]


def build_library(library: Path) -> None:
    """Compile the sources into `library`, which is replaced atomically.

    Raises:
        SystemExit: there is no compiler, or it failed.
    """
    command = compiler()
    common = [*command, *FLAGS, *WARNINGS, f"-I{NATIVE}", f'-DSOURCES="{SOURCES["digest"]()}"', "-c"]
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        steps = [[*common, str(source), "-o", f"{folder}/{source.stem}.o"] for source in NATIVE.glob("*.c")]
        for level, flags in LEVELS.items():
            for source in (NATIVE / "level").glob("*.c"):
                output = f"{folder}/{source.stem}.{level}.o"
                steps.append([*common, *flags, f"-DLEVEL={level}", str(source), "-o", output])
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            list(threads.map(_run, steps))
        linked = library.with_suffix(f".{os.getpid()}")
        _run([*command, "-shared", "-pthread", "-s", *(step[-1] for step in steps), "-o", str(linked)])
        os.replace(linked, library)


def _run(command: List[str]) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise SystemExit(
            f"the C compiler {command[0]} cannot be run ({error}): set CC to one that can"
        ) from None
    if done.returncode:
        raise SystemExit(
            f"the CPU kernels of nnabla-adaloss could not be compiled with {command[0]}: set CC to another C "
            "compiler, gcc 9 or clang 9 or newer, or to `python -m ziglang cc` after `pip install ziglang`\n"
            f"{' '.join(command)}\n{done.stdout}"
        )
