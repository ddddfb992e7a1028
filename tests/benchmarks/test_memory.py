# SPDX-License-Identifier: Apache-2.0
"""benchmarks/memory.py trains what a way says."""

from __future__ import annotations

import memory
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import pytest


@pytest.mark.parametrize("way", [name for name, way in memory.WAYS.items() if way.kind == "adaptive"])
def test_the_updater_is_given_what_the_way_says(way: str) -> None:
    with nn.parameter_scope("", {}):
        loss = F.mean(PF.affine(nn.Variable((2, 3)), 2))
        solver = S.Sgd(0.1)
        solver.set_parameters(nn.get_parameters())
        wanted = memory.WAYS[way]
        config = memory._updater(wanted, solver, loss, None).__self__.scaling.config
    assert config.loss_scale_method == wanted.method
    assert config.planned_bytes == wanted.planned_bytes
