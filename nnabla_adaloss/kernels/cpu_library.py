# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels' shared library: its functions, their threads, the rows of numbers that go in and out."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Any, List, Mapping, Optional, Tuple

from .native import LIBRARY, digest, sources

# The structs of native/adaloss.h. All fields have eight bytes, so nothing lies between them.
_STATISTICS_TASK = Struct("=QqqQ")
_SCALE_TASK = Struct("=QQqqqqd")
_ROUNDING_TASK = Struct("=QQqqdddqqQ")
_STATISTICS = Struct("=ddddqqqq")
_ROW = ctypes.c_char * _STATISTICS.size

statistics_task = _STATISTICS_TASK.pack
"""Address, size, is_half, and the address of 256 counts of exponents or 0."""

scale_task = _SCALE_TASK.pack
"""Addresses of source and target, size, source_is_half, target_is_half, accumulate, factor."""

STATISTICS_FIELDS, SCALE_FIELDS = _STATISTICS_TASK.size // 8, _SCALE_TASK.size // 8
"""How many numbers such a task is, for those who make many at once in NumPy."""

rounding_task = _ROUNDING_TASK.pack
"""Addresses of source and target, size; the format's mantissa_bits, smallest_normal, max, beyond_max;
fitted, at_random, key."""

Statistics = Tuple[float, float, float, float, int, int, int, int]
"""Sum, sum of squares, abs_max, abs_min, zeros, nonfinite, and by rounding underflowed, overflowed."""


def opened(path: Path) -> Any:
    """The library at `path`, with the types of its functions.

    Raises:
        ImportError: it was not built, or from other sources than the ones beside it.
    """
    cure = "run `python -m building` in the checkout"
    if not path.is_file():
        raise ImportError(f"the CPU kernels of nnabla_adaloss are not built ({path} is missing): {cure}")
    library = ctypes.CDLL(str(path))
    library.adaloss_sources.restype = ctypes.c_char_p
    if sources() and library.adaloss_sources().decode() != digest():
        raise ImportError(f"{path} was built from other sources than those beside it: {cure}")
    library.adaloss_level.argtypes = [ctypes.c_int]
    library.adaloss_level.restype = ctypes.c_void_p
    library.adaloss_level_name.argtypes = [ctypes.c_void_p]
    library.adaloss_level_name.restype = ctypes.c_char_p
    calls: List[Any] = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]  # level, threads, tasks
    library.adaloss_statistics.argtypes = [*calls, ctypes.c_int64, ctypes.c_void_p]
    library.adaloss_scale.argtypes = [*calls, ctypes.c_int64, ctypes.c_void_p]
    library.adaloss_round.argtypes = [*calls, ctypes.c_void_p]
    for work in (library.adaloss_statistics, library.adaloss_scale, library.adaloss_round):
        work.restype = None
    return library


_library = lru_cache(maxsize=None)(opened)


@lru_cache(maxsize=256)
def _array_type(of: Any, count: int) -> Any:
    # ctypes forgets the types that nobody holds, and to make one takes as long as ten small arrays do.
    return of * count


class CpuLibrary:
    """The kernels of the shared library, compiled for one kind of processor, on so many threads.

    Its methods take tasks, one behind the other, and let other Python threads run until all are done.

    Args:
        level: which of `levels()`; None: the fastest that this processor can run.
        threads: at most so many work on one large array; None: `allowed_threads()`.
    """

    def __init__(self, level: Optional[str] = None, threads: Optional[int] = None) -> None:
        library = _library(LIBRARY)
        self._level = library.adaloss_level(0 if level is None else self.levels().index(level))
        self._threads = allowed_threads() if threads is None else threads
        self._statistics = library.adaloss_statistics
        self._scale = library.adaloss_scale
        self._round = library.adaloss_round

    @staticmethod
    def levels() -> List[str]:
        """The kinds of processors that the kernels are compiled for and this one is, the fastest first."""
        library = _library(LIBRARY)
        names: List[str] = []
        while (level := library.adaloss_level(len(names))) is not None:
            names.append(library.adaloss_level_name(level).decode())
        return names

    def statistics(self, tasks: bytes) -> List[Statistics]:
        """Do `statistics_task`s."""
        count = len(tasks) // _STATISTICS_TASK.size
        rows = _array_type(_ROW, count)()
        self._statistics(self._level, self._threads, tasks, count, rows)
        return list(_STATISTICS.iter_unpack(rows))

    def scale(self, tasks: bytes) -> List[float]:
        """Do `scale_task`s; the largest magnitude of each product, infinity if anything is not finite."""
        count = len(tasks) // _SCALE_TASK.size
        largest = _array_type(ctypes.c_double, count)()
        self._scale(self._level, self._threads, tasks, count, largest)
        found: List[float] = largest[:]
        return found

    def round(self, task: bytes) -> Statistics:
        """Do a `rounding_task`; the statistics of what came of it."""
        row = _ROW()
        self._round(self._level, self._threads, task, row)
        return _STATISTICS.unpack(row)


def allowed_threads(
    environment: Mapping[str, str] = os.environ, cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """`OMP_NUM_THREADS` where that is set, else as many as this process has processors.

    Those are the processors that it may run on (`taskset`, `mpirun --bind-to core`), or fewer where its
    container has less of their time.
    """
    outermost = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if outermost.isdecimal() and int(outermost) > 0:
        return int(outermost)
    return max(1, min(len(os.sched_getaffinity(0)), round(_processors_of_time(cgroup))))


def _processors_of_time(cgroup: Path) -> float:
    """How many processors' time the container has; as many as there are where nothing limits it."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        try:
            quota, period = " ".join((cgroup / name).read_text("ascii") for name in names).split()
            if int(quota) > 0:  # version 1 says -1 for no limit, version 2 says "max"
                return int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            pass
    return float(os.cpu_count() or 1)
