# SPDX-License-Identifier: Apache-2.0
"""Whether a batch teaches anything, and where its forward leaves the finite numbers."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.undo import BatchGuard, ForwardFault

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
        ((ONES.astype(np.float64),), False),
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
    # What is finite has no fault.
    assert scaling.guard.find_fault() is None
    h.rewire_on(F.log(x * 2.0))
    fault = scaling.guard.find_fault()
    assert fault is not None
    assert fault.type_name == "Log"


SPOILT = np.array([[1.0, np.nan, 1.0], [np.inf, 1.0, -np.inf]], np.float32)


def fault_of(loss: nn.Variable, storage: Optional[str] = None) -> Optional[ForwardFault]:
    return AdaptiveLossScaling(loss if storage is None else FormatEmulation(loss, storage)).guard.find_fault()


def network(values: Any = 0.5) -> nn.Variable:
    x = nn.Variable((2, 3))
    x.d = values
    t = nn.Variable.from_numpy_array(np.zeros((2, 1), np.int32))
    h = F.tanh(PF.affine(x, 4, name="hidden"))
    return F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="output"), t))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("storage", [None, "float16"])
def test_data_that_are_not_finite_are_told_with_their_shape(storage: Optional[str], dtype: Any) -> None:
    # NumPy makes float64, and so it stays where it is assigned to a Variable.
    fault = fault_of(network(SPOILT.astype(dtype)), storage)
    what = "reads an input of shape (2, 3) that holds 3 infinities or NaNs"
    assert fault == ("hidden/affine", "Affine", what)
    assert str(fault) == f"hidden/affine (Affine) {what}"


def test_a_parameter_that_is_not_finite_is_named() -> None:
    loss = network()
    nn.get_parameters()["output/affine/b"].d = [np.nan, 1.0, 2.0]
    what = "reads the parameter output/affine/b that holds 1 infinities or NaNs"
    assert fault_of(loss) == ("output/affine", "Affine", what)


def test_a_function_that_leaves_the_finite_numbers_by_itself() -> None:
    x = nn.Variable.from_numpy_array(np.array([1.0, -1.0, 0.0], np.float32), need_grad=True)
    fault = fault_of(F.sum(F.log(x * 1.0) * 2.0))
    assert fault == ("Log", "Log", "computes 2 infinities or NaNs from finite inputs")


def test_activations_beyond_the_storage_format() -> None:
    x = nn.Variable.from_numpy_array(np.array([10.0, 300.0, 1.0], np.float32), need_grad=True)
    what = "computes 1 numbers beyond float16, which ends at 65504"
    assert fault_of(F.sum(x**2 * 0.1), "float16") == ("PowScalar", "PowScalar", what)
    assert fault_of(F.sum(x**2 * 0.1)) is None


def test_forward_frees_what_it_needs_no_more() -> None:
    x = nn.Variable.from_numpy_array(np.ones(2, np.float32), need_grad=True)
    behind = F.sin(x * 2.0)
    assert fault_of(F.sum(behind + 1.0)) is None
    assert behind.data.clear_called
