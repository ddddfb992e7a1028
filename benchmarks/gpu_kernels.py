# SPDX-License-Identifier: Apache-2.0
"""Check the CUDA kernels on a GPU against float64, then time them against a device-to-device copy.

    python benchmarks/gpu_kernels.py                # checks and timings, about a minute
    python benchmarks/gpu_kernels.py --json results.json
    python benchmarks/gpu_kernels.py --checks-only  # what to run under compute-sanitizer:
    compute-sanitizer --tool memcheck  python benchmarks/gpu_kernels.py --checks-only --largest-gib 0
    compute-sanitizer --tool racecheck python benchmarks/gpu_kernels.py --checks-only --largest-gib 0

Needs CuPy and a GPU: the arrays are CuPy's, the launch code is the package's. With NVIDIA's wheels instead of
a CUDA toolkit, nnabla's CUDA extension is needed as well: pip install nnabla-adaloss[cuda120].

The device is kept busy while kernels are launched, so that Python's time does not count; "host" is Python's
time for a launch. From 256 MiB on, where no cache helps, a kernel is "low" below 85 % of a copy. Exit code 0:
all checks passed; 1: one failed; 2: there is nothing to run on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import nnabla as nn
import numpy as np

from nnabla_adaloss.core.formats import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16
from nnabla_adaloss.core.statistics import ArrayStatistics, statistics_of
from nnabla_adaloss.kernels import CpuKernels, CudaKernels
from nnabla_adaloss.kernels.interface import ScaledCopies, UnscalingList

try:
    import cupy
except ImportError:
    cupy = None

ENOUGH, FROM_MIB = 0.85, 256  # of the speed of a copy, for arrays beyond the caches
LENGTHS = [0, 1, 2, 31, 33, 1023, 4097, 1_000_003]
DTYPES = [np.float32, np.float16]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 65504.0, -65520.0, 6e-8, 3e-8, 1e-40, -1e-45, 3.4e38]
SPECIAL.append(2.0**-126)
CPU = nn.Context(["cpu:float"], "CpuCachedArray", "0")


class GpuArray:
    """CuPy array with the part of NdArray's interface that kernels need."""

    def __init__(self, values: Any) -> None:
        self.values, self.dtype, self.size, self.shape = values, values.dtype, values.size, values.shape

    def data_ptr(self, dtype: Any, context: Optional[nn.Context] = None, write_only: bool = False) -> int:
        if dtype != self.dtype:
            raise AssertionError("kernels never cast")
        return int(self.values.data.ptr)


def on_gpu(values: np.ndarray, offset: int = 0) -> GpuArray:
    """Copy values to the GPU, `offset` elements after an aligned address."""
    memory = cupy.empty(values.size + offset, values.dtype)[offset:]
    memory[...] = cupy.asarray(values)
    return GpuArray(memory)


# ---- checks


class Checks:
    """Prints a line for each check and records whether all passed."""

    def __init__(self) -> None:
        self.all_passed = True

    def __call__(self, name: str, passed: bool) -> None:
        self.all_passed &= bool(passed)
        print(f"  {'ok  ' if passed else 'FAIL'}  {name}", flush=True)


def agree(actual: ArrayStatistics, expected: ArrayStatistics, magnitude: float) -> bool:
    """Check that all are equal, sums to 4e-6 of the sum of magnitudes."""
    return (
        abs(actual.sum - expected.sum) <= 4e-6 * magnitude
        and abs(actual.sum_of_squares - expected.sum_of_squares) <= 4e-6 * expected.sum_of_squares
        and actual._replace(sum=0.0, sum_of_squares=0.0) == expected._replace(sum=0.0, sum_of_squares=0.0)
    )


