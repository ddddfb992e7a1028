# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels' shared library: supported processors and allowed threads."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any, List, Mapping

from .native import LIBRARY, digest, sources


def opened(path: Path) -> Any:
    """Open the library and declare its functions; ImportError unless built from the sources beside it."""
    cure = "run `python -m building` in the checkout"
    if not path.is_file():
        raise ImportError(f"the CPU kernels of nnabla_adaloss are not built ({path} is missing): {cure}")
    library = ctypes.CDLL(str(path))
    library.adaloss_sources.restype = ctypes.c_char_p
    if sources() and library.adaloss_sources().decode() != digest():
        raise ImportError(f"{path} was built from other sources than those beside it: {cure}")
    library.adaloss_level.argtypes, library.adaloss_level.restype = [ctypes.c_int], ctypes.c_void_p
    library.adaloss_level_name.argtypes = [ctypes.c_void_p]
    library.adaloss_level_name.restype = ctypes.c_char_p
    # Level, threads, tasks, their number, and results; `adaloss_round` takes one task.
    calls: List[Any] = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p]
    library.adaloss_statistics.argtypes = library.adaloss_scale.argtypes = calls
    library.adaloss_round.argtypes = [*calls[:3], ctypes.c_void_p]
    for work in (library.adaloss_statistics, library.adaloss_scale, library.adaloss_round):
        work.restype = None
    return library


@cache
def library() -> Any:
    """The library of this package."""
    return opened(LIBRARY)


def levels() -> List[str]:
    """Compiled levels that this processor supports, the fastest first."""
    names: List[str] = []
    while (level := library().adaloss_level(len(names))) is not None:
        names.append(library().adaloss_level_name(level).decode())
    return names


def allowed_threads(
    environment: Mapping[str, str] = os.environ, cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """`OMP_NUM_THREADS` if set, else the processors that the process may use, or its container's share."""
    outermost = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if outermost.isdecimal() and int(outermost) > 0:
        return int(outermost)
    return max(1, min(len(os.sched_getaffinity(0)), round(_processors_of_time(cgroup))))


def _processors_of_time(cgroup: Path) -> float:
    """Processor time of the container, in processors; all of them without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        try:
            quota, period = " ".join((cgroup / name).read_text("ascii") for name in names).split()
            if int(quota) > 0:  # version 1 says -1 for no limit, version 2 says "max"
                return int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            pass
    return float(os.cpu_count() or 1)
