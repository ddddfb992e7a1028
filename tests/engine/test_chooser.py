# SPDX-License-Identifier: Apache-2.0
"""When scales are chosen, how long they are kept, and which components share one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Dict, List, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, HistoryPolicy
from nnabla_adaloss.engine import slices
from nnabla_adaloss.engine.chooser import Request
from tests.worlds.networks import layers, mlp
from tests.worlds.passes import calibrated, run, settle
from tests.worlds.tampering import Gate
from tests.worlds.values import FLOAT, HALF, assert_close, assert_equal, constant, data, gradients

FIXED = {"loss_scale_method": "fixed", "use_bound": False}


@pytest.mark.parametrize("every", [1, 3])
def test_update_per_n_iteration_counts_iterations(every: int) -> None:
    calls: List[int] = []

    def method(g: np.ndarray, W: np.ndarray, *, config: AdaLossConfig, fan_in: float) -> float:
        calls.append(scaling.iteration)
        return 2.0

    config = AdaLossConfig(loss_scale_method=method, update_per_n_iteration=3, measure_every=every)
    scaling = AdaptiveLossScaling(mlp(), config)
    for _ in range(7):
        calibrated(scaling)
    # Each of two layers before both passes that measure, once anything was; the second knows the iteration.
    assert calls == [1, 1, 3, 3, 4, 4, 6, 6, 7, 7]


def test_a_fixed_scale_is_guarded_against_overflow_as_any_other() -> None:
    h = PF.affine(constant(np.ones((1, 3))), 3, name="a")
    loss = F.sum(PF.affine(h, 4, w_init=np.ones((3, 4)), name="b"))
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(fixed_loss_scale=2.0, **FIXED))
    run(scaling, 2.0**10)
    assert scaling.layer_scales == {"b/affine": 2.0}
    # Each gradient behind the layer is 4, which leaves room for 2**12 with a margin of two bits.
    run(scaling, 2.0**14)
    assert scaling.accumulated_scales == {"b/affine": 2.0**11}


def test_a_fixed_method_leaves_a_given_s0_as_it_is_whatever_was_measured() -> None:
    # A function that clips gradients parts components, without a layer, too.
    y = F.clip_grad_by_value(layers(5, 5), constant(-np.ones((4, 5))), constant(np.ones((4, 5))))
    scaling = AdaptiveLossScaling(F.mean(y**2), AdaLossConfig("fixed"))
    settle(scaling, 0)
    run(scaling, 2.0**40, iteration=1)
    assert scaling.result.schedule.component_scales == [2.0**40] * 2


def test_seed_gradients_that_grow_from_pass_to_pass_are_measured_in_each() -> None:
    y = layers(5, 5)
    scaling = AdaptiveLossScaling(FormatEmulation(y, "float16"), AdaLossConfig(delay=1))
    seed = np.random.default_rng(0).standard_normal(y.shape)
    for iteration in range(10):
        kinds = settle(scaling, iteration, clear=False, grad=seed * 2.0**iteration)
        assert {*kinds} == {"measuring"}
        assert scaling.found_inf == []


def test_a_loss_gradient_with_a_given_s0_that_overflows_goes_down_with_the_rest() -> None:
    y = layers(5, 5)
    scaling = AdaptiveLossScaling(FormatEmulation(y, "float16"))
    seed = np.full(y.shape, 2.0**6, np.float32)
    for iteration in range(3):
        settle(scaling, iteration, 2.0**4, clear=False, grad=seed)
    run(scaling, 2.0**12, iteration=3, grad=seed)
    assert scaling.found_inf
    assert scaling.after_overflow()
    run(scaling, 2.0**12, iteration=3, rerun=True, grad=seed)
    assert scaling.found_inf == []
    assert scaling.scale_of(y) < 2.0**10


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("same", [False, True])
def test_scales_lowered_by_an_overflow_are_chosen_again_in_the_next_iteration(same: bool, delay: int) -> None:
    gate = Gate()
    loss = F.mean(PF.affine(F.tanh(gate(layers(8, 8, batch=8, width=8))), 8, name="c") ** 2)
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16"), AdaLossConfig(delay=delay))
    for iteration in range(4):
        settle(scaling, iteration, clear=False)
        scaling.after_update()
    before = scaling.layer_scales
    gate.first = 2.0**12
    run(scaling, iteration=4)
    assert scaling.found_inf
    assert scaling.after_overflow()
    # The same batch once more, or the next one of the iteration; whatever that is, it is as those before.
    gate.first = 1.0
    run(scaling, iteration=4, rerun=same)
    assert scaling.found_inf == []
    assert scaling.layer_scales != before
    scaling.after_update()
    settle(scaling, 5, clear=False)
    assert scaling.layer_scales == before


@pytest.mark.parametrize("method", ["amax_history", "approx_range"])
def test_ranks_come_to_the_same_scales_whatever_single_batches_have_shown(method: Any) -> None:
    ranks = []
    for rank in range(2):
        # In another process names would be the same.
        with nn.parameter_scope("", OrderedDict()):
            h = PF.affine(F.tanh(PF.affine(data(4, 5, seed=rank), 6, name="a")), 6, name="b")
            gate = Gate()
            gate.factor = 2.0 ** (-9 * rank)
            loss = F.mean(gate(PF.affine(F.tanh(h), 3, name="c")) ** 2)
            ranks.append(AdaptiveLossScaling(loss, AdaLossConfig(method, delay=1, dtype="float16")))
    for iteration in range(3):
        for scaling in ranks:
            for _ in range(2):
                run(scaling, iteration=iteration)
        if not iteration:
            # Its gradients are the largest, so that it decides.
            decides = ranks[0].accumulated_scales
        else:
            assert ranks[0].accumulated_scales == ranks[1].accumulated_scales == decides
        told = [scaling.shared_statistics() or {} for scaling in ranks]
        for scaling in ranks:
            scaling.adopt_statistics(told)
            scaling.after_update()
    # Where one chooses anew, all do.
    assert ranks[1].state_dict()["schedule"]["chosen"]
    ranks[0].restart(8.0)
    ranks[1].adopt_statistics([scaling.shared_statistics() or {} for scaling in ranks])
    assert not ranks[1].state_dict()["schedule"]["chosen"]


def test_a_window_has_an_entry_for_each_cycle_in_which_everything_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slices, "_LEAST", 1)
    scaling = AdaptiveLossScaling(mlp(), AdaLossConfig(measure_every=3))
    entries = []
    for iteration in range(9):
        settle(scaling, iteration)
        scaling.after_update()
        entries.append(max(window[0] for window in scaling.state_dict()["components"]["windows"].values()))
    # Each cycle begins with another slice.
    assert entries == [1, 1, 1, 2, 3, 3, 3, 3, 4]


# Loss weights.


def two_heads() -> Tuple[nn.Variable, nn.Variable, nn.Variable]:
    """A loss of two heads on one layer, and the weights of both."""
    h, weights = layers(6), [constant(1.0) for _ in range(2)]
    heads = [PF.affine(h, 3, name=name) for name in ("left", "right")]
    return F.mean(heads[0] ** 2) * weights[0] + F.mean(heads[1] ** 2) * weights[1], *weights


def test_a_head_that_no_batch_has_shown_is_not_waited_for() -> None:
    loss, _, right = two_heads()
    right.d = 0.0
    scaling = AdaptiveLossScaling(loss)
    kinds = [settle(scaling, iteration) for iteration in range(4)]
    assert kinds[0][-1] == "measuring"
    assert kinds[1:] == [["hookless"]] * 3
    right.d = 1.0
    assert settle(scaling, 4)[0] == "measuring"


def test_steps_around_functions_follow_the_schedule_while_loss_weights_stay() -> None:
    gate = Gate()
    loss = F.mean(gate(layers(6, 6, names="ab")) ** 2)
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(measure_every=1, dtype="float16"))
    used = []
    for iteration in range(8):
        gate.factor = 2.0 ** (9 * (iteration // 2))
        settle(scaling, iteration)
        assert_equal(gradients(), run(loss))
        used.append(tuple(scaling.result.schedule.component_scales))
    assert len(set(used)) > 2


@pytest.mark.parametrize("exponent", [-20, -4, 0])
def test_a_small_loss_weight_with_a_given_s0_is_compensated_as_in_any_batch(exponent: int) -> None:
    loss, left, right = two_heads()
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(dtype="float16"))
    for iteration, weight in enumerate([1.0, 1.0, 2.0**exponent]):
        left.d = right.d = weight
        settle(scaling, iteration, 8.0)
    schedule = scaling.result.schedule
    scales = dict(zip(schedule.components.names, schedule.component_scales))
    assert scales["left/affine/PowScalar"] == scales["right/affine/PowScalar"] == 8.0 * 2.0**-exponent


def test_the_loss_gradient_has_no_larger_scale_than_there_is_at_all() -> None:
    for largest in (2.0**5, 2.0**64):
        scaling = AdaptiveLossScaling(
            mlp(), AdaLossConfig(dtype="float16"), history=HistoryPolicy(max_scale=largest)
        )
        settle(scaling)
        assert scaling.result.schedule.component_scales[0] == min(largest, 2.0**15)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("way", ["none", "float16", "native"])
def test_seed_gradients_of_any_size_take_turns_as_loss_weights_do(way: str, several: bool) -> None:
    def network(context: nn.Context) -> nn.Variable:
        with nn.context_scope(context):
            h = layers(6, 6, 6, batch=8, width=6)
            return h**2 if several else F.mean(h**2)

    sizes = [1.0, 1.0, 2.0**-30, 1.0, 2.0**10, -(2.0**-40), 1.0]
    fp32 = network(FLOAT)
    seeds = [np.full(fp32.shape, size, np.float32) for size in sizes]
    expected = [run(fp32, grad=seed) for seed in seeds]
    loss = network(HALF if way == "native" else FLOAT)
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16") if way == "float16" else loss)
    for iteration, (size, seed) in enumerate(zip(sizes, seeds)):
        given: Any = None if size == 1.0 and not several else seed
        # Only the first batch runs again.
        assert len(settle(scaling, iteration, clear=False, grad=given)) == (1 if iteration else 2)
        assert not scaling.found_inf
        scaling.after_update()
        found = gradients()
        for name, gradient in expected[iteration].items():
            assert np.abs(found[name] - gradient).max() <= 4e-3 * np.abs(gradient).max()


# Components that share a scale: unless a leaf would lose its gradient.


def unrolled(steps: int, by: float, *, trained: bool) -> nn.Variable:
    """The same layer so many times; what comes back through it becomes smaller by some factor each time."""
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    PF.get_parameter_or_create("cell/affine/W", (6, 6)).d = np.eye(6)[::-1] * by
    h = PF.get_parameter_or_create("state", (4, 6)) if trained else nn.Variable((4, 6))
    h.d = rng.randn(4, 6) * 0.5
    for _ in range(steps):
        h = F.tanh(PF.affine(h, 6, name="cell") + constant(rng.randn(4, 6) * 0.5))
    return F.mean(PF.affine(h, 3, name="last", rng=rng) ** 2)


def errors(loss: nn.Variable, storage: str) -> Tuple[str, Dict[str, float]]:
    """The kind of a pass, and how far each gradient is from that of float32."""
    expected = {name: gradient.astype(np.float64) for name, gradient in run(loss).items()}
    scaling = AdaptiveLossScaling(FormatEmulation(loss, storage))
    for iteration in range(3):
        settle(scaling, iteration, clear=False)
    found = gradients()
    return scaling.result.kind, {
        name: float(np.linalg.norm(found[name] - own) / np.linalg.norm(own)) for name, own in expected.items()
    }


# Of two bits of mantissa not more than two digits can be expected, and of as few steps as leave that.
VANISHING = [("float16", 64, 0.5, 0.02), ("float16", 64, 0.75, 0.02), ("float8_e5m2", 8, 2.0**-4, 0.3)]


@pytest.mark.parametrize(("storage", "steps", "by", "tolerance"), VANISHING)
def test_a_leaf_behind_gradients_that_vanish_has_a_scale_of_its_own(
    storage: str, steps: int, by: float, tolerance: float
) -> None:
    kind, found = errors(unrolled(steps, by, trained=True), storage)
    assert "shares a weight with a layer of another scale" in kind
    assert max(found.values()) < tolerance
    # Where nothing else is behind them they may vanish.
    kind, found = errors(unrolled(steps, by, trained=False), storage)
    assert kind == "hookless"
    assert "state" not in found
    assert max(found.values()) < tolerance


@pytest.mark.parametrize("grad", [None, 2.0])
def test_components_merged_with_a_loss_gradient_of_a_given_s0_keep_their_limit(grad: Optional[float]) -> None:
    """A loss that a shared layer computes is joined with what is behind it, for which 2**18 is too much."""
    h = PF.affine(constant(np.full((1, 2), 2.0**-9)), 1, name="first")
    for _ in range(3):
        h = PF.affine(h, 1, name="again", w_init=np.full((1, 1), 16.0))
    seed: Dict[str, Any] = {} if grad is None else {"grad": np.full((1, 1), grad, np.float32)}
    expected = run(h, **seed)
    scaling = AdaptiveLossScaling(FormatEmulation(h, "float16"))
    for iteration, scale in enumerate((1.0, 1.0, 2.0**10, 2.0**10)):
        settle(scaling, iteration, scale, clear=False, **seed)
        assert scaling.found_inf == []
        assert scaling.result.schedule.component_scales[0] == scale
    assert_close(gradients(), expected, rtol=2e-3)


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("weight", [1e-5, 3e-6, 1e-10])
def test_no_head_loses_its_gradient_to_a_larger_one_that_it_shares_layers_with(
    scale: Optional[float], weight: float
) -> None:
    """A given S0, too, governs what is before the layers of both."""
    rng = np.random.RandomState(0)

    def parameter(name: str) -> nn.Variable:
        return PF.get_parameter_or_create(name, (6, 6), rng.randn(6, 6).astype(np.float32) * 0.4)

    trunk, decoder = F.tanh(F.affine(data(8, 6), parameter("trunk"))), parameter("decoder")
    heads = [F.tanh(F.affine(trunk, parameter(name))) for name in ("large", "small")]
    losses = [F.mean(F.affine(head, decoder) ** 2) for head in heads]
    loss = losses[0] + weight * losses[1]
    expected = run(loss)
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16", float_tail=True))
    for iteration in range(4):
        settle(scaling, iteration, scale)
    for name, gradient in gradients().items():
        assert np.linalg.norm(gradient - expected[name]) < 3e-3 * np.linalg.norm(expected[name])


@pytest.mark.parametrize("form", ["far apart", "logarithm"])
def test_loss_weights_at_the_ends_of_float32(form: str) -> None:
    h, rng = layers(5), np.random.RandomState(1)
    one, other = (F.mean(PF.affine(h, 3, name=name, rng=rng) ** 2) for name in "bc")
    if form == "far apart":
        loss = one * 1e18 + other * 1e-25
    else:
        loss = F.log(one * 1e-20 + 1e-25) * 1e-10 + 0.0 * other
    expected = run(loss)
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(dtype="float16"))
    for iteration in range(4):
        for number in range(6):
            run(scaling, iteration=iteration, rerun=number > 0)
            if scaling.calibrated and not (scaling.found_inf and scaling.after_overflow()):
                break
        assert_equal(gradients(), expected)
    assert scaling.result.kind == "hookless"


@pytest.mark.parametrize("method", ["amax_history", "approx_range"])
def test_a_decision_sets_nothing(method: str) -> None:
    scaling = AdaptiveLossScaling(mlp(), AdaLossConfig(loss_scale_method=method, measure_every=3))
    for iteration in range(6):
        prepared = scaling._graph.current()
        # Slices are computed when the first of them is needed.
        before = {name: value for name, value in vars(prepared).items() if name != "_slices"}
        asked = Request(iteration, None, prepared.loss_weights(None))
        seen = scaling.components.before_pass(iteration)
        decide = scaling._chooser.decide
        assert decide(prepared, seen, asked) == decide(prepared, seen, asked)
        assert {name: value for name, value in vars(prepared).items() if name in before} == before
        settle(scaling, iteration)


def test_u_min_determines_the_first_scale_after_an_underflow_with_any_method() -> None:
    """So the default method uses it, and the setting is not reported as unused."""

    def scale_after_underflow(u_min: Optional[float]) -> float:
        nn.clear_parameters()
        h = PF.affine(constant(np.ones((4, 3))), 2, name="fc", rng=np.random.RandomState(0))
        loss = F.mean(F.tanh(F.sigmoid(h) * constant(np.full((4, 2), 1e-7))))
        config = AdaLossConfig(u_min=u_min)
        assert config.changed_without_effect == []
        scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16"), config, non_homogeneous=("Mul2",))
        run(scaling, iteration=0)
        while not scaling.components.underflowed:
            run(scaling, iteration=0, rerun=True)
        run(scaling, iteration=0, rerun=True)
        return max(scaling.result.schedule.component_scales)

    small, default, large = (scale_after_underflow(u_min) for u_min in (1e-12, None, 1e-3))
    assert small > default > large
