# SPDX-License-Identifier: Apache-2.0
"""Whether gradients are finite, and whether there are any."""

from __future__ import annotations

from typing import Any, List, Tuple

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.engine.leaf_gradients import gradients_are_finite, gradients_are_zero
from nnabla_adaloss.kernels import CpuKernels

ONES, ZEROS = np.ones(3, np.float32), np.zeros(3, np.float32)


def parameters(*gradients: Any) -> List[nn.Variable]:
    made = []
    for gradient in gradients:
        v = nn.Variable((3,), need_grad=True)
        if gradient is None:
            v.grad.zero()
        else:
            v.grad = nn.NdArray.from_numpy_array(gradient)
        made.append(v)
    return made


@pytest.mark.parametrize(
    ("gradients", "zero"),
    [
        ((ZEROS, None), True),
        ((None,), True),
        ((-ZEROS, ZEROS.astype(np.float16)), True),
        ((ZEROS, ONES), False),
        ((ONES, None), False),
        ((ONES * 1e-45,), False),
        ((ZEROS, ONES.astype(np.float16)), False),
        ((ONES.astype(np.float64),), False),
        ((ONES * np.nan,), True),  # nothing finite but zeros: that they are not finite is asked elsewhere
    ],
)
def test_gradients_are_zero_when_no_element_is_anything_else(gradients: Tuple[Any, ...], zero: bool) -> None:
    assert gradients_are_zero(CpuKernels(), parameters(*gradients)) is zero


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(np.inf, np.float32), (-np.inf, np.float16), (np.nan, np.float32), (np.nan, np.float64)],
)
def test_one_element_that_is_not_finite(bad: float, dtype: type) -> None:
    good = np.array([1.0, -2.0, 0.0], dtype)
    assert gradients_are_finite(CpuKernels(), parameters(good, good))
    assert not gradients_are_finite(CpuKernels(), parameters(good, np.array([1.0, 0.0, bad], dtype)))


def test_what_is_lazily_zero_stays_so() -> None:
    lazy, other = parameters(None, ONES)
    assert gradients_are_finite(CpuKernels(), [lazy, other])
    assert lazy.grad.zeroing


@pytest.mark.parametrize(
    ("weight", "storage", "zero"),
    [(0.0, None, True), (0.0, "float16", True), (1e-9, None, False), (1e-9, "float16", False)],
)
def test_a_loss_is_zero_unless_storing_it_made_it_so(weight: float, storage: Any, zero: bool) -> None:
    loss: Any = F.mean(nn.Variable.from_numpy_array(ONES, need_grad=True) * 1.0) * weight
    scaling = AdaptiveLossScaling(loss if storage is None else FormatEmulation(loss, storage))
    scaling.forward()
    assert scaling.has_nothing_to_learn() is zero
