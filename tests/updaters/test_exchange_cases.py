# SPDX-License-Identifier: Apache-2.0
"""What other ranks can do to this one. `tests/distributed` has the same with real ranks."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.updaters.exchange import GradientExchange
from tests.updaters.networks import AS_THE_BASELINE


class Pair:
    """A communicator of two ranks. What the other one adds to an array follows from ours."""

    rank, size = 0, 2

    def __init__(self, other: Callable[[np.ndarray], Any]) -> None:
        self._other = other
        self.shapes: List[Tuple[int, ...]] = []

    def all_reduce(self, arrays: Sequence[nn.NdArray], division: bool = False, inplace: bool = False) -> None:
        with np.errstate(over="ignore"):
            for array in arrays:
                self.shapes.append(array.shape)
                array.data = array.data + self._other(array.data)

    def bcast(self, arrays: Sequence[nn.NdArray], src: int, inplace: bool = False) -> None:
        """Nothing to do on the first rank."""


def test_a_sum_that_overflows_where_no_rank_did_lowers_the_global_scale() -> None:
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.full((4, 3), 0.01, np.float32))
    gain = nn.Variable((1,))
    loss = F.sum(F.reshape(F.mean(PF.affine(x, 1)), (1,)) * gain)
    solver = S.Sgd(1e-3)
    solver.set_parameters(nn.get_parameters())
    gains = iter([1.0, 2e38, 1.0])

    def feed() -> None:
        gain.d = next(gains)

    # The other rank has the same gradients, and nothing to report.
    comm = Pair(lambda own: own)
    # No layer has a scale of its own: in none can the cause be.
    config = AdaLossConfig(loss_scale_method="fixed", delay=0)
    updater = AdaptiveLossScalingUpdater(
        solver, loss, feed, scale=1.0, comm=comm, config=config, **AS_THE_BASELINE
    )
    assert updater.update()[:4] == (True, 1.0, 0, "updated")
    result = updater.update()
    assert result[:4] == (True, 0.5, 1, "updated")
    assert result.overflow_layers == ()


def exchange_of(chosen: Sequence[str], other: float) -> Tuple[GradientExchange, Pair]:
    """An exchange of the gradients of some parameters, with a rank whose flags are `other`."""
    nn.clear_parameters()
    PF.affine(nn.Variable((2, 3)), 2)
    parameters = nn.get_parameters()
    for v in parameters.values():
        v.g = 1.0
    solver = S.Sgd(1.0)
    solver.set_parameters(parameters)
    comm = Pair(lambda own: np.full_like(own, other))
    return GradientExchange(comm, [parameters[name].grad for name in chosen], solver), comm


@pytest.mark.parametrize(("other", "finite"), [(1.0, False), (0.0, True)])
def test_the_other_rank_says_whether_gradients_are_finite_that_it_keeps_to_itself(
    other: float, finite: bool
) -> None:
    exchange, comm = exchange_of(["affine/W"], other)
    assert exchange.all_finite(CpuKernels()) is finite
    assert comm.shapes == [(1,)]


def test_an_infinity_that_is_not_exchanged_is_told_to_the_other_rank() -> None:
    exchange, comm = exchange_of(["affine/W"], 0.0)
    nn.get_parameters()["affine/b"].g = np.inf
    assert not exchange.all_finite(CpuKernels())
    assert comm.shapes == [(1,)]


@pytest.mark.parametrize("chosen", [[], ["affine/W", "affine/b"]])
def test_nothing_is_said_where_all_gradients_are_exchanged(chosen: List[str]) -> None:
    exchange, comm = exchange_of(chosen, 0.0)
    assert exchange.all_finite(CpuKernels())
    nn.get_parameters()["affine/b"].g = np.nan
    assert not exchange.all_finite(CpuKernels())
    assert comm.shapes == []