def same(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Check equality bit for bit, except for the payloads of NaNs."""
    bits = np.uint32 if expected.dtype == np.float32 else np.uint16
    nan = np.isnan(expected)
    return bool(
        (np.isnan(actual) == nan).all() and (actual.view(bits)[~nan] == expected.view(bits)[~nan]).all()
    )


def inputs(dtype: Any) -> Iterator[Tuple[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    for length in LENGTHS:
        yield f"normal, length {length}", generator.standard_normal(length).astype(dtype)
    with np.errstate(over="ignore"):
        special = np.array(SPECIAL).astype(dtype)
    yield "special values", np.tile(special, 1000)[:-3]
    bits = np.uint32 if dtype == np.float32 else np.uint16
    yield "random bit patterns", generator.integers(0, np.iinfo(bits).max, 300_007, bits, True).view(dtype)
    yield "subnormal", generator.integers(0, 2**10, 100_003).astype(bits).view(dtype)
    yield "zeros", np.zeros(5000, dtype)


def check_values(kernels: CudaKernels, check: Checks, dtype: Any, offset: int) -> None:
    cpu = CpuKernels()
    for name, values in inputs(dtype):
        x, where = on_gpu(values, offset), f"{np.dtype(dtype)}, {name}, offset {offset}"
        wide = values.astype(np.float64)
        magnitude = float(np.abs(wide[np.isfinite(wide)]).sum())
        expected = statistics_of(values)
        check(f"statistics: {where}", agree(kernels.statistics(x), expected, magnitude))
        statistics, counts = kernels.exponent_histogram(x)
        fields = np.abs(values).astype(np.float32).view(np.uint32) >> 23
        right = agree(statistics, expected, magnitude)
        check(f"exponent_histogram: {where}", right and (counts == np.bincount(fields, minlength=256)).all())

        with np.errstate(all="ignore"):
            scaled = (values.astype(np.float32) * np.float32(0.3)).astype(dtype)
            quotient = values.astype(np.float32) * np.float32(1 / 3.0)
            total = quotient + np.float32(1)
        target = on_gpu(np.zeros_like(values), offset)
        kernels.scaled_copy(x, target, 0.3)
        check(f"scaled_copy: {where}", same(target.values.get(), scaled))
        master = on_gpu(np.ones(values.size, np.float32), offset)
        found_inf = math.isinf(kernels.unscale_add(x, master, 3.0, accumulate=True))
        check(
            f"unscale_add: {where}",
            same(master.values.get(), total) and found_inf != np.isfinite(total).all(),
        )
        if dtype == np.float32:
            options: List[Dict[str, Any]] = [{}, {"fitted": True}, {"random_key": 2**63 + 5}]
            for storage, option in product((FLOAT16, BFLOAT16, FLOAT8_E5M2, FLOAT8_E4M3), options):
                here = nn.NdArray.from_numpy_array(values)
                lost = cpu.round_to_format(here, here, storage, **option)
                actual = kernels.round_to_format(x, target, storage, **option)
                right = actual[1:] == lost[1:] and same(target.values.get(), here.data)
                finite = np.abs(here.data[np.isfinite(here.data)].astype(np.float64)).sum()
                right = right and agree(actual.statistics, statistics_of(here.data), float(finite))
                check(f"round_to_format {storage.name} {option}: {where}", right)


def check_large(kernels: CudaKernels, check: Checks, gib: float) -> None:
    """Check an array with more elements than a 32-bit number can count: zeros and a few other numbers."""
    size = int(gib * 2**30) // 2 + 5
    x = GpuArray(cupy.zeros(size, np.float16))
    positions = [0, size // 3, 2**31 - 1, 2**31, 2**32 - 1, 2**32, size - 6, size - 1]
    planted = sorted({p for p in positions if p < size})
    for number, position in enumerate(planted, 1):
        x.values[position] = number
    n = len(planted)
    expected = ArrayStatistics(size, n * (n + 1) / 2, n * (n + 1) * (2 * n + 1) / 6, n, 1.0, size - n, 0)
    check(f"statistics: {size} halves", kernels.statistics(x) == expected)
    kernels.scale_(x, 2.0)
    right = all(float(x.values[p]) == 2 * number for number, p in enumerate(planted, 1))
    check(f"scale_: {size} halves", right and kernels.statistics(x) == expected.scaled(2.0))


def check_reproducible(kernels: CudaKernels, check: Checks) -> None:
    x = on_gpu(np.random.default_rng(0).standard_normal(10_000_019).astype(np.float32))
    check("sums are reproducible bit for bit", len({kernels.statistics(x) for _ in range(20)}) == 1)


# ---- timings


SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}
"""


class Stopwatch:
    """Times kernels on the GPU, without the host's time for launching them."""

    def __init__(self, runs: int = 5, repeat: int = 20) -> None:
        self._spin = cupy.RawKernel(SPIN, "spin")
        self._runs, self._repeat = runs, repeat
        self._cycles_per_ms = cupy.cuda.Device().attributes["ClockRate"]  # kHz

    def milliseconds(self, function: Callable[[], object]) -> Tuple[float, float]:
        """Time one run: milliseconds on the GPU, and on the host for launching it."""
        start, stop, best, host = cupy.cuda.Event(), cupy.cuda.Event(), math.inf, math.inf
        launching = 1.0
        for _ in range(self._repeat + 3):
            # Keep the device busy until all is queued.
            self._spin((1,), (1,), (int(2 * launching * self._cycles_per_ms),))
            start.record()
            began = time.perf_counter()
            for _ in range(self._runs):
                function()
            taken = (time.perf_counter() - began) * 1e3
            launching = max(1.0, taken)
            stop.record()
            stop.synchronize()
            best = min(best, cupy.cuda.get_elapsed_time(start, stop) / self._runs)
            host = min(host, taken / self._runs)
        return best, host


class Timing(NamedTuple):
    name: str
    bytes_moved: int
    run: Callable[[], object]


def timings(kernels: CudaKernels, mib: int) -> List[Timing]:
    size = mib * 2**18
    generator = cupy.random.default_rng(0)
    x = GpuArray(generator.standard_normal(size, dtype=np.float32))
    y = GpuArray(cupy.ones(size, np.float32))
    halves = GpuArray(cupy.tile(x.values.astype(np.float16), 2))
    half_copy = GpuArray(cupy.empty_like(halves.values))
    table = kernels.table(1, gradients=1)
    n = x.values.nbytes

    def unscale(source: GpuArray, accumulate: bool) -> None:
        master = GpuArray(y.values[: source.size])
        kernels.launch_unscale_list(UnscalingList([source], [1.0], [master], [accumulate]), table)

    half_of = GpuArray(halves.values[:size])
    return [
        Timing("statistics, float32", n, lambda: kernels.launch_statistics([x], table)),
        Timing("statistics, float16", n, lambda: kernels.launch_statistics([halves], table)),
        Timing("exponent_histogram, float32", n, lambda: kernels.launch_exponent_histogram(x, table)),
        Timing("scaled_copy, float32", 2 * n, lambda: kernels.scaled_copy(x, y, 0.5)),
        Timing(
            "scaled_copy, float16",
            2 * n,
            lambda: kernels.scaled_copy(halves, half_copy, 0.5),
        ),
        Timing("scale_, float32", 2 * n, lambda: kernels.scale_(y, 1.0)),
        Timing("unscale_add, float32", 2 * n, lambda: unscale(x, False)),
        Timing("unscale_add, float32, accumulate", 3 * n, lambda: unscale(x, True)),
        Timing("unscale_add, float16", 3 * n // 2, lambda: unscale(half_of, False)),
        Timing(
            "round_to_format float16", 2 * n, lambda: kernels.launch_round_to_format(x, y, FLOAT16, table)
        ),
    ]


def print_timings(kernels: CudaKernels, mib: int) -> List[Dict[str, Any]]:
    """Print a table; return its rows."""
    watch = Stopwatch()
    source, target = cupy.ones(mib * 2**18, np.float32), cupy.empty(mib * 2**18, np.float32)
    copy, _ = watch.milliseconds(lambda: target.data.copy_from_device_async(source.data, source.nbytes))
    speed = 2 * source.nbytes / copy
    print(f"\n{mib} MiB: a device-to-device copy takes {copy:.4f} ms, {speed / 1e6:.0f} GB/s")
    print(f"  {'kernel':34}{'ms':>9}{'host ms':>9}{'GB/s':>8}   {'of the copy':>11}")
    rows = [{"mib": mib, "kernel": "copy", "ms": copy, "gb_per_s": speed / 1e6, "of_copy": 1.0}]
    for timing in timings(kernels, mib):
        taken, host = watch.milliseconds(timing.run)
        ratio, gigabytes = timing.bytes_moved / taken / speed, timing.bytes_moved / taken / 1e6
        low = "   low" if mib >= FROM_MIB and ratio < ENOUGH and "histogram" not in timing.name else ""
        print(f"  {timing.name:34}{taken:9.4f}{host:9.4f}{gigabytes:8.0f}   {ratio:11.0%}{low}")
        rows.append(
            {
                "mib": mib,
                "kernel": timing.name,
                "ms": taken,
                "host_ms": host,
                "gb_per_s": gigabytes,
                "of_copy": ratio,
            }
        )
    return rows


def print_many_arrays(kernels: CudaKernels) -> List[Dict[str, Any]]:
    """Time as many arrays as ResNet-50 has parameters, of about their sizes."""
    sizes = [64 * 2**i * 64 * 2**i * k for i in range(4) for k in (1, 9, 4, 4, 9, 1, 4, 9, 4, 2, 4, 9, 4)] + [
        2048000
    ]
    sizes += [256 * 2 ** (i % 4) for i in range(108)]
    weights = [GpuArray(cupy.ones(size, np.float32)) for size in sizes]
    gradients = [GpuArray(cupy.ones(size, np.float16)) for size in sizes]
    scaled = [GpuArray(cupy.empty(size, np.float16)) for size in sizes]
    table = kernels.table(len(sizes), gradients=len(sizes))
    copies = ScaledCopies(weights, scaled, [0.5] * len(sizes), [True] * len(sizes))
    unscaling = UnscalingList(gradients, [1024.0] * len(sizes), weights, [True] * len(sizes))
    work = {
        "statistics": lambda: kernels.launch_statistics(weights, table),
        "scaled copies, float16 of float32": lambda: kernels.scaled_copy_all(copies),
        "unscale_add": lambda: kernels.launch_unscale_list(unscaling, table),
        "largest magnitude": lambda: kernels.launch_largest(weights, table, [0] * len(weights)),
    }
    print(f"\n{len(sizes)} arrays of {sum(sizes)} float32 in all")
    print(f"  {'all of them':34}{'GPU ms':>9}{'host ms':>9}")
    watch, rows = Stopwatch(), []
    for name, run in work.items():
        taken, host = watch.milliseconds(run)
        print(f"  {name:34}{taken:9.4f}{host:9.4f}")
        rows.append({"arrays": len(sizes), "kernel": name, "ms": taken, "host_ms": host})
    return rows


def missing() -> Optional[str]:
    """Return the reason why no GPU can be used, or None."""
    if cupy is None:
        return "CuPy is not installed. Install the one for your CUDA version, such as cupy-cuda12x==13.6.0."
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy's own exception types need a working driver library, too
        return f"CuPy finds no usable NVIDIA driver: {error}"
    return None if count else "The driver is there, but it sees no GPU."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=int, default=0, help="number of the GPU (default: 0)")
    parser.add_argument("--checks-only", action="store_true", help="no timings")
    parser.add_argument(
        "--largest-gib",
        type=float,
        default=9.0,
        help="size of the largest array checked (default: 9; 0: none)",
    )
    parser.add_argument(
        "--mib",
        type=int,
        nargs="+",
        default=[1, 16, 64, 256, 1024],
        help="array sizes (default: 1 16 64 256 1024)",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"Nothing to run on. {reason}", file=sys.stderr)
        return 2

    with cupy.cuda.Device(arguments.device) as device:
        name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        versions = (
            f"CUDA {cupy.cuda.runtime.runtimeGetVersion()}, driver {cupy.cuda.runtime.driverGetVersion()}"
        )
        print(f"{name}, {versions}, CuPy {cupy.__version__}, nnabla {nn.__version__}")
        context = nn.Context(
            ["cudnn:half", "cuda:half", "cpu:half"], "CudaCachedArray", str(arguments.device)
        )
        kernels, check = CudaKernels(context), Checks()
        for dtype in DTYPES:
            for offset in (0, 1):
                check_values(kernels, check, dtype, offset)
        if arguments.largest_gib:
            check_large(kernels, check, arguments.largest_gib)
        check_reproducible(kernels, check)
        print("All checks passed." if check.all_passed else "Some checks FAILED.")
        rows: List[Dict[str, Any]] = []
        if not arguments.checks_only:
            for mib in arguments.mib:
                rows += print_timings(kernels, mib)
            rows += print_many_arrays(kernels)
        if arguments.json is not None:
            found = {"gpu": name, "versions": versions, "passed": check.all_passed, "timings": rows}
            arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if check.all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
