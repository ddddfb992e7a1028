# SPDX-License-Identifier: Apache-2.0
"""Whether a batch teaches anything. What it leaves behind, and its faults, have tests of their own."""

from __future__ import annotations

from typing import Any, List, Tuple

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.undo.batch_guard import BatchGuard

ONES, ZEROS = np.ones(3, np.float32), np.zeros(3, np.float32)


def guard(weight: float = 1.0, storage: Any = None, kernels: Any = None) -> BatchGuard:
    """Of a loss that is `weight`."""
    x = nn.Variable.from_numpy_array(ONES, need_grad=True)
    loss: Any = F.mean(x * 1.0) * weight
    if storage is not None:
        loss = FormatEmulation(loss, storage)
    loss.forward()
    emulated = loss.emulated_storage if storage is not None else None
    return BatchGuard(loss, lambda: None, kernels or CpuKernels(), emulated)  # type: ignore[arg-type,return-value]


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
        ((ONES * np.nan,), True),  # nothing finite but zeros: that they are not finite is asked elsewhere
    ],
)
def test_gradients_are_zero_when_no_element_is_anything_else(gradients: Tuple[Any, ...], zero: bool) -> None:
    assert guard().gradients_are_zero(parameters(*gradients)) is zero


@pytest.mark.parametrize(
    ("weight", "storage", "zero"),
    [(0.0, None, True), (0.0, "float16", True), (1e-9, None, False), (1e-9, "float16", False)],
)
def test_a_loss_is_zero_unless_storing_it_made_it_so(weight: float, storage: Any, zero: bool) -> None:
    assert guard(weight, storage).loss_is_zero() is zero


def test_faults_are_looked_for_in_the_graph_as_it_is_now() -> None:
    x = nn.Variable.from_numpy_array(-ONES, need_grad=True)
    h = x * 1.0
    scaling = AdaptiveLossScaling(F.sum(h + 1.0))
    scaling.forward()
    assert scaling.guard.find_fault() is None
    h.rewire_on(F.log(x * 2.0))
    fault = scaling.guard.find_fault()
    assert fault is not None
    assert fault.type_name == "Log"
