# SPDX-License-Identifier: Apache-2.0
"""Two losses of very different sizes on one network: what one scale loses, components keep, natively too."""

from __future__ import annotations

import itertools
import json
from typing import Any, Callable, Dict, List, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from numpy.typing import NDArray

from nnabla_adaloss import AdaLossConfig, GradScaler, UpdateResult
from tests.worlds.trainings import scaler_step, updater_of
from tests.worlds.values import FLOAT, HALF, constant, data, gradients
from tests.worlds.warned import silent, warned

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


def two_stems(*names: str) -> List[nn.Variable]:
    """The losses of two heads, each on a stem of its own, whose features are rows of one array."""
    rng = np.random.RandomState(0)
    stems = [F.tanh(PF.affine(constant(rng.randn(8, 5)), 6, name=f"{name}/stem", rng=rng)) for name in names]
    rows = [PF.affine(stem, 6, name=f"{name}/features", rng=rng) for name, stem in zip(names, stems)]
    h = PF.layer_normalization(F.concatenate(*rows, axis=0), batch_axis=0, name="norm")
    errors = []
    for name, own in zip(names, (h[:8], h[8:])):
        y = PF.affine(F.tanh(own), 2, name=f"{name}/out", rng=rng)
        errors.append(F.mean(F.squared_error(y, constant(rng.randn(8, 2)))))
    return errors


def calibrated(
    ratio: float,
    method: Optional[str],
    storage: Optional[str],
    losses: Callable[..., List[nn.Variable]] = two_losses,
) -> Dict[str, NDArray[np.float32]]:
    """Those of the weights, once scales have settled; without `storage` in native half."""
    nn.clear_parameters()
    nn.seed(0)
    with nn.context_scope(HALF if storage is None else FLOAT):
        large, small = losses("large", "small")
        loss = large + ratio * small
    config = AdaLossConfig(loss_scale_method=method)
    updater = updater_of(loss, solver=S.Sgd(0.0), storage=storage, config=config)
    for _ in range(10):
        assert updater.update().updated
    if method == "fixed":
        assert set(updater.scaling.layer_scales.values()) == {1.0}
    return weight_gradients()


def errors(ratio: float, method: Optional[str], storage: Optional[str], **options: Any) -> Dict[str, float]:
    exact = calibrated(ratio, "fixed", "float32", **options)
    found = calibrated(ratio, method, storage, **options)
    # Of numbers below 1e-19 squares are not in float32.
    norms = {name: float(np.linalg.norm(g.astype(np.float64))) for name, g in exact.items()}
    return {n: float(np.linalg.norm(found[n].astype(np.float64) - exact[n])) / norms[n] for n in norms}


@RATIOS
@EMULATED_AND_NATIVE
def test_the_gradients_of_both_losses_are_kept_by_default(ratio: float, storage: Optional[str]) -> None:
    found = errors(ratio, None, storage)
    assert len(found) == 5
    assert max(found.values()) < 0.01, found


@pytest.mark.parametrize("ratio", [1e-4, 1e-8])
@pytest.mark.parametrize("method", [None, "approx_range"])
@EMULATED_AND_NATIVE
def test_a_stem_of_the_small_loss_keeps_its_gradient_where_both_have_one_array(
    storage: Optional[str], method: Optional[str], ratio: float
) -> None:
    """The alpha of the small head is as small as its weight, and must not flush the copy of its layer's."""
    found = errors(ratio, method, storage, losses=two_stems)
    assert len(found) == 6
    assert max(found.values()) < 0.02, found


def test_no_scale_goes_down_for_a_weight_in_fp32() -> None:
    """A copy in float32 keeps its bits with any alpha."""
    found = errors(1e-20, None, "float32", losses=two_stems)
    assert max(found.values()) < 1e-6, found


class InTurn:
    """Two heads on a trunk, of which each batch trains one: the other's weight is 0."""

    def __init__(self, storage: Optional[str], **options: Any) -> None:
        nn.clear_parameters()
        self.weights = [constant(np.zeros(1)) for _ in range(2)]
        with nn.context_scope(HALF if storage is None else FLOAT):
            losses = two_losses("first", "second")
            weighted = [F.reshape(one, (1,)) * weight for one, weight in zip(losses, self.weights)]
            self.loss = F.sum(weighted[0] + weighted[1])
        self.updater = updater_of(self.loss, solver=S.Sgd(0.0), storage=storage, **options)
        self.parameters = nn.get_parameters()

    def gradients(self, *weights: float) -> Tuple[UpdateResult, Dict[str, NDArray[np.float32]]]:
        for variable, weight in zip(self.weights, weights):
            variable.d = weight
        result = self.updater.update()
        return result, {name: v.g.copy() for name, v in self.parameters.items() if name.endswith("W")}


# Whether a batch is of the first task, by number.
PATTERNS: Dict[str, Callable[[int], bool]] = {
    "in turns": lambda index: index % 2 == 0,
    "in turns, the small one first": lambda index: index % 2 == 1,
    "one in five": lambda index: index % 5 == 4,
    "four in five": lambda index: index % 5 < 4,
    "one in 150": lambda index: index % 150 == 149,
    "at random": lambda index: bool(np.random.RandomState(index).randint(2)),
}


