# SPDX-License-Identifier: Apache-2.0
"""Graphs of new topologies whose parts are known by name."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from tests.worlds.values import FLOAT, HALF, data

BLOCKS = 5


def loss_of(blocks: Sequence[int], storage: Optional[str]) -> nn.Variable:
    """A residual network of these blocks."""
    rng = np.random.RandomState(0)
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        h = PF.affine(data(8, 6), 16, name="first", rng=rng)
        for block in blocks:
            with nn.parameter_scope(f"block{block}"):
                h = h + PF.affine(F.tanh(PF.affine(h, 16, name="a", rng=rng)), 16, name="b", rng=rng)
        return F.mean(PF.affine(h, 3, name="out", rng=rng) ** 2)


def trained(depths: Sequence[Sequence[int]], storage: Optional[str], **options: Any) -> List[Any]:
    """The kind of the last pass of each update, and its loss; the first one has all blocks."""
    loss = loss_of(range(BLOCKS), storage)
    waiting = list(depths)

    def feed() -> None:
        if updater.iteration > 1:
            updater.loss = loss_of(waiting.pop(0), storage)

    solver = S.Sgd(0.05)
    solver.set_parameters(nn.get_parameters())
    stored = None if storage == "native" else storage
    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage=stored, **options)
    found = []
    for _ in range(1 + len(depths)):
        result = updater.update()
        found.append((updater.scaling.result.kind, result.retries, float(updater.scaling.variable.d)))
    return found


def drawn(count: int) -> List[List[int]]:
    """Blocks that are kept; the last two, which name what all blocks add to, always are."""
    random = np.random.default_rng(1)
    return [[b for b in range(BLOCKS) if b >= BLOCKS - 2 or random.random() < 0.6] for _ in range(count)]


@pytest.mark.parametrize("storage", ["float32", "float16", "native"])
def test_a_graph_of_known_parts_is_neither_measured_nor_run_twice(storage: str) -> None:
    found = trained(drawn(20), storage)
    assert found[0][0] == "measuring"
    assert [(kind, retries) for kind, retries, _ in found[1:]] == [("hookless", 0)] * 20


@pytest.mark.parametrize("storage", ["float16", "native"])
def test_scales_of_known_parts_train_as_one_scale_does(storage: str) -> None:
    losses = [loss for _, _, loss in trained(drawn(12), storage)]
    nn.clear_parameters()
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=1.0)
    one = [loss for _, _, loss in trained(drawn(12), storage, config=config)]
    np.testing.assert_allclose(losses, one, rtol=5e-3)


def test_what_a_method_looks_at_is_measured_in_each_topology() -> None:
    config = AdaLossConfig(loss_scale_method="approx_range")
    depths = [[0, 1], [0, 1], [2, 3], [2, 3], [0, 1]]
    kinds = [kind for kind, _, _ in trained(depths, "float16", config=config)]
    assert [kind == "measuring" for kind in kinds] == [True, True, False, True, False, False]
