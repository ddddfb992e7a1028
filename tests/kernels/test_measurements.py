# SPDX-License-Identifier: Apache-2.0
"""Work whose results are fetched at the end of a pass, by either kernels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, List

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss import ArrayStatistics
from nnabla_adaloss.kernels import CudaKernels, Kernels, Measurements, measurements_by
from nnabla_adaloss.kernels.device_tasks import DeviceTable
from nnabla_adaloss.kernels.interface import UnscalingList
from nnabla_adaloss.kernels.measurements import DeviceMeasurements
from tests.kernels.arrays import DTYPES, assert_same_floats, nd_array, normal, scaled
from tests.kernels.conftest import CPU
from tests.kernels.host_launcher import HostLauncher


@pytest.fixture(scope="module")
def cuda_kernels(cuda_library: Path) -> CudaKernels:
    return CudaKernels(CPU, HostLauncher(cuda_library))


@pytest.fixture
def measurements(kernels: Kernels) -> Measurements:
    return measurements_by(kernels, rows=2)  # fewer than there are arrays in some tests


def array(*values: float) -> nn.NdArray:
    return nd_array(values)


def test_results_come_in_the_order_of_tickets_and_once(measurements: Measurements, kernels: Kernels) -> None:
    arrays = [nd_array(normal(n, dtype), dtype) for n in (0, 1, 33, 5000) for dtype in DTYPES]
    arrays.append(array(np.inf, 1.0, np.nan))
    for _ in range(2):
        tickets = [*measurements.measure(arrays[:1]), *measurements.measure(arrays[1:])]
        statistics, largest, *_ = measurements.fetch()
        assert [statistics[t] for t in tickets] == [kernels.statistics(x) for x in arrays]
        assert len(statistics) == len(arrays)
        assert largest == []
    assert measurements.measure([]) == []


def test_arrays_are_watched_beside_measured_ones(measurements: Measurements) -> None:
    good, bad = array(1.0), array(2.0, np.inf)
    for arrays, finite in (([good], True), ([good, bad], False), ([], True), ([good], True)):
        measurements.watch(arrays)
        measurements.unscale(UnscalingList([array(6.0) for _ in range(3)], [2.0] * 3))
        assert measurements.fetch() == ([], [3.0] * 3, finite, 0.0)
    measurements.watch([bad])
    assert measurements.fetch() == ([], [], False, 0.0)
    assert measurements.fetch() == ([], [], True, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_magnitude_of_a_loss_is_measured(measurements: Measurements, dtype: Any) -> None:
    good, bad = array(1.0), array(2.0, np.inf)
    for values in ([1.0], [np.nan], [-np.inf], [0.0], [1.0, np.nan, np.inf], [1.0, np.inf]):
        loss = nd_array(values, dtype)
        for arrays, finite in (([], True), ([good], True), ([good, bad], False)):
            measurements.watch(arrays, loss)
            measurements.unscale(UnscalingList([array(np.nan)], [2.0], [array(0.0)]))
            statistics, largest, are_finite, magnitude = measurements.fetch()
            assert (statistics, largest, are_finite) == ([], [np.inf], finite)
            np.testing.assert_equal(magnitude, np.abs(values).max())
    measurements.watch([good])
    assert measurements.fetch().loss_amax == 0.0


def test_the_last_watched_array_may_be_the_loss_or_not(measurements: Measurements) -> None:
    good, bad = array(1.0), array(np.nan)
    for _ in range(2):
        for arrays, loss in (([good, bad], None), ([good], bad)):
            measurements.watch(arrays, loss)
            results = measurements.fetch()
            assert (results.watched_finite, math.isnan(results.loss_amax)) == (
                loss is not None,
                loss is not None,
            )


def test_a_loss_of_any_type_that_nnabla_knows_can_be_watched(measurements: Measurements) -> None:
    for values in (np.ones(1, np.float64), np.ones((), np.int32), np.float32(np.ones((2, 2)))):
        measurements.watch([], nn.NdArray.from_numpy_array(values))
        assert math.isfinite(measurements.fetch().loss_amax)


def test_nothing_is_fetched_where_nothing_was_measured(
    cuda_kernels: CudaKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = DeviceMeasurements(cuda_kernels, rows=2)
    measurements.measure([array(1.0)] * 5)
    fetched: List[int] = []
    fetch = DeviceTable.fetch
    monkeypatch.setattr(
        DeviceTable, "fetch", lambda table, *used: fetched.append(used) or fetch(table, *used)
    )
    measurements.fetch()
    assert fetched == [(5, 2)]
    assert measurements.fetch() == ([], [], True, False)
    measurements.measure([array(1.0)])
    measurements.fetch()
    assert fetched[1:] == [(1, 2)]


def test_an_array_is_measured_as_it_was(measurements: Measurements) -> None:
    x = array(1.0, 2.0)
    measurements.measure([x])
    x.data = np.array([5.0, 5.0], np.float32)
    assert measurements.fetch()[0][0] == ArrayStatistics(2, 3.0, 5.0, 2.0, 1.0, 0, 0)


def test_unscaling_reports_infinities_and_forgets_them(measurements: Measurements) -> None:
    good, bad, master = array(8.0, 4.0), array(np.inf, 1.0), array(1.0, 1.0)
    measurements.unscale(UnscalingList([good, bad], [4.0, 2.0], [master, bad], [True, False]))
    assert measurements.fetch()[1] == [2.0, np.inf]
    np.testing.assert_array_equal(master.data, [3.0, 2.0])
    measurements.unscale(UnscalingList([good], [4.0], [good]))
    assert measurements.fetch()[1] == [2.0]
    np.testing.assert_array_equal(good.data, [2.0, 1.0])


def test_magnitudes_come_in_the_order_of_the_gradients_also_beyond_one_table(
    measurements: Measurements,
) -> None:
    sources, masters = [array(-float(i)) for i in range(7)], [array(100.0) for _ in range(7)]
    accumulate = [i % 2 == 0 for i in range(7)]
    for part in (slice(1), slice(1, 7)):
        count = len(sources[part])
        gradients = UnscalingList(sources[part], [2.0] * count, masters[part], accumulate[part])
        measurements.unscale(gradients)
    assert [float(x.data[0]) for x in masters] == [100.0 * (i % 2 == 0) - i / 2.0 for i in range(7)]
    assert measurements.fetch()[1] == [i / 2.0 for i in range(7)]


def test_gradients_unscaled_in_place_again_and_again(measurements: Measurements) -> None:
    arrays = [nd_array(normal(n)) for n in (0, 1, 2, 31, 33, 1023, 5000)]
    scales = [2.0 ** (i - 3) for i in range(len(arrays))]
    gradients = UnscalingList(arrays, scales)
    for _ in range(2):  # what is kept from the first time serves the second
        before = [x.data.copy() for x in arrays]
        measurements.unscale(gradients)
        assert measurements.fetch()[1] == [
            float(np.abs(old / scale).max(initial=0.0)) for old, scale in zip(before, scales)
        ]
        for x, old, scale in zip(arrays, before, scales):
            assert_same_floats(x.data, old * np.float32(1.0 / scale))
    measurements.unscale(UnscalingList([], []))
    assert measurements.fetch()[1] == []


def test_a_list_may_come_after_any_number_of_gradients(measurements: Measurements) -> None:
    gradients = UnscalingList([array(8.0 + i) for i in range(5)], [1.0] * 5)
    for before in (0, 1, 3, 3, 0):
        others = [array(7.0) for _ in range(before)]
        measurements.unscale(UnscalingList(others, [1.0] * before, others, [False] * before))
        measurements.unscale(gradients)
        assert measurements.fetch()[1] == [7.0] * before + [8.0, 9.0, 10.0, 11.0, 12.0]


def test_gradients_unscaled_into_masters_again_and_again(
    measurements: Measurements, kernels: Kernels
) -> None:
    sizes = (0, 1, 2, 31, 33, 1023, 5000, 7, 9)
    scales = [2.0 ** (i - 3) for i in range(len(sizes))]
    masters = [array(*[np.nan] * n) for n in sizes]
    expected = [array(*[0.0] * n) for n in sizes]
    gradients = UnscalingList([], scales)
    for turn in range(3):  # what is kept from the first time serves the others, whatever each holds now
        dtypes = [np.float16 if (i + turn) % 2 else np.float32 for i in range(len(sizes))]
        sources = [nd_array(normal(n, dtype), dtype) for n, dtype in zip(sizes, dtypes)]
        if not turn:
            gradients = UnscalingList(sources, scales, masters)
        gradients.sources = sources
        before = [x.data.copy() for x in sources]
        for master in masters[turn:]:
            master.zero()
        measurements.unscale(gradients)
        largest = [
            kernels.unscale_add(source, master, scale, accumulate=False)
            for source, master, scale in zip(sources, expected, scales)
        ]
        assert measurements.fetch()[1] == largest
        for source, old, found, wanted in zip(sources, before, masters, expected):
            assert_same_floats(source.data, old)
            assert_same_floats(found.data, wanted.data)


def test_unscaling_in_place_looks_for_the_memory_each_time(measurements: Measurements) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    moved, half = array(4.0), array(8.0)
    gradients = UnscalingList([half, moved], [2.0, 2.0])
    measurements.unscale(gradients)
    moved.zero()
    moved.copy_from(array(6.0))
    half.cast(np.float16)
    measurements.unscale(gradients)
    every_half = nd_array(halves, np.float16)
    measurements.unscale(UnscalingList([every_half], [2.0**3]))
    assert measurements.fetch()[1] == [4.0, 2.0, 2.0, 3.0, np.inf]
    assert_same_floats(half.data, np.float32([2.0]))
    assert_same_floats(moved.data, np.float32([3.0]))
    assert_same_floats(every_half.data, scaled(halves, 2.0**-3, np.float32))
