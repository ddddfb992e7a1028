# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from nnabla_adaloss.kernels.cpu_threads import allowed_threads

PROCESSORS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("value", "threads"), [("1", 1), ("7", 7), (" 3 ", 3), ("4,2", 4)])
def test_omp_num_threads_decides(value: str, threads: int, tmp_path: Path) -> None:
    assert allowed_threads({"OMP_NUM_THREADS": value}, tmp_path) == threads


@pytest.mark.parametrize("value", ["", "0", "-1", "many"])
def test_what_is_no_number_of_threads_does_not(value: str, tmp_path: Path) -> None:
    assert allowed_threads({"OMP_NUM_THREADS": value}, tmp_path) == PROCESSORS


def test_a_process_that_is_bound_to_one_processor_has_one_thread(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert allowed_threads({}, tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("limit", "threads"),
    [
        ("max 100000", PROCESSORS),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("99900000 100000", PROCESSORS),
    ],
)
def test_a_container_with_less_time_has_fewer(limit: str, threads: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert allowed_threads({}, tmp_path) == threads


@pytest.mark.parametrize(("quota", "threads"), [("-1", PROCESSORS), ("100000", 1)])
def test_containers_of_cgroup_version_1(quota: str, threads: int, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert allowed_threads({}, tmp_path) == threads
