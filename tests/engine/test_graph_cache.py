# SPDX-License-Identifier: Apache-2.0
"""Graphs of new topologies, whose parts are known by name; leaves that share a gradient."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater
from nnabla_adaloss.engine import graph_cache
from tests.worlds.passes import look, run, settle
from tests.worlds.trainings import solver_of
from tests.worlds.values import FLOAT, HALF, Values, assert_equal, data, snapshot

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

    stored = None if storage == "native" else storage
    updater = AdaptiveLossScalingUpdater(solver_of(S.Sgd(0.05)), loss, feed, storage=stored, **options)
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

    loss, config = loss_with(1, 1.0), AdaLossConfig(delay=0)
    solver = solver_of(S.Sgd(1e-6))
    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16", config=config)
    measured = []
    for iteration in range(len(factors)):
        updater.update()
        if updater.scaling.result.kind == "measuring":
            measured.append(iteration)
    # Both topologies overflow, in 12 and 13; each time the other one's cycle begins with its next graph.
    assert measured == [0, 1, 8, 9, 12, 13, 14, 21]


# ---- leaves that share a gradient


Share = Callable[[nn.Variable], nn.Variable]


def assigned(w: nn.Variable) -> nn.Variable:
    other = nn.Variable(w.shape, need_grad=True)
    other.data, other.grad = w.data, w.grad
    return other


def assigned_gradient(w: nn.Variable) -> nn.Variable:
    """A weight of its own, to whose gradient that of another is added."""
    other = nn.Variable.from_numpy_array(w.d * 0.5)
    other.need_grad = True
    other.grad = w.grad
    return other


SHARES: Dict[str, Share] = {
    "reshaped": lambda w: w.reshape((w.shape[0] * w.shape[1],), unlink=True).reshape(w.shape),
    "reshaped to the same": lambda w: w.reshape(w.shape, unlink=True),
    "assigned": assigned,
    "gradient alone": assigned_gradient,
}


def sharing(share: Optional[Share]) -> nn.Variable:
    """A weight, and what shares its gradient, in layers whose gradients differ much in size."""
    rng, x = np.random.RandomState(0), data(4, 5)
    w = PF.get_parameter_or_create("w", (5, 5), rng.randn(5, 5).astype(np.float32) * 0.5)
    other = w if share is None else share(w)
    h = F.tanh(F.affine(x, w)) * 2.0**-6
    h = F.tanh(PF.affine(h, 5, name="between", rng=rng))
    return F.mean(F.affine(h, other) ** 2) + F.sum(F.tanh(other)) * 2.0**-8


def trained_with(share: Optional[Share], way: str, storage: Optional[str]) -> Values:
    """The parameters after some updates; `way` "nnabla" is a loop of its own."""
    nn.clear_parameters()
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        loss, solver = sharing(share), solver_of(S.Sgd(0.125))
        stored: Any = {"storage": None if storage == "native" else storage}
        hooks = {"function_post_hook": (None, look)} if way == "hooked" else {}
        updater = AdaptiveLossScalingUpdater(solver, loss, **stored, **hooks)
        for _ in range(12):
            if way == "nnabla":
                run(loss, clear=True)
                solver.update()
            else:
                assert updater.update().reason == "updated"
                hookless = updater.scaling.result.kind == "hookless"
        assert way == "nnabla" or hookless == (way == "updater")
    return snapshot()


@pytest.mark.parametrize("way", ["updater", "hooked"])
@pytest.mark.parametrize("share", SHARES)
def test_shared_gradients_train_in_fp32_as_in_nnablas_loop(share: str, way: str) -> None:
    assert_equal(trained_with(SHARES[share], way, None), trained_with(SHARES[share], "nnabla", None))


@pytest.mark.parametrize("storage", ["float16", "native"])
@pytest.mark.parametrize("way", ["updater", "hooked"])
@pytest.mark.parametrize("share", ["reshaped to the same", "assigned"])
def test_shared_gradients_train_in_half_as_one_weight(share: str, way: str, storage: str) -> None:
    assert_equal(trained_with(SHARES[share], way, storage), trained_with(None, way, storage))


def test_gradients_that_overlap_otherwise_are_refused() -> None:
    w = PF.get_parameter_or_create("rows", (6, 3))
    part = nn.Variable((2, 3), need_grad=True)
    part.data, part.grad = w.data.narrow(0, 1, 2), w.grad.narrow(0, 1, 2)
    loss = F.sum(w**2) + F.sum(part**2)
    with pytest.raises(ValueError, match=r"gradients of rows and an input of shape \(2, 3\) overlap"):
        AdaptiveLossScaling(loss).backward()


def test_a_graph_that_is_refused_leaves_the_state_of_the_network_as_it_was() -> None:
    w = PF.get_parameter_or_create("rows", (6, 3))
    part = nn.Variable.from_numpy_array(np.ones((2, 3))).apply(need_grad=True)
    own, part.grad = part.grad, w.grad.narrow(0, 1, 2)
    before, scaling = (AdaptiveLossScaling(loss) for loss in (F.sum(w**2), F.sum(w**2) + F.sum(part**2)))
    settle(before)
    scaling.go_on_from(before)
    with pytest.raises(ValueError, match="overlap"):
        scaling.backward()
    part.grad = own
    run(scaling)
    (topology,) = scaling.state_dict()["topologies"]
    assert topology["network"] == before.state_dict()["network"]


def test_the_oldest_saved_topology_is_loaded_where_no_more_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_cache, "_REMEMBERED", 2)
    updater = updater_of([[3, 4], range(BLOCKS), range(BLOCKS), [3, 4]], "float16")
    for _ in range(5):
        updater.update()
    resumed = AdaptiveLossScalingUpdater(solver_of(S.Sgd(0.05)), loss_of([3, 4], None), storage="float16")
    resumed.load_state_dict(updater.state_dict())
    (saved,) = resumed.scaling.state_dict()["topologies"]
    resumed.loss = loss_of(range(BLOCKS), None)
    loaded = resumed.scaling.state_dict()
    assert loaded["network"] == saved["network"]
    assert loaded["schedule"]["chosen"] == saved["schedule"]["chosen"] != []