def in_turn(storage: Optional[str], pattern: str, ratio: float, batches: int, **options: Any) -> InTurn:
    """A net after so many batches."""
    net = InTurn(storage, **options)
    for index in range(batches):
        first = PATTERNS[pattern](index)
        result, _ = net.gradients(float(first), 0.0 if first else ratio)
        assert result.reason == "updated"
    return net


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("storage", "on_overflow", "ratio"),
    [("float16", "next", 1e-4), ("float16", "next", 1e-20), (None, "repeat", 1e-20)],
)
def test_two_tasks_in_turn_are_trained_and_only_first_batches_run_again(
    storage: Optional[str], on_overflow: str, pattern: str, ratio: float
) -> None:
    exact, found = InTurn("float32"), in_turn(storage, pattern, ratio, 40, on_overflow=on_overflow)
    counters = found.updater.counters
    assert counters.repeats <= 3
    assert not counters.lost
    # Nothing is trained, so that both nets are the same.
    for weights in ((1.0, 0.0), (0.0, ratio)):
        ours, theirs = found.gradients(*weights)[1], exact.gradients(*weights)[1]
        for name, g in theirs.items():
            np.testing.assert_allclose(ours[name], g, rtol=0.05, atol=0.01 * np.abs(g).max(), err_msg=name)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_grad_scaler_skips_no_step_of_them(pattern: str) -> None:
    net, ratio = InTurn("float16"), 1e-20
    solver, scaler = net.updater.solver, GradScaler(net.updater.solver, storage="float16")
    for index in range(40):
        first = PATTERNS[pattern](index)
        net.weights[0].d, net.weights[1].d = float(first), 0.0 if first else ratio
        assert scaler_step(scaler, solver, net.loss)


@pytest.mark.parametrize("spike", [2.0**6, 1e10])
def test_a_spike_of_a_loss_weight_costs_nothing_however_rare_it_is(spike: float) -> None:
    """The window has forgotten the one before."""
    net = InTurn("float16", on_overflow="next")
    for index in range(300):
        weight = spike if index % 145 == 144 else 1.0
        result, _ = net.gradients(weight, weight)
        assert result.updated
    assert net.updater.counters.repeats <= 1
    assert not net.updater.counters.lost


@pytest.mark.parametrize("on_overflow", ["repeat", "next"])
@pytest.mark.parametrize("batches", [1, 2, 7, 12])
def test_tasks_in_turn_go_on_from_a_saved_state_bit_for_bit(batches: int, on_overflow: str) -> None:
    def go_on(net: InTurn) -> List[Any]:
        found = []
        for index in range(20):
            result, gradients = net.gradients(float(index % 3 == 0), 1e-9 * (index % 3 > 0))
            schedule = net.updater.scaling.result.schedule
            found += [
                result,
                schedule.component_scales,
                schedule.loss_weights,
                [g.tobytes() for g in gradients.values()],
            ]
        return [*found, net.updater.state_dict()["scaling"]]

    net = in_turn("float16", "in turns", 1e-9, batches, on_overflow=on_overflow)
    state = json.loads(json.dumps(net.updater.state_dict()))
    expected = go_on(net)
    other = InTurn("float16", on_overflow=on_overflow)
    other.updater.load_state_dict(state)
    assert go_on(other) == expected


@pytest.mark.parametrize("ratio", [1e-9, 1e4])
@pytest.mark.parametrize("float_tail", [True, False])
def test_a_trunk_starts_with_the_gradient_of_the_larger_loss(ratio: float, *, float_tail: bool) -> None:
    """Whichever comes first in backward."""
    net = InTurn("float16", float_tail=float_tail)
    result, _ = net.gradients(1.0, ratio)
    assert result.retries <= 2 - float_tail


def test_batches_without_a_reward_are_no_measurements_and_raise_no_alarm() -> None:
    """In 29 of 30 batches the loss is exactly zero, by an array of advantages."""

    def lost(zeros: int) -> int:
        nn.clear_parameters()
        advantages, count = constant(np.zeros((8, 1))), itertools.count()
        y = PF.affine(F.tanh(PF.affine(data(8, 4), 6, name="a")), 1, name="b")

        def feed() -> None:
            advantages.d = float(next(count) % (zeros + 1) == zeros)

        updater = updater_of(F.mean(y * advantages), feed, solver=S.Sgd(0.0), on_overflow="next")
        for _ in range(10 * (zeros + 1)):
            updater.update()
        return sum(updater.counters.lost.values())

    with silent():
        assert lost(29) <= lost(0)


def test_a_gradient_that_ends_for_another_reason_costs_nothing() -> None:
    """The loss is not zero, and in every second batch nothing depends on the parameters."""
    switch = constant(np.ones(1))
    y = PF.affine(data(4, 3), 2, name="a")
    updater = updater_of(F.sum(F.reshape(F.mean(y**2), (1,)) * switch + 1.0), solver=S.Sgd(0.0))
    retries = []
    with warned():
        for index in range(20):
            switch.d = float(index % 2 == 0)
            retries.append(updater.update().retries)
    assert not any(retries[1:])


