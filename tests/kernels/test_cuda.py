# SPDX-License-Identifier: Apache-2.0
"""What only the CUDA kernels do, run on the CPU; what all kernels do is in test_interface.py."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, List

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.kernels import CudaKernels
from nnabla_adaloss.kernels.cuda_launcher import layout
from nnabla_adaloss.kernels.interface import UnscalingList
from tests.kernels.arrays import DTYPES, assert_same_floats, assert_statistics, everything, nd_array, normal
from tests.kernels.conftest import CPU
from tests.kernels.host_launcher import THREADS_PER_BLOCK, HostLauncher
from tests.kernels.memory_array import reserved_zeros

LENGTHS = [0, 1, 3, 4, 7, 8, 31, 33, 5000]


@pytest.fixture
def kernels(launcher: HostLauncher) -> CudaKernels:
    return CudaKernels(CPU, launcher)


# ---- many arrays in one launch


def test_one_launch_for_the_statistics_of_many_arrays(kernels: CudaKernels, launcher: HostLauncher) -> None:
    arrays = [normal(length, dtype, seed) for seed, length in enumerate(LENGTHS) for dtype in DTYPES]
    table = kernels.table(len(arrays) + 3)
    kernels.launch_statistics([nd_array(x, x.dtype) for x in arrays], table, first_row=3)
    assert math.isfinite(kernels.largest([nd_array(x, x.dtype) for x in arrays]))
    assert launcher.launches == ["statistics", "largest_magnitude"]
    rows, _ = table.fetch(len(arrays) + 3, 0)
    for row, values in zip(rows[3:], arrays):
        assert_statistics(row.statistics, values)
    assert [row.statistics.count for row in rows[:3]] == [0, 0, 0]


def gradients_to_unscale(count: int) -> UnscalingList:
    sources = [nd_array(normal(i, DTYPES[i % 2], i), DTYPES[i % 2]) for i in range(count)]
    masters = [nd_array(np.ones(i)) for i in range(count)]
    return UnscalingList(
        sources, [2.0 ** (i % 5) for i in range(count)], masters, [i % 3 == 0 for i in range(count)]
    )


def test_unscaling_of_many_gradients_takes_as_few_launches_as_fit(
    kernels: CudaKernels, launcher: HostLauncher
) -> None:
    gradients = gradients_to_unscale(100)
    table = kernels.table(0, gradients=103)
    kernels.launch_unscale_list(gradients, table, first=3)
    assert launcher.launches == ["unscale_add"] * 2
    _, largest = table.fetch(0, 103)
    assert largest[:3] == [0.0] * 3
    for i, (found, source, master) in enumerate(zip(largest[3:], gradients.sources, gradients.masters or ())):
        quotient = source.data.astype(np.float32) / np.float32(2.0 ** (i % 5))
        assert found == np.abs(quotient).max(initial=0.0)
        assert_same_floats(master.data, quotient + np.float32(1) if i % 3 == 0 else quotient)


def test_the_largest_magnitudes_stay_until_the_table_is_cleared(kernels: CudaKernels) -> None:
    table, gradients = kernels.table(2, gradients=50), gradients_to_unscale(50)
    bad = gradients.sources[1].data.copy()
    bad[-1] = np.nan
    kernels.launch_unscale_list(UnscalingList([nd_array(bad)], [1.0]), table)
    kernels.launch_unscale_list(gradients, table)
    _, largest = table.fetch(0, 50)
    assert largest[0] == np.inf
    assert np.isfinite(largest[1:]).all()
    table.clear()
    assert table.fetch(0, 50)[1] == [0.0] * 50


def test_bad_arguments_launch_nothing(kernels: CudaKernels, launcher: HostLauncher) -> None:
    with pytest.raises(TypeError, match="int32"):
        kernels.launch_statistics([nd_array([1.0]), nd_array([1], np.int32)], kernels.table(2))
    assert launcher.launches == []


def test_used_rows_of_a_table_alone_are_fetched(
    kernels: CudaKernels, launcher: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = kernels.table(100, gradients=51)
    arrays = [normal(10, seed=seed) for seed in range(3)]
    kernels.launch_statistics([nd_array(x) for x in arrays], table)
    kernels.launch_unscale_list(gradients_to_unscale(2), table)
    sizes: List[int] = []
    fetch = launcher.fetch
    monkeypatch.setattr(launcher, "fetch", lambda memory, size: sizes.append(size) or fetch(memory, size))
    rows, largest = table.fetch(3, 2)
    assert sizes == [52 * 4 + 3 * layout("Row").itemsize]
    assert len(largest) == 2
    for row, values in zip(rows, arrays):
        assert_statistics(row.statistics, values)


def test_threads_may_share_the_kernels(kernels: CudaKernels) -> None:
    arrays = [normal(200, seed=seed) for seed in range(8)]

    def largest(x: np.ndarray) -> List[float]:
        return [kernels.statistics(nd_array(x)).abs_max for _ in range(20)]

    with ThreadPoolExecutor(max_workers=4) as pool:
        for x, found in zip(arrays, pool.map(largest, arrays)):
            assert found == [np.abs(x).max()] * 20


# ---- reproducibility


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_do_not_depend_on_the_neighbours_in_a_launch(kernels: CudaKernels, dtype: Any) -> None:
    x = nd_array(normal(5000, dtype) * dtype(1e-3), dtype)
    alone = kernels.statistics(x)
    table = kernels.table(5)
    kernels.launch_statistics([nd_array(normal(100)), x, nd_array(normal(7000)), x, x], table)
    rows = [row.statistics for row in table.fetch(5, 0)[0]]
    assert [rows[1], rows[3], rows[4]] == [alone] * 3  # equal to the last bit


@pytest.mark.parametrize("max_blocks", [1, 2, 5])
def test_any_number_of_blocks(cuda_library: Path, max_blocks: int) -> None:
    kernels = CudaKernels(CPU, HostLauncher(cuda_library, max_blocks))
    values = normal(20000)
    values[[0, 77, 2047, 2048, 19999]] = [0.0, np.nan, np.inf, 1e-40, 1e30]
    assert_statistics(kernels.statistics(nd_array(values)), values)
    _, counts = kernels.exponent_histogram(nd_array(values))
    assert counts.sum() == 20000


# ---- the threads of a block


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_threads_that_run_at_once_come_to_the_same(cuda_library: Path, dtype: Any) -> None:
    # Elsewhere threads take turns: none gets between another's reading and writing. Here all of them count
    # in two places of a histogram, and long enough to be at it at once.
    values = np.exp2(np.arange(400_000) % 2).astype(dtype)
    turns, real = (CudaKernels(CPU, HostLauncher(cuda_library, real_threads=r)) for r in (False, True))
    assert everything(real, values) == everything(turns, values)


def test_a_kernel_whose_threads_wait_in_vain_is_an_error(launcher: HostLauncher) -> None:
    launcher.launch("hangs", 2, (np.uint32(THREADS_PER_BLOCK),))
    with pytest.raises(RuntimeError, match="hangs: block 0 hangs: of 64 threads, 63 wait in __syncthreads"):
        launcher.launch("hangs", 2, (np.uint32(THREADS_PER_BLOCK - 1),))
    launcher.launch("hangs", 2, (np.uint32(THREADS_PER_BLOCK),))


# ---- memory


@pytest.mark.parametrize("size", [2**31 + 5, 2**32 + 5])
def test_more_elements_than_32_bits_can_count(cuda_library: Path, size: int) -> None:
    blocks, width = 2**15, 8  # elements of 2 bytes, taken 8 at a time
    chosen, neighbours = [0, 1234, blocks - 2], [1, 1233, blocks - 1]
    kernels = CudaKernels(CPU, HostLauncher(cuda_library, blocks, chosen))
    x = reserved_zeros(np.float16, size)
    length = THREADS_PER_BLOCK * width  # of a stretch; blocks take them in turns
    starts = {
        block: range(block * length, size - length, blocks * length) for block in (*chosen, *neighbours)
    }
    for block in starts:
        for start in starts[block]:
            x.values[start : start + length] = 1
    x.values[-5:] = 1
    kernels.scale_(x, 2.0)
    for block in starts:
        for start in starts[block]:
            assert (x.values[start : start + length] == (2 if block in chosen else 1)).all()
    assert (x.values[-5:] == 2).all()  # left over for block 0


@pytest.mark.parametrize("array_class", ["CpuCachedArray", "CpuArray", ""])
def test_a_context_of_the_host_is_refused_for_a_gpu(array_class: str) -> None:
    with pytest.raises(ValueError, match=f"array_class='{array_class}': those arrays are on the host"):
        CudaKernels(nn.Context(["cuda:float", "cpu:float"], array_class, "0"))
