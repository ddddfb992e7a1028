# SPDX-License-Identifier: Apache-2.0
"""What is stored, and what is known of it afterwards."""

from __future__ import annotations

from typing import Any

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.core.precision import LayerPrecisions, Precision
from nnabla_adaloss.emulation.rounded_storage import RoundedStorage
from nnabla_adaloss.kernels import CpuKernels
from tests.imports import modules_looked_for

# One that no format holds, one that float16 flushes to zero, one that is too large for float8_e5m2, one that
# is too large for both.
VALUES = np.array([0.1, 1e-9, 6.4e4, 1e9], np.float32)


@pytest.fixture
def storage() -> RoundedStorage:
    return RoundedStorage(LayerPrecisions(Precision("float16", "float8_e5m2")), CpuKernels())


def array(values: Any = VALUES) -> nn.NdArray:
    return nn.NdArray.from_numpy_array(np.asarray(values, np.float32))


def test_data_and_gradients_are_known_by_their_keys_in_formats_of_their_own(storage: RoundedStorage) -> None:
    data, gradient = array(), array()
    assert storage.round_data(3, data, data) is data
    storage.round_gradient(4, gradient)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(data.data, VALUES.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(gradient.data, np.array([0.09375, 0.0, np.inf, np.inf], np.float32))
    stored, rounding = storage.data_statistics(3), storage.data_rounding(3)
    assert stored is not None
    assert rounding is not None
    assert stored == rounding.statistics
    assert (stored.nonfinite, stored.zeros, rounding.underflowed, rounding.overflowed) == (1, 1, 1, 1)
    known = storage.gradient_statistics(4)
    assert known is not None
    assert (known.nonfinite, known.zeros, known.abs_max) == (2, 1, 0.09375)


def test_of_what_was_not_stored_nothing_is_known(storage: RoundedStorage) -> None:
    storage.round_data(3, array(), array())
    storage.round_gradient(4, array())
    assert storage.data_statistics(4) is None
    assert storage.data_rounding(4) is None
    assert storage.gradient_statistics(3) is None


def test_a_gradient_that_is_stored_again_keeps_the_counts_of_the_first_time(storage: RoundedStorage) -> None:
    gradient = array([1.0, 1e-3, 1e-9, 1e9])
    storage.round_gradient(4, gradient)
    gradient.data = gradient.data * np.float32(2.0**-16)
    storage.store_gradient(4, gradient)
    found = storage.gradients[4]
    # One was flushed the first time, and another one the second time; the infinity stays one.
    assert (found.underflowed, found.overflowed) == (2, 1)
    assert (found.statistics.zeros, found.statistics.abs_max) == (2, 2.0**-16)
    np.testing.assert_array_equal(gradient.data, np.array([2.0**-16, 0.0, 0.0, np.inf], np.float32))
    gradient.data = np.float32([2.0**-16, 0.0, 0.0, 1e9])
    storage.store_gradient(4, gradient)
    assert storage.gradients[4][1:] == (2, 2)


def test_a_gradient_may_be_stored_for_the_first_time_after_it_was_scaled(storage: RoundedStorage) -> None:
    storage.store_gradient(4, array())
    assert storage.gradients[4][1:] == (1, 2)


def test_the_scaled_copy_of_a_weight_is_stored_as_weights_are(storage: RoundedStorage) -> None:
    copy = array([0.1, 6.4e4])
    storage.store(3, copy)
    np.testing.assert_array_equal(copy.data, np.array([0.1, 6.4e4], np.float16).astype(np.float32))
    assert not storage.data


def test_what_was_never_written_is_left_alone(storage: RoundedStorage) -> None:
    nothing, target = nn.NdArray((2,)), array([1.0, 2.0])
    nothing.zero()
    assert storage.round_data(3, nothing, target) is nothing
    storage.round_gradient(4, nothing)
    assert nothing.zeroing
    assert storage.data_statistics(3) is storage.gradient_statistics(4) is None


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.bool_])
def test_arrays_of_other_dtypes_are_read_where_they_are(storage: RoundedStorage, dtype: Any) -> None:
    source, target = nn.NdArray.from_numpy_array(np.array([0, 1, 1], dtype)), array([5.0, 5.0, 5.0])
    with modules_looked_for() as looked_for:
        assert storage.round_data(1, source, target) is target
        precision = storage.precision_of(1)
        assert storage.round_operand(source, target, precision, holds_gradient=False) is not None
    assert not looked_for
    assert source.dtype == nn.NdArray.from_numpy_array(np.array([0], dtype)).dtype
    np.testing.assert_array_equal(target.data, np.array([0.0, 1.0, 1.0], np.float32))
