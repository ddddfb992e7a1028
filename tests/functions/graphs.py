# SPDX-License-Identifier: Apache-2.0
"""Building blocks for the tests of functions."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.graph.hooks import root_cause


def variable(values: Any, need_grad: bool = True) -> nn.Variable:
    return nn.Variable.from_numpy_array(np.asarray(values, np.float32), need_grad=need_grad)


def gradients(leaves: Sequence[nn.Variable], run: Callable[[], None]) -> list[np.ndarray]:
    """The leaves' gradients after `run`, from zero."""
    for leaf in leaves:
        leaf.grad.zero()
    run()
    return [leaf.g.copy() for leaf in leaves]


def gradients_of(loss: Any, *leaves: nn.Variable, clear: bool = False, times: int = 1) -> list[np.ndarray]:
    """The leaves' gradients after forward and backward of `loss`, added up over so many times."""

    def run() -> None:
        for _ in range(times):
            loss.forward(clear_no_need_grad=clear)
            loss.backward(clear_buffer=clear)

    return gradients(leaves, run)


def cause(run: Callable[[], Any]) -> BaseException:
    """What nnabla's SystemError hides."""
    with pytest.raises(SystemError) as raised:
        run()
    return root_cause(raised.value)
