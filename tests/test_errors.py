# SPDX-License-Identifier: Apache-2.0
"""Warnings point at the program, not into the package."""

from __future__ import annotations

import linecache
from typing import Callable

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater, LossScaleWarning
from nnabla_adaloss.errors import missing_code, warn
from tests.worlds.trainings import solver_of, updater_of
from tests.worlds.values import data


def network(factor: float = 1.0) -> nn.Variable:
    return F.mean(PF.affine(data(4, 3), 2, name="a") * factor + 1.0)


def nothing_is_emulated() -> None:
    loss = network()
    AdaptiveLossScalingUpdater(solver_of(), loss)


def all_gradients_are_zero() -> None:
    updater_of(network(0.0)).update()


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (nothing_is_emulated, "AdaptiveLossScalingUpdater("),
        (all_gradients_are_zero, ".update()"),
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


class CompileException(Exception):
    """As CuPy raises for a GPU that is newer than its compiler."""

    __module__ = "cupy.cuda.compiler"


@pytest.mark.parametrize(
    ("error", "library"),
    [
        (RuntimeError("failed with: no kernel image is available for execution"), "nnabla's CUDA extension"),
        (CompileException("nvrtc: error: invalid value for --gpu-architecture (-arch)"), "CuPy"),
    ],
)
def test_a_library_without_code_for_a_card_is_named(error: Exception, library: str) -> None:
    said = missing_code(error, "NVIDIA H100 (compute capability 90)")
    assert said is not None
    assert said.startswith(f"{library} was built without code for NVIDIA H100 (")


def test_other_errors_have_no_missing_code() -> None:
    assert missing_code(CompileException("error: identifier is undefined"), "a card") is None
