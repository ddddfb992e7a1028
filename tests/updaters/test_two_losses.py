# SPDX-License-Identifier: Apache-2.0
"""Two losses of very different sizes on one network: what one scale loses, components keep, natively too."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, Dict, List, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from numpy.typing import NDArray

from nnabla_adaloss import AdaLossConfig, UpdateResult
from tests.updaters.networks import FLOAT, HALF, constant, data, gradients, updater_of

EMULATED_AND_NATIVE = pytest.mark.parametrize("storage", ["float16", None], ids=["emulated", "native"])
RATIOS = pytest.mark.parametrize("ratio", [1e-10, 1e-20])


def two_losses(*names: str) -> List[nn.Variable]:
    """The losses of two heads on a trunk."""
    rng = np.random.RandomState(0)
    x, *targets = (constant(rng.randn(8, n)) for n in (5, 2, 2))
    h = F.tanh(PF.affine(x, 8, name="trunk", rng=rng))
    terms = []
    for name, target in zip(names, targets):
        hidden = F.tanh(PF.affine(h, 8, name=f"{name}/hidden", rng=rng))
        terms.append(F.mean(F.squared_error(PF.affine(hidden, 2, name=f"{name}/out", rng=rng), target)))
    return terms


def weight_gradients() -> Dict[str, NDArray[np.float32]]:
    return {name: g for name, g in gradients().items() if name.endswith("W")}


def settled(ratio: float, method: Optional[str], storage: Optional[str]) -> Dict[str, NDArray[np.float32]]:
    """Those of the weights, once scales have settled; without `storage` in native half."""
    nn.clear_parameters()
    nn.seed(0)
    with nn.context_scope(HALF if storage is None else FLOAT):
        large, small = two_losses("large", "small")
        loss = large + ratio * small
    config = AdaLossConfig(loss_scale_method=method)
    updater = updater_of(loss, solver=S.Sgd(0.0), storage=storage, config=config)
    for _ in range(10):
        assert updater.update().updated
    if method == "fixed":
        assert set(updater.scaling.layer_scales.values()) == {1.0}
    return weight_gradients()


def errors(ratio: float, method: Optional[str], storage: Optional[str]) -> Dict[str, float]:
    exact = settled(ratio, "fixed", "float32")
    found = settled(ratio, method, storage)
    # Of numbers below 1e-19 squares are not in float32.
    norms = {name: float(np.linalg.norm(g.astype(np.float64))) for name, g in exact.items()}
    return {n: float(np.linalg.norm(found[n].astype(np.float64) - exact[n])) / norms[n] for n in norms}


@RATIOS
@EMULATED_AND_NATIVE
def test_by_default_the_gradients_of_both_are_kept(ratio: float, storage: Optional[str]) -> None:
    found = errors(ratio, None, storage)
    assert len(found) == 5
    assert max(found.values()) < 0.01, found


@RATIOS
@EMULATED_AND_NATIVE
def test_one_measured_scale_keeps_those_of_the_large_one_alone(ratio: float, storage: Optional[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = errors(ratio, "fixed", storage)
    small = {name: error for name, error in found.items() if name.startswith("small")}
    assert max(found[name] for name in found.keys() - small.keys()) < 0.01, found
    assert min(small.values()) > 0.02, found
    if ratio < 1e-15:
        assert set(small.values()) == {1.0}


class InTurn:
    """Two heads on a trunk, of which each batch trains one: the other's weight is 0."""

    def __init__(self, storage: Optional[str], **options: Any) -> None:
        nn.clear_parameters()
        self.weights = [constant(np.zeros(1)) for _ in range(2)]
        with nn.context_scope(HALF if storage is None else FLOAT):
            losses = two_losses("first", "second")
            weighted = [F.reshape(one, (1,)) * weight for one, weight in zip(losses, self.weights)]
            loss = F.sum(weighted[0] + weighted[1])
        self.updater = updater_of(loss, solver=S.Sgd(0.0), storage=storage, **options)

    def gradients(self, *weights: float) -> Tuple[UpdateResult, Dict[str, NDArray[np.float32]]]:
        for variable, weight in zip(self.weights, weights):
            variable.d = weight
        result = self.updater.update()
        return result, weight_gradients()


