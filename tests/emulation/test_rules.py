# SPDX-License-Identifier: Apache-2.0
"""What is stored in half precision, function by function."""

from __future__ import annotations

from typing import Callable, List

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss import FormatEmulation
from nnabla_adaloss.emulation.rules import half_outputs

Normalization = Callable[..., List[nn.Variable]]


def is_half(array: np.ndarray) -> bool:
    return np.array_equal(array, array.astype(np.float16).astype(np.float32))


def normalized(normalization: Normalization) -> List[nn.Variable]:
    """The output of a batch normalization, and the mean and the variance of the batch."""
    rng = np.random.default_rng(0)
    x = nn.Variable.from_numpy_array(rng.standard_normal((6, 3, 4, 4)).astype(np.float32), need_grad=True)
    beta, gamma, mean, variance = (nn.Variable((1, 3, 1, 1)) for _ in range(4))
    for v, value in ((beta, 0.1), (gamma, 1.1), (mean, 0.0), (variance, 1.0)):
        v.d = value
    outputs = normalization(x, beta, gamma, mean, variance, batch_stat=True, output_stat=True)
    for v in outputs:
        v.persistent = True
    return list(outputs)


@pytest.mark.parametrize("normalization", [F.batch_normalization, F.fused_batch_normalization])
def test_the_statistics_of_a_batch_are_outputs_that_stay_fp32(normalization: Normalization) -> None:
    outputs = normalized(normalization)
    f = outputs[0].parent
    assert len(f.outputs) == 3
    assert half_outputs(f) == f.outputs[:1]

    loss = FormatEmulation(F.sum(outputs[0]) + F.sum(outputs[1] * 0.0) + F.sum(outputs[2] * 0.0))
    loss.forward()
    assert [is_half(v.d) for v in outputs] == [True, False, False]


def test_all_outputs_of_other_functions_are_halves() -> None:
    x = nn.Variable.from_numpy_array(np.array([[0.1, 0.2, 0.3]], np.float32), need_grad=True)
    outputs = F.split(x * 1.0, axis=1)
    assert half_outputs(outputs[0].parent) == outputs[0].parent.outputs
    for v in outputs:
        v.persistent = True
    FormatEmulation(F.sum(F.add_n(*outputs))).forward()
    assert [is_half(v.d) for v in outputs] == [True] * 3
