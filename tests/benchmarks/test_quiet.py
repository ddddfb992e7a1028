# SPDX-License-Identifier: Apache-2.0
"""What happens to batches is counted, and where an overflow began is told."""

from __future__ import annotations

from functools import partial
from typing import Any

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from scaling_study import jumps, nets, quiet, turns
from scaling_study.methods import REFERENCE, longest_row
from scaling_study.task import Net, Player, Task

JUMP = 40


def jumping(factor: float, seed: int) -> Task:
    """A network whose gradients are what they are, and from batch `JUMP` on a multiple of that."""
    x = nn.Variable.from_numpy_array(np.random.RandomState(0).randn(8, 4))
    weight, fed = nn.Variable(()), 0

    def feed() -> None:
        nonlocal fed
        fed += 1
        weight.d = factor if fed >= JUMP else 1.0

    loss = F.mean(PF.affine(F.tanh(PF.affine(x, 6, name="a")), 3, name="b") ** 2) * weight
    parameters = nn.get_parameters()
    return Task([Player(loss, parameters, feed)], lambda: float(sum(v.d.sum() for v in parameters.values())))


def watched(monkeypatch: pytest.MonkeyPatch, factor: float, method: str) -> Any:
    net = Net("", "", partial(jumping, factor), 1e-9, 60, 0.0, S.Sgd)
    monkeypatch.setitem(nets.QUIET, "jumping", net)
    return quiet.work(quiet.QuietJob("jumping", quiet.EMULATED, method, 0, 60))


@pytest.mark.parametrize(("method", "loses"), [("amax_history", False), ("next", True), ("GradScaler", True)])
def test_an_overflow_is_told_with_its_layer(
    monkeypatch: pytest.MonkeyPatch, method: str, *, loses: bool
) -> None:
    found = watched(monkeypatch, 2.0**10, method)
    assert found["batches_of_late"][0] == JUMP
    assert found["late"] == len(found["batches_of_late"]) > 0
    assert (found["late_lost"] > 0) == loses
    assert found["layers_of_late"][0] == "b/affine/PowScalar"


@pytest.mark.parametrize("method", ["amax_history", "next", "GradScaler", "dynamic_65536", REFERENCE])
def test_a_training_without_a_jump_is_quiet(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    found = watched(monkeypatch, 1.0, method)
    assert found["late"] == found["late_lost"] == 0
    assert found["warnings"] == []


def test_the_longest_row() -> None:
    assert [longest_row(batches) for batches in ([], [3], [1, 2, 4, 5, 6, 9])] == [0, 1, 3]


def test_jumps_are_counted_from_the_jump_on() -> None:
    job = jumps.JumpJob("mlp4", "2^10, for good", "halving", 0, 30)
    found = jumps.work(job)
    # Before it the scale was halved from 2^40 on.
    assert 5 <= found["in_a_row"] <= found["lost"] <= 12
    assert found["last_overflow"] <= 30
    assert f"{found['lost']} of 30" in jumps.table([{**job._asdict(), **found}])


def test_fp32_learns_both_tasks_whatever_the_ratio() -> None:
    small = [
        turns.work(turns.TurnJob("large first", ratio, "SGD", REFERENCE, 0, 60))["small"]
        for ratio in (1e-6, 1e-12)
    ]
    assert small[0] == pytest.approx(small[1], abs=0.01)
    assert small[0] > 0.5
