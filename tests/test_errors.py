# SPDX-License-Identifier: Apache-2.0
"""Warnings point at the program, not into the package."""

from __future__ import annotations

import linecache
from typing import Callable

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater, LossScaleWarning, Recorder
from nnabla_adaloss.errors import warn


def updater_of(loss: nn.Variable, **options: object) -> AdaptiveLossScalingUpdater:
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    return AdaptiveLossScalingUpdater(solver, loss, **options)


def network(factor: float = 1.0) -> nn.Variable:
    x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
    return F.mean(PF.affine(x, 2, name="a") * factor + 1.0)


def nothing_is_emulated() -> None:
    updater_of(network())


def all_gradients_are_zero() -> None:
    updater_of(network(0.0), storage="float16").update()


def a_pattern_without_a_layer() -> None:
    updater_of(network(), storage="float16", monitors=[Recorder(layers=["b"])]).update()


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (nothing_is_emulated, "AdaptiveLossScalingUpdater("),
        (all_gradients_are_zero, ".update()"),
        (a_pattern_without_a_layer, ".update()"),
    ],
)
def test_the_line_is_one_of_the_programs(program: Callable[[], None], line: str) -> None:
    with pytest.warns(LossScaleWarning) as caught:
        program()
    (one,) = caught
    assert one.filename == __file__
    assert line in linecache.getline(one.filename, one.lineno)


def test_a_category_of_its_own() -> None:
    with pytest.warns(RuntimeWarning, match="^slow$") as caught:
        warn("slow", RuntimeWarning)
    assert caught[0].filename == __file__
