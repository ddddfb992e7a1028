# SPDX-License-Identifier: Apache-2.0
"""The library of CPU kernels: one result whatever the processor and the threads."""

from __future__ import annotations

import os
from ctypes import CDLL, c_int64
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
from numpy.typing import NDArray

from nnabla_adaloss.core.formats import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.kernels.cpu_library import allowed_threads, levels, opened
from nnabla_adaloss.kernels.native import LIBRARY, digest
from tests.kernels.arrays import everything, nd_array

Array = NDArray[Any]

FORMATS = (FLOAT16, BFLOAT16, FLOAT8_E5M2, FLOAT8_E4M3.saturating())
PROCESSORS = len(os.sched_getaffinity(0))
THREADED = 2 * (1 << 20) + 4097
"""Enough elements for two threads, and neither whole blocks nor whole registers."""


def useful_threads(size: int, threads: int) -> int:
    """How many threads work on an array."""
    return int(CDLL(str(LIBRARY)).adaloss_useful_threads(c_int64(size), threads))


def values_of(kind: str, length: int) -> Array:
    rng = np.random.default_rng(length)
    x = rng.standard_normal(length).astype(np.float32)
    if kind == "half zeros":
        return np.maximum(x, np.float32(0))
    if kind == "wide":
        return np.asarray(x * np.exp2(rng.uniform(-40, 30, length)).astype(np.float32))
    if kind == "any bits":
        return rng.integers(0, 2**32, length, dtype=np.uint32).view(np.float32)
    return x


@pytest.mark.parametrize("kind", ["normal", "half zeros", "wide", "any bits"])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 4095, 4097, 20011])
@pytest.mark.parametrize("level", levels()[1:])
def test_levels_agree_bit_for_bit(level: str, length: int, kind: str) -> None:
    values = values_of(kind, length)
    with np.errstate(over="ignore", invalid="ignore"):
        halves = values.view(np.float16) if kind == "any bits" else values.astype(np.float16)
    for x in (values, halves):
        assert everything(CpuKernels(level, 1), x, FORMATS) == everything(CpuKernels(threads=1), x, FORMATS)


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize(
    ("kind", "dtype"), [("normal", np.float16), ("half zeros", np.float32), ("wide", np.float32)]
)
def test_the_number_of_threads_changes_no_bit(kind: str, dtype: type) -> None:
    with np.errstate(over="ignore"):
        x = values_of(kind, THREADED).astype(dtype)
    assert useful_threads(x.size, 3) == 2
    assert everything(CpuKernels(threads=3), x, FORMATS) == everything(CpuKernels(threads=1), x, FORMATS)


def test_small_arrays_get_one_thread_and_none_gets_more_than_are_allowed() -> None:
    assert [useful_threads(n, 4) for n in (0, 1, 1 << 20, (2 << 20) - 1)] == [1] * 4
    assert [useful_threads(n << 20, 4) for n in (2, 3, 4, 5, 1 << 20)] == [2, 3, 4, 4, 4]
    assert useful_threads(1 << 40, 1) == 1


def test_a_forked_process_has_its_threads() -> None:
    x, kernels = nd_array(values_of("normal", THREADED)), CpuKernels(threads=2)
    before = kernels.statistics(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if kernels.statistics(x) == before else 1)
    assert os.waitpid(child, 0)[1] == 0


# ---- how many threads


@pytest.mark.parametrize(
    ("value", "threads"),
    [("1", 1), ("7", 7), (" 3 ", 3), ("4,2", 4), *((v, PROCESSORS) for v in ("", "0", "-1", "many"))],
)
def test_omp_num_threads_decides_if_it_is_a_number(value: str, threads: int, tmp_path: Path) -> None:
    assert allowed_threads({"OMP_NUM_THREADS": value}, tmp_path) == threads


def test_a_process_that_is_bound_to_one_processor_has_one_thread(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert allowed_threads({}, tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"cpu.max": "max 100000"}, PROCESSORS),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "99900000 100000"}, PROCESSORS),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, PROCESSORS),  # of version 1
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_a_container_with_less_time_has_fewer(files: Dict[str, str], threads: int, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert allowed_threads({}, tmp_path) == threads


# ---- the file


def test_a_library_that_was_not_built_says_how_to(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"not built .*libadaloss.* is missing.*python -m building"):
        opened(tmp_path / LIBRARY.name)


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    other = tmp_path / LIBRARY.name
    other.write_bytes(LIBRARY.read_bytes().replace(digest().encode(), b"0" * 16))
    with pytest.raises(ImportError, match=r"built from other sources .*python -m building"):
        opened(other)


def test_an_unknown_level_is_an_error() -> None:
    with pytest.raises(ValueError, match="avx9000"):
        CpuKernels("avx9000")
