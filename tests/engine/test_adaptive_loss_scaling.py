# SPDX-License-Identifier: Apache-2.0
"""The engine as people with a loop of their own use it."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Type

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    FormatEmulation,
    LossScaleWarning,
)
from tests.worlds.methods import LooksBack
from tests.worlds.networks import layers, mlp, two_layers
from tests.worlds.passes import calibrated, look, run, settle
from tests.worlds.trainings import Training, training, updater_of
from tests.worlds.values import (
    HALF,
    Values,
    assert_close,
    assert_equal,
    constant,
    data,
    gradients,
    snapshot,
    zero_grads,
)

FIXED = {"loss_scale_method": "fixed", "use_bound": False}
# Scales are chosen from the arrays of the batch itself, which a first pass measures.
AT_ONCE = AdaLossConfig(delay=0)


def test_settings_that_the_default_method_ignores_are_reported() -> None:
    with pytest.warns(
        LossScaleWarning, match="^the default method does not use n_uf_threshold and use_bound; give"
    ):
        AdaptiveLossScaling(mlp(), AdaLossConfig(n_uf_threshold=1e-4, use_bound=False))


def test_scales_are_reported_by_parameter_scope() -> None:
    scaling = AdaptiveLossScaling(mlp(), AdaLossConfig(fixed_loss_scale=4.0, **FIXED))
    assert scaling.layer_scales == {}
    run(scaling, 8.0)
    assert scaling.layer_scales == {"c/affine": 4.0, "b/affine": 4.0}
    assert scaling.accumulated_scales == {"c/affine": 32.0, "b/affine": 128.0}
    hidden = nn.get_parameters()["b/affine/W"]
    with pytest.raises(KeyError):
        scaling.scale_of(hidden)
    assert scaling.scale_of(scaling.variable) == 8.0


def test_a_seed_gradient_is_multiplied_by_the_scale() -> None:
    y = PF.affine(constant(np.ones((4, 3))), 2, name="a")
    seed = np.arange(8, dtype=np.float32).reshape(4, 2)
    expected = run(y, seed)
    scaling = AdaptiveLossScaling(y)
    half, integers = seed.astype(np.float16), seed.astype(int)
    for given in (seed, nn.NdArray.from_numpy_array(seed), seed.astype(np.float64), half, integers):
        assert_equal(run(scaling, 4.0, grad=given), expected)
    with pytest.raises(ValueError, match=r"loss has shape \(4, 2\), not one element.*grad=.*sum.*mean"):
        scaling.backward(4.0)
    for shape in [(3,), (8,), (4, 2, 1), (0,)]:
        with pytest.raises(ValueError, match=r"grad has shape .* but loss has shape \(4, 2\)"):
            scaling.backward(4.0, grad=np.ones(shape))
    loss = mlp()
    half_of_it = {name: 0.5 * gradient for name, gradient in run(loss).items()}
    assert_equal(run(AdaptiveLossScaling(loss), 8.0, grad=np.array(0.5)), half_of_it)


def test_scales_that_are_none_are_refused() -> None:
    loss = mlp()
    before = run(loss, 1.0)
    with pytest.raises(ValueError, match="scale=.* must be a positive finite number"):
        AdaptiveLossScaling(loss).backward(-2.0)
    assert_equal(gradients(), before)


@pytest.mark.parametrize("scale", [8.0, 1000.0])
@pytest.mark.parametrize("storage", [None, "float32"])
@pytest.mark.parametrize("hook", [None, look])
def test_gradients_are_added_to_the_present_ones(hook: Any, storage: Optional[str], scale: float) -> None:
    h = data(4, 3)
    for _ in range(2):
        h = F.tanh(PF.affine(h, 3, name="shared"))
    loss = F.mean(PF.affine(h, 2, name="head") ** 2)
    expected = run(loss, 1.0)
    scaling = AdaptiveLossScaling(loss if storage is None else FormatEmulation(loss, storage))
    for iteration in range(3):
        for v in nn.get_parameters().values():
            v.grad.fill(0.25)
        for _ in range(2):
            scaling.forward()
            scaling.backward(scale, iteration=iteration, function_post_hook=hook)
        for name, gradient in gradients().items():
            np.testing.assert_allclose(gradient, 0.25 + 2 * expected[name], rtol=1e-5, atol=1e-7)


def test_hooks_run_around_the_engines_own() -> None:
    loss, order = mlp(), []
    weight = nn.get_parameters()["b/affine/W"]
    data = weight.data

    def pre(f: Any) -> None:
        order.append(f"pre {f.info.type_name}")

    def post(f: Any) -> None:
        order.append(f"post {f.info.type_name}")
        assert weight.data == data

    scaling = AdaptiveLossScaling(loss, AdaLossConfig(fixed_loss_scale=4.0, **FIXED))
    scaling.backward(8.0, function_pre_hook=pre, function_post_hook=post)
    assert order[:4] == ["pre MulScalar", "post MulScalar", "pre Mean", "post Mean"]


class Planned(Exception):
    pass


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("which", ["function_pre_hook", "function_post_hook"])
def test_an_exception_of_a_users_hook_comes_out_unchanged(which: str, emulate: bool) -> None:
    variable = mlp()
    loss = FormatEmulation(variable) if emulate else variable
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(fixed_loss_scale=4.0, **FIXED))
    expected = run(scaling, 8.0)
    for v in nn.get_parameters().values():
        v.g = 1.0  # not zeroing: the engine works on a swapped array or on a scaled one
    arrays = {name: (v.data, v.grad) for name, v in nn.get_parameters().items()}
    calls = [0]

    def hook(f: Any) -> None:
        calls[0] += 1
        if f.info.type_name == "Affine":
            raise Planned("in a hook")

    with pytest.raises(Planned, match="in a hook"):
        scaling.backward(8.0, **{which: hook})
    assert calls[0] <= 5
    assert {name: (v.data, v.grad) for name, v in nn.get_parameters().items()} == arrays
    if which == "function_pre_hook" and not emulate:
        # nnabla runs the function all the same, on a gradient that carries 8, on top of what was there.
        for name in ("c/affine/W", "c/affine/b"):
            np.testing.assert_allclose(nn.get_parameters()[name].g, 1.0 + 8.0 * expected[name], rtol=1e-6)
    assert_equal(run(scaling, 8.0), expected)


def test_sink_of_several_losses() -> None:
    h = layers(3)
    first, second = F.mean(PF.affine(h, 2, name="b") ** 2), F.mean(h) * 0.5
    sink = F.sink(first, second, one_input_grad=True)
    expected = run(sink, 1.0)
    of_h = {"h": h.g.copy()}
    h.persistent = True
    scaling = AdaptiveLossScaling(sink, AT_ONCE)
    assert_close(run(scaling, 64.0, clear=True), expected, rtol=1e-6)
    assert float(first.g) == 1.0
    assert_close({"h": h.g}, of_h, rtol=1e-6)


def test_objects_that_are_not_configurations_or_are_scaled_already() -> None:
    loss = mlp()
    with pytest.raises(TypeError, match="^config must be an AdaLossConfig or None, got str$"):
        AdaptiveLossScaling(loss, "fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^loss is scaled already: .* or its FormatEmulation$"):
        AdaptiveLossScaling(AdaptiveLossScaling(loss))


@pytest.mark.parametrize("delay", [0, 1])
def test_forgotten_amaxes_are_measured_again(delay: int) -> None:
    scaling = AdaptiveLossScaling(mlp(), AdaLossConfig(LooksBack(), delay=delay))

    def learned() -> Dict[str, Any]:
        state = scaling.state_dict()
        return {
            "layers": sorted(state["layers"]),
            "statistics": [row[0] for row in state["statistics"]],
            "components": sorted(state["components"]["windows"]),
        }

    calibrated(scaling)
    scaling.after_update()
    before = learned()
    assert all(before.values())
    scaling.forget()
    assert not any(learned().values())
    calibrated(scaling)
    scaling.after_update()
    assert learned() == before


@pytest.mark.parametrize(
    "read",
    [
        lambda scaling: scaling.result,
        lambda scaling: scaling.is_good,
        AdaptiveLossScaling.shared_statistics,
        AdaptiveLossScaling.has_nothing_to_learn,
    ],
)
def test_before_backward_there_is_nothing_to_report(read: Callable[[AdaptiveLossScaling], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"^backward\(\) has not run yet: there is no report of it$"):
        read(AdaptiveLossScaling(mlp()))


def test_the_format_of_a_configuration_is_that_of_the_storage_if_there_is_one() -> None:
    config = AdaLossConfig(dtype="float32")
    # In fp32 nothing is stored in a format of its own, and any may be computed for.
    assert AdaptiveLossScaling(mlp(), config).config == config.for_network()
    with nn.context_scope(HALF):
        x = nn.Variable((2, 2), need_grad=True)
        loss = F.sum(x * x)
    with pytest.raises(ValueError, match="dtype='float32', but storage keeps gradients in float16"):
        AdaptiveLossScaling(loss, config)
    assert AdaptiveLossScaling(loss).config.dtype == "float16"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AdaLossConfig(dtype="bfloat16"), "dtype='bfloat16', but storage"),
        (
            AdaLossConfig("element_wise_range", delay=1),
            "^delay=1 keeps statistics, .*='element_wise_range' needs arrays; choose delay=0",
        ),
    ],
)
def test_an_error_of_the_constructor_leaves_the_graph_unchanged(config: AdaLossConfig, message: str) -> None:
    with nn.context_scope(HALF):
        loss = F.mean(PF.affine(data(4, 3), 2) ** 2) * 1e-8
    loss.forward(clear_buffer=True)
    function = loss.parent
    with pytest.raises(ValueError, match=message):
        AdaptiveLossScaling(loss, config)
    assert loss.parent == function
    with pytest.raises(RuntimeError, match="forward has to run again"):
        AdaptiveLossScaling(loss).backward()


def test_an_engine_goes_on_from_that_of_the_graph_before() -> None:
    def build() -> AdaptiveLossScaling:
        return AdaptiveLossScaling(two_layers(data(2, 3)))

    before, after = build(), build()
    settle(before, 7)
    nn.get_parameters()["a/affine/W"].g = np.nan
    before.forward()
    before.backward()
    assert before.found_inf
    after.go_on_from(before)
    assert after.iteration == before.iteration == 9
    # What a batch before has spoilt is no matter of this one.
    after.forward()
    after.backward()
    assert after.found_inf == []


@pytest.mark.parametrize(
    ("weight", "storage", "zero"),
    [(0.0, None, True), (0.0, "float16", True), (1e-9, None, False), (1e-9, "float16", False)],
)
def test_a_loss_is_zero_unless_storing_it_made_it_so(weight: float, storage: Any, zero: bool) -> None:
    loss: Any = F.mean(nn.Variable.from_numpy_array(np.ones(3, np.float32), need_grad=True) * 1.0) * weight
    scaling = AdaptiveLossScaling(loss if storage is None else FormatEmulation(loss, storage))
    scaling.forward()
    scaling.backward()
    assert scaling.has_nothing_to_learn() is zero


def test_a_loss_that_no_part_of_the_network_counts_in_is_as_one_that_is_zero() -> None:
    weight = constant(0.0)
    scaling = AdaptiveLossScaling(F.mean(layers(5) ** 2) * weight + 3.0)
    for weight.d, nothing in ((0.0, True), (1.0, False), (0.0, True)):
        run(scaling)
        assert scaling.has_nothing_to_learn() is nothing


def test_a_gradient_that_is_cut_off_is_refused_until_it_is_let_through_again() -> None:
    y = layers(4, 2)
    loss = F.mean(y**2)
    updater, scaling = updater_of(loss), AdaptiveLossScaling(loss)
    updater.update()
    y.need_grad = False
    before = snapshot()
    for train in (updater.update, updater.update, lambda: run(scaling), updater_of(loss).update):
        with pytest.raises(ValueError, match="^loss needs no gradient"):
            train()
    assert_equal(snapshot(), before)
    y.need_grad = True
    assert updater.update().updated
    assert updater.iteration == 2
    assert run(scaling)


class WithSchedule(DynamicLossScalingUpdater):  # type: ignore[misc]
    """One that does something around nnabla's loop."""

    def update(self) -> None:
        self.solver.set_learning_rate(0.05)
        super().update()