@pytest.mark.parametrize(
    "options", [{"global_scale": "dynamic"}, {"global_scale": "dynamic", "scale": 65536.0}, {}]
)
def test_an_auxiliary_loss_may_vanish(options: Dict[str, Any]) -> None:
    """Down to the smallest numbers of float32, and to nothing; or begin there."""
    for exponents in (range(0, 1100, 50), (880, 1000), (1400,)):
        net, exact = InTurn("float16", **options), InTurn("float32", **options)
        for exponent in exponents:
            weights = 1.0, float(np.float32(0.9**exponent))
            result, found = net.gradients(*weights)
            assert result.reason == "updated"
        _, expected = exact.gradients(*weights)
        large = {name: g for name, g in expected.items() if not name.startswith("second")}
        for name, g in large.items():
            np.testing.assert_allclose(found[name], g, rtol=0.05, atol=0.01 * np.abs(g).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1e-4, 1e-20])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_first_of_600_batches_alone_run_again(pattern: str, ratio: float) -> None:
    net = in_turn("float16", pattern, ratio, 600, on_overflow="next")
    assert net.updater.counters.repeats <= 3
    assert not net.updater.counters.lost


@EMULATED_AND_NATIVE
def test_a_head_without_a_weight_limits_nothing(storage: Optional[str]) -> None:
    """Its weights are large, and where its gradients meet those of the other one, nothing is lost."""
    net, exact = InTurn(storage), InTurn("float32")
    for one in (exact, net):
        one.parameters["first/hidden/affine/W"].d *= 2.0**12
        for _ in range(10):
            result, gradients = one.gradients(0.0, 1e-12)
            assert result.reason == "updated"
        if one is exact:
            expected = gradients
    for name, g in expected.items():
        np.testing.assert_allclose(gradients[name], g, rtol=0.05, atol=0.01 * np.abs(g).max(), err_msg=name)
    absent = [layer for layer in net.updater.scaling.layers if layer.startswith("first")]
    assert {net.updater.scaling.layer_scales[layer] for layer in absent} == {1.0}


@pytest.mark.parametrize("way", ["updater", "two batches", "scaler"])
def test_a_network_with_shortcuts_may_be_absent_as_a_whole(way: str) -> None:
    h = F.tanh(PF.affine(data(8, 3), 3, name="a"))
    h = h + PF.affine(F.tanh(PF.affine(h, 3, name="b")), 3, name="c")
    weight = constant(0.0)
    loss = (F.mean(PF.affine(h, 2, name="d") ** 2) + 1.0) * weight - 3.0
    updater = updater_of(loss, accum_grad=1 + (way == "two batches"))
    scaler = GradScaler(updater.solver, storage="float16")
    with silent():
        for value in (0.0, 0.0, 1.0, 0.0, 1e-9, 0.0):
            weight.d = value
            if way == "scaler":
                assert scaler_step(scaler, updater.solver, loss)
            else:
                assert updater.update().reason == ("updated" if value else "zero_gradients")


@pytest.mark.parametrize("storage", ["float16", None])
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_a_part_that_is_persistent_can_be_read_after_an_update(storage: Optional[str]) -> None:
    first, second = two_losses("a", "b")
    first.persistent = second.persistent = True
    loss = first + 0.5 * second
    updater = updater_of(loss, storage=storage)
    for _ in range(3):
        updater.update()
        np.testing.assert_allclose(float(loss.d), float(first.d) + 0.5 * float(second.d), rtol=2e-3)


@pytest.mark.parametrize("storage", ["float16", None, "float32"], ids=["emulated", "native", "fp32"])
def test_a_small_term_is_rounded_away_where_it_is_added_to_a_large_one_but_trains_a_layer_of_its_own(
    storage: Optional[str],
) -> None:
    """docs/limitations.md: float16 adds 1 and 5e-5 to 1, whatever the loss scale."""

    def trained_with(weight: float) -> Dict[str, NDArray[np.float32]]:
        nn.clear_parameters()
        rng = np.random.RandomState(0)
        with nn.context_scope(HALF if storage is None else FLOAT):
            h = PF.affine(constant(rng.randn(8, 5)), 6, name="trunk", rng=rng)
            large = F.mean(h * constant(rng.uniform(1, 2, (8, 6))))
            small = F.mean(PF.affine(h, 1, name="own", rng=rng) * constant(rng.uniform(0.5, 1, (8, 1))))
            loss = large + weight * small
        updater = updater_of(loss, solver=S.Sgd(0.0), storage=storage)
        for _ in range(4):
            assert updater.update().updated
        return weight_gradients()

    with_term, without = trained_with(1e-5), trained_with(0.0)
    lost = np.array_equal(with_term["trunk/affine/W"], without["trunk/affine/W"])
    assert lost == (storage != "float32")
    exact = trained_with(1.0)["own/affine/W"] * 1e-5
    assert np.allclose(with_term["own/affine/W"], exact, rtol=5e-3, atol=0.0)
