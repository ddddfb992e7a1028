# SPDX-License-Identifier: Apache-2.0
"""Where forward leaves the finite numbers."""

from __future__ import annotations

from typing import Any, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.kernels.cpu import CpuKernels

ONES = np.ones(3, np.float32)


@pytest.fixture(autouse=True, params=[False, True], ids=["host", "device"])
def _asynchronous(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuKernels, "asynchronous", request.param)


def test_faults_are_looked_for_in_the_graph_as_it_is_now() -> None:
    x = nn.Variable.from_numpy_array(-ONES, need_grad=True)
    h = x * 1.0
    scaling = AdaptiveLossScaling(F.sum(h + 1.0))
    scaling.forward()
    # What is finite has no fault.
    assert scaling.find_fault() == ""
    h.rewire_on(F.log(x * 2.0))
    assert "(Log) computes" in scaling.find_fault()


SPOILT = np.array([[1.0, np.nan, 1.0], [np.inf, 1.0, -np.inf]], np.float32)


def fault_of(loss: nn.Variable, storage: Optional[str] = None) -> str:
    return AdaptiveLossScaling(loss if storage is None else FormatEmulation(loss, storage)).find_fault()


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
    what = "reads an input of shape (2, 3) that holds 3 infinities or NaNs, the first at [0, 1]"
    assert fault == f"hidden/affine (Affine) {what}"


def test_a_parameter_that_is_not_finite_is_named() -> None:
    loss = network()
    nn.get_parameters()["output/affine/b"].d = [np.nan, 1.0, 2.0]
    what = "reads the parameter output/affine/b that holds 1 infinity or NaN, the first at [0]"
    assert fault_of(loss) == f"output/affine (Affine) {what}"


def test_a_function_that_leaves_the_finite_numbers_by_itself() -> None:
    x = nn.Variable.from_numpy_array(np.array([1.0, -1.0, 0.0], np.float32), need_grad=True)
    fault = fault_of(F.sum(F.log(x * 1.0) * 2.0))
    assert fault == "Log (Log) computes 2 infinities or NaNs from finite inputs, the first at [1] " + (
        "(keep what it reads away from 0 by 2**-14 or more, or use F.log_softmax)"
    )


def test_activations_beyond_the_storage_format() -> None:
    x = nn.Variable.from_numpy_array(np.array([10.0, 300.0, 1.0], np.float32), need_grad=True)
    what = "computes 1 number beyond float16, which ends at 65504, the first at [1]"
    assert fault_of(F.sum(x**2 * 0.1), "float16") == f"PowScalar (PowScalar) {what}"
    assert fault_of(F.sum(x**2 * 0.1)) == ""


def test_a_parameter_beyond_the_storage_format() -> None:
    loss = network()
    nn.get_parameters()["hidden/affine/W"].d = 1e6
    what = "reads the parameter hidden/affine/W that reaches 1e+06, beyond float16, which ends at 65504"
    assert fault_of(loss, "float16") == f"hidden/affine (Affine) {what}, the first at [0, 0]"
    nn.get_parameters()["hidden/affine/W"].d[1, 2] = np.nan
    assert "the parameter hidden/affine/W that holds 12 infinities or NaNs" in fault_of(loss, "float16")


@pytest.mark.parametrize("read", [F.relu, F.identity, F.dropout, lambda h: F.concatenate(h, h)])
def test_numbers_of_the_float_tail_beyond_the_format_of_their_reader(read: Any) -> None:
    """The constant 1e5 makes its function compute in float; the reader stores half."""
    x = nn.Variable.from_numpy_array(ONES, need_grad=True)
    emulation = FormatEmulation(F.sum(read(x * 1e5) / 1e5), "float16", float_tail=True)
    fault = AdaptiveLossScaling(emulation).find_fault()
    what = "reads the output of MulScalar that reaches 100000, beyond float16, which ends at 65504"
    assert fault.partition(") ")[2] == what


def test_statistics_that_a_function_has_spoilt_itself_are_not_read_by_it() -> None:
    """Three values of 3e38 have no mean in float32."""
    x = nn.Variable.from_numpy_array(np.full((3, 2), 3e38, np.float32), need_grad=True)
    loss = F.mean(PF.batch_normalization(x, name="bn"))
    fault = fault_of(loss)
    assert fault.startswith("bn/bn (BatchNormalization) computes 6 infinities or NaNs from finite inputs")
    nn.get_parameters(grad_only=False)["bn/bn/mean"].d = np.inf
    assert fault_of(loss).startswith("bn/bn (BatchNormalization) reads the parameter bn/bn/mean that holds 2")


def test_statistics_that_alone_are_not_finite_are_written_by_their_function() -> None:
    # The sum of squares is infinite, and what is divided by it is zero.
    x = nn.Variable.from_numpy_array(np.float32([[1.5e19], [-1.5e19]]), need_grad=True)
    fault = fault_of(F.mean(PF.batch_normalization(x, name="bn")))
    assert fault == (
        "bn/bn (BatchNormalization) writes 1 infinity or NaN to the parameter bn/bn/var from finite inputs"
    )


def test_forward_frees_arrays_that_it_no_longer_needs() -> None:
    x = nn.Variable.from_numpy_array(np.ones(2, np.float32), need_grad=True)
    behind = F.sin(x * 2.0)
    assert fault_of(F.sum(behind + 1.0)) == ""
    assert behind.data.clear_called


def test_a_gpu_is_asked_once_and_keeps_measurements_that_are_running() -> None:
    """As weights that were measured after an update, and that the next pass fetches."""
    scaling = AdaptiveLossScaling(network(np.inf))
    measurements = scaling._graph.current().measurements
    (ticket,) = measurements.measure([nn.get_parameters()["hidden/affine/W"].data])
    assert "reads an input of shape" in scaling.find_fault()
    assert measurements.fetch().statistics[ticket].finite