class WithoutDivision(DynamicLossScalingUpdater):  # type: ignore[misc]
    """One with a loop of its own, made for gradients that come out unscaled."""

    def update(self) -> None:
        self.solver.zero_grad()
        self.data_feeder()
        self.loss.forward(clear_no_need_grad=self.clear_buffer)
        self.loss.backward(self.scale, clear_buffer=self.clear_buffer)
        self.solver.update()


def steps(train: Training, update: Callable[[], Any]) -> Values:
    trained = {name: v for name, v in train.parameters.items() if v.need_grad}
    before = snapshot(trained)
    update()
    return {name: v.d - before[name] for name, v in trained.items()}


@pytest.mark.parametrize(("storage", "made"), [(None, WithSchedule), ("float16", DynamicLossScalingUpdater)])
def test_nnablas_updater_is_refused_and_no_parameter_changes(storage: Any, made: Type[Any]) -> None:
    train = training()
    scaling = AdaptiveLossScaling(train.loss if storage is None else FormatEmulation(train.loss, storage))
    scaling.forward()
    scaling.backward(8.0)
    updater = made(train.solver, scaling, train.feed)
    message = (
        f"^{made.__name__} divides gradients .* is an AdaptiveLossScaling, .*AdaptiveLossScalingUpdater$"
    )

    def update() -> None:
        with pytest.raises(TypeError, match=message):
            updater.update()

    for _ in range(2):
        assert not any(step.any() for step in steps(train, update).values())
    # What the sentence says to do.
    assert AdaptiveLossScalingUpdater(train.solver, scaling.loss, train.feed).update().updated


