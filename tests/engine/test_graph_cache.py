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


def updater_of(depths: Sequence[Sequence[int]], storage: Optional[str], **options: Any) -> Any:
    """An updater of nets with these blocks after a first one with all."""
    loss = loss_of(range(BLOCKS), storage)
    waiting = list(depths)

    def feed() -> None:
        if updater.iteration > 1:
            updater.loss = loss_of(waiting.pop(0), storage)

    solver = S.Sgd(0.05)
    solver.set_parameters(nn.get_parameters())
    stored = None if storage == "native" else storage
    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage=stored, **options)
    return updater


def trained(depths: Sequence[Sequence[int]], storage: Optional[str], **options: Any) -> List[Any]:
    """The kind of the last pass of each update, and its loss; the first one has all blocks."""
    updater, found = updater_of(depths, storage, **options), []
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


def test_arrays_that_a_method_reads_are_measured_in_each_topology() -> None:
    config = AdaLossConfig(loss_scale_method="approx_range")
    depths = [[0, 1], [0, 1], [2, 3], [2, 3], [0, 1]]
    kinds = [kind for kind, _, _ in trained(depths, "float16", config=config)]
    assert [kind == "measuring" for kind in kinds] == [True, True, False, True, False, False]


def wired_at_random(count: int) -> List[List[int]]:
    """Blocks in any order; the last two always are where they were."""
    random = np.random.default_rng(2)
    orders = [random.permutation(BLOCKS - 2)[: random.integers(BLOCKS - 1)] for _ in range(count)]
    return [[*map(int, order), BLOCKS - 2, BLOCKS - 1] for order in orders]


@pytest.mark.parametrize(
    "depths",
    [[range(BLOCKS)] * 44, [[0, 3, 4], [1, 2, 3, 4]] * 22, wired_at_random(44)],
    ids=["static", "in turn", "random"],
)
@pytest.mark.parametrize("storage", [None, "float16"])
def test_the_cycle_of_measuring_goes_on_in_each_topology(storage: Any, depths: Any) -> None:
    updater, ends = updater_of(depths, storage), [0]
    for iteration in range(1 + len(depths)):
        updater.update()
        present = updater.scaling._graph.current()
        measured = present.slice(present.schedules, updater.scaling.iteration - 1, None)
        # A small net is one slice: without a rounding storage, other iterations measure nothing.
        amax = updater.scaling.result.measurements.amax
        assert storage or iteration == 0 or bool(amax) == (measured is not None)
        if measured is not None and measured.last:
            ends.append(iteration)
    assert len(ends) == 6
    assert max(np.diff([*ends, len(depths)])) <= 9


def test_an_overflow_begins_the_cycle_of_every_topology_again() -> None:
    factors = [1.0] * 12 + [2.0**13] * 10
    waiting = iter(factors[1:])

    def loss_with(iteration: int, factor: float) -> nn.Variable:
        rng = np.random.RandomState(0)
        h = PF.affine(data(8, 6), 16, name="first", rng=rng)
        with nn.parameter_scope(f"block{iteration % 2}"):
            h = h + F.tanh(PF.affine(h, 16, name="a", rng=rng))
        return F.mean(PF.affine(h, 3, name="out", rng=rng) * data(8, 3) * factor)

    def feed() -> None:
        if updater.iteration > 1:
            updater.loss = loss_with(updater.iteration, next(waiting))

    loss = loss_with(1, 1.0)
    solver = S.Sgd(1e-6)
    solver.set_parameters(nn.get_parameters())
    config = AdaLossConfig(delay=0)
    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16", config=config)
    measured = []
    for iteration in range(len(factors)):
        updater.update()
        if updater.scaling.result.kind == "measuring":
            measured.append(iteration)
    # Both topologies overflow, in 12 and 13; each time the other one's cycle begins with its next graph.
    assert measured == [0, 1, 8, 9, 12, 13, 14, 21]