def in_turn(
    storage: Optional[str], sizes: Sequence[float], **options: Any
) -> Tuple[List[UpdateResult], Dict[str, NDArray[np.float32]]]:
    """The results of 24 batches, and the last gradients of the head that is trained last."""
    net = InTurn(storage, **options)
    results: List[UpdateResult] = []
    lost: Dict[str, int] = {}
    for index in range(24):
        weights = [0.0, 0.0]
        weights[index % 2] = sizes[index % 2]
        result, gradients = net.gradients(*weights)
        results.append(result)
        if index > 3:
            assert net.updater.counters.lost == lost
        lost = dict(net.updater.counters.lost)
    return results, {name: g for name, g in gradients.items() if name.startswith("second")}


@pytest.mark.parametrize("ratio", [1e-6, 1e-10, 1e-12])
@EMULATED_AND_NATIVE
@pytest.mark.parametrize("on_overflow", ["repeat", "next"])
def test_of_two_tasks_in_turn_the_small_one_is_trained_too(
    storage: Optional[str], on_overflow: str, ratio: float
) -> None:
    _, exact = in_turn("float32", (1.0, ratio))
    results, found = in_turn(storage, (1.0, ratio), on_overflow=on_overflow)
    assert {result.reason for result in results[4:]} == {"updated"}
    # Each head has components of its own, which are known after the first batches. The trunk is searched for
    # what the small one gives it: each time, or, as it comes to nothing at 1e-12, less and less.
    assert sum(result.retries for result in results[4:]) <= {1e-6: 2, 1e-10: 50, 1e-12: 25}[ratio]
    for name, g in exact.items():
        np.testing.assert_allclose(found[name], g, rtol=0.05, atol=0.01 * np.abs(g).max(), err_msg=name)


def test_a_batch_that_is_zero_for_a_reason_costs_nothing_and_raises_no_alarm() -> None:
    net = InTurn("float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(24):
            masked = index % 4 == 3
            result, _ = net.gradients(*(0.0, 0.0) if masked else (1.0, 1.0))
            assert result.reason == ("zero_gradients" if masked else "updated")
            assert not (index and result.retries)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_gradients_that_no_scale_brings_back_are_searched_for_less_and_less() -> None:
    """The loss is not zero, and nothing depends on the parameters."""
    gate = constant(np.ones(1))
    y = PF.affine(data(4, 3), 2, name="a")
    loss = F.sum(F.reshape(F.mean(y**2), (1,)) * gate + 1.0)
    updater = updater_of(loss, solver=S.Sgd(0.0))
    retries = []
    for index in range(60):
        gate.d = float(index % 2 == 0)
        retries.append(updater.update().retries)
    assert sum(retries[1:]) <= 20
    assert sum(retries[30:]) <= 5


def deep_pair() -> Tuple[nn.Variable, List[nn.Variable]]:
    """Two heads on a trunk of three layers, with a weight for the loss of each."""
    rng = np.random.RandomState(0)
    h = constant(rng.randn(16, 8))
    for index in range(3):
        h = F.tanh(PF.affine(h, 8, name=f"trunk{index}", rng=rng))
    weights = [constant(0.0) for _ in range(2)]
    heads = [
        F.mean(PF.affine(F.tanh(PF.affine(h, 8, name=f"{name}/hidden", rng=rng)), 4, name=name, rng=rng) ** 2)
        for name in "ab"
    ]
    return heads[0] * weights[0] + heads[1] * weights[1], weights


def test_what_a_lost_batch_has_shown_outlives_a_search_in_the_same_iteration() -> None:
    """The next batch of the iteration is far smaller, and gets scales of its own."""
    loss, weights = deep_pair()
    turn = itertools.count()

    def feed() -> None:
        small = next(turn) % 2 == 0
        weights[0].d, weights[1].d = (1e-8, 0.0) if small else (0.0, 1.0)

    updater = updater_of(loss, feed, solver=S.Sgd(0.0), on_overflow="next")
    for _ in range(20):
        updater.update()
    lost = dict(updater.counters.lost)
    assert 0 < lost["overflow"] <= 8
    for _ in range(10):
        assert updater.update().updated
    assert updater.counters.lost == lost
