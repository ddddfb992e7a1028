# SPDX-License-Identifier: Apache-2.0
"""How many threads the CPU kernels may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping

CGROUP = Path("/sys/fs/cgroup")


def allowed_threads(environment: Mapping[str, str] = os.environ, cgroup: Path = CGROUP) -> int:
    """`OMP_NUM_THREADS` where that is set, else as many as this process has processors.

    Those are the processors that it may run on (`taskset`, `mpirun --bind-to core`), or fewer where its
    container has less of their time.

    Args:
        environment: variables of the process.
        cgroup: where the limits of the container are.

    Example:
        >>> allowed_threads({"OMP_NUM_THREADS": "3"})
        3
    """
    outermost = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if outermost.isdecimal() and int(outermost) > 0:
        return int(outermost)
    return max(1, min(len(os.sched_getaffinity(0)), round(_processors_of_time(cgroup))))


def _processors_of_time(cgroup: Path) -> float:
    """How many processors' time the container has; more than there are where nothing limits it."""
    try:
        quota, period = (cgroup / "cpu.max").read_text("ascii").split()  # version 2
    except (OSError, ValueError):
        try:
            quota, period = (
                (cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period")
            )
        except OSError:
            return float(os.cpu_count() or 1)
    try:
        limit = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        limit = 0.0
    return limit if limit > 0 else float(os.cpu_count() or 1)  # version 1 says -1