def test_the_same_scale_is_taken_from_loops_that_divide_nothing_of_it() -> None:
    train = training()

    def feed() -> None:
        """Something else is trained within nnabla's loop, too."""
        train.feed()
        other.forward()
        other.backward(8.0)
        train.solver.zero_grad()

    other = AdaptiveLossScaling(train.loss)
    expected = steps(train, DynamicLossScalingUpdater(train.solver, train.loss, feed).update)
    train = training()
    updater = WithoutDivision(train.solver, AdaptiveLossScaling(train.loss), train.feed)
    assert_close(steps(train, updater.update), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("weight", [2.0**-100, 2.0**60])
def test_a_scale_is_tried_where_a_large_loss_weight_is_made_up_for(weight: float) -> None:
    loss = mlp() * weight
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16", float_tail=True))
    settle(scaling, clear=False)
    expected = gradients()
    zero_grads()
    scaling.probe(2.0**4 / min(weight, 1.0))
    assert_close(gradients(), expected, rtol=2e-2, atol=2e-3 * weight)


def test_a_graph_that_its_emulation_has_read_is_read_again_where_it_has_changed() -> None:
    x = nn.Variable((2, 5))
    loss = two_layers(x)
    emulation = FormatEmulation(loss, "float16")
    scaling = AdaptiveLossScaling(emulation)
    assert scaling.graph is emulation.graph
    x.reset_shape((4, 5), True)
    loss.forward()
    scaling = AdaptiveLossScaling(emulation)
    assert scaling.graph is not emulation.graph
    assert (4, 5) in scaling.graph.described.shapes
    emulation = FormatEmulation(loss, "float16")
    scaling.graph.leaves[scaling.plan.leaves[0]].need_grad = False
    scaling = AdaptiveLossScaling(emulation)
    assert scaling.graph is not emulation.graph
    assert len(scaling.plan.leaves) == 3


def test_scales_are_those_of_the_last_backward_although_the_graph_was_rewired() -> None:
    x = data(4, 3)
    a = F.tanh(PF.affine(x, 5, name="a"))
    h = PF.affine(a, 2, name="b")
    scaling = AdaptiveLossScaling(F.mean(h**2) * 1e-9)
    settle(scaling)
    scales = [scaling.scale_of(v) for v in (a, h)]
    z = PF.affine(F.tanh(PF.affine(x, 5, name="q")), 5, name="d")
    a.rewire_on(z)
    scaling.guard.begin_batch(first=True, repeat=True)
    scaling.forward(clear_no_need_grad=True)
    assert scaling.scale_of(h) == scales[1]
    with pytest.raises(KeyError, match="no gradient"):
        scaling.scale_of(z)
