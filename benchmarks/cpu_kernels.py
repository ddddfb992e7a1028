# SPDX-License-Identifier: Apache-2.0
"""Time the CPU kernels, as ratios that can be compared between machines.

    python benchmarks/cpu_kernels.py

A table for each size compares every kernel with its memory traffic (a pass that only reads, a copy that reads
and writes).
"""

from __future__ import annotations

import argparse
import ctypes
import time
from typing import Callable, List, Sequence

import nnabla as nn
import numpy as np

from nnabla_adaloss.core.formats import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16
from nnabla_adaloss.kernels import CpuKernels

MEMCHR = ctypes.CDLL(None).memchr
MEMCHR.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def read_pass(x: np.ndarray) -> None:
    """Read an array of zeros completely: the C library searches for a byte that it does not contain."""
    MEMCHR(x.ctypes.data, 1, x.nbytes)


def fastest(functions: Sequence[Callable[[], object]], seconds: float) -> List[float]:
    """Measure the shortest run of each, in turns, so that a disturbance affects all."""
    for function in functions:
        function()
    best, stop = [float("inf")] * len(functions), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def nd_array(x: np.ndarray) -> nn.NdArray:
    return nn.NdArray.from_numpy_array(x)


def print_passes(megabytes: int, seconds: float) -> None:
    kernels = CpuKernels()
    values = np.random.default_rng(0).standard_normal(megabytes * 2**18).astype(np.float32)
    x, y = nd_array(values), nd_array(values)
    halves = np.tile(values.astype(np.float16), 2)  # as many bytes
    half, half_copy = nd_array(halves), nd_array(halves)

    zeros = nd_array(np.zeros_like(values)).data
    values, copy = x.data, y.data  # the same memory: NumPy's own has larger pages, which read faster

    def read() -> object:
        return read_pass(zeros)

    def move() -> None:
        np.copyto(copy, values)

    rows = {
        "statistics": (lambda: kernels.statistics(x), read),
        "statistics, float16": (lambda: kernels.statistics(half), read),
        "exponent_histogram": (lambda: kernels.exponent_histogram(x), read),
        "scaled_copy": (lambda: kernels.scaled_copy(x, y, 0.5), move),
        "scaled_copy, float16": (lambda: kernels.scaled_copy(half, half_copy, 0.5), move),
        "scale_": (lambda: kernels.scale_(y, 1.0), read),
        "unscale_add, accumulate": (lambda: kernels.unscale_add(x, y, 2.0, accumulate=True), move),
        "unscale_add, in place": (lambda: kernels.unscale_add(y, y, 1.0, accumulate=False), read),
        "round_to_format float16": (lambda: kernels.round_to_format(x, y, FLOAT16), move),
        "round_to_format float16, in place": (lambda: kernels.round_to_format(y, y, FLOAT16), read),
        "round_to_format float8, fitted": (
            lambda: kernels.round_to_format(x, y, FLOAT8_E4M3, fitted=True),
            move,
        ),
        "round_to_format float8, at random": (
            lambda: kernels.round_to_format(x, y, FLOAT8_E5M2, random_key=1),
            move,
        ),
    }
    print(f"\n{megabytes} MiB of float32 or float16")
    print(f"{'kernel':36}{'ms':>9}{'memory':>9}   {'of memory speed':>15}")
    for name, (kernel, memory) in rows.items():
        taken, least = fastest([kernel, memory], seconds)
        print(f"{name:36}{taken * 1e3:9.3f}{least * 1e3:9.3f}   {least / taken:15.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="time to spend on every figure (default: 0.3)"
    )
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=[4, 64], metavar="MB", help="array sizes (default: 4 64)"
    )
    arguments = parser.parse_args()
    for megabytes in arguments.megabytes:
        print_passes(megabytes, arguments.seconds)


if __name__ == "__main__":
    main()
