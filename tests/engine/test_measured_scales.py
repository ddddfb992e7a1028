# SPDX-License-Identifier: Apache-2.0
"""Backward without a scale: no bit of a gradient changes, and each component has what it has room for."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    AmaxHistory,
    FormatEmulation,
)
from nnabla_adaloss.engine.passes.backward_pass import BackwardPass
from nnabla_adaloss.engine.schedule import Rescale
from tests.engine.random_graphs import Network, assert_same_above_subnormals, build, networks
from tests.engine.test_architectures import NETWORKS
from tests.engine.test_bit_identity import bits
from tests.updaters.test_overflow import Gate

METHODS = ("approx_range", "amax_history")
UNDERFLOWING = ["one_of_many_outputs", "tied", "squared", "squared", "add"]


def in_fp32(method: str, delay: int = 0) -> AdaLossConfig:
    """Scales for float16's range, in which nothing is stored: no gradient is rounded."""
    return AdaLossConfig(
        loss_scale_method=method, dtype="float32", u_max=65504.0, u_min=2.0**-24, delay=delay
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    networks,
    st.sampled_from(METHODS),
    st.sampled_from([0, 1]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([1.0, 2.0**-20]),
)
# Gradients of float32's subnormal range.
@example(build(2313, UNDERFLOWING, input_gradient=True), "approx_range", 0, False, 1, 1.0)
def test_no_bit_changes(
    network: Network, method: str, delay: int, clear_buffer: bool, accum_grad: int, weight: float
) -> None:
    loss = network.loss * weight
    scaling = AdaptiveLossScaling(loss, in_fp32(method, delay))

    def run(backward: Callable[[], None]) -> Dict[str, np.ndarray]:
        # What a user has in the gradients stays there.
        for leaf in network.leaves.values():
            leaf.grad.zero() if leaf.ndim > 1 else leaf.grad.fill(0.5)
        for _ in range(accum_grad):
            loss.forward(clear_no_need_grad=clear_buffer)
            backward()
        return {name: leaf.g.copy() for name, leaf in network.leaves.items()}

    native = run(lambda: loss.backward(1.0, clear_buffer=clear_buffer))
    for _ in range(3):
        found = run(lambda: scaling.backward(clear_buffer=clear_buffer))
        for name in network.leaves:
            assert_same_above_subnormals(bits(found[name]), bits(native[name]), name)


def mlp(depth: int = 3, batch: int = 8, width: int = 8) -> nn.Variable:
    rng = np.random.RandomState(0)
    h = nn.Variable.from_numpy_array(rng.randn(batch, width).astype(np.float32))
    for index in range(depth):
        h = F.tanh(PF.affine(h, width, name=f"layer{index}", rng=rng))
    return F.mean(h**2)


def step(scaling: AdaptiveLossScaling, *scale: float, **options: Any) -> Dict[str, np.ndarray]:
    for v in nn.get_parameters().values():
        v.grad.zero()
    scaling.forward()
    scaling.backward(*scale, **options)
    return {name: v.g.copy() for name, v in nn.get_parameters().items()}


def test_what_overflows_in_a_leaf_hides_nothing() -> None:
    """An infinity in the gradient of an input beside one in a bias's, while the output gradient is finite."""
    x = nn.Variable((64, 8), need_grad=True)
    x.d = 1.0
    loss = F.sum(PF.affine(x, 8, name="a", rng=np.random.RandomState(0)))
    config = AdaLossConfig(loss_scale_method="amax_history")
    scaling = AdaptiveLossScaling(FormatEmulation(loss), config)
    step(scaling, 1.0)
    nn.get_parameters()["a/affine/W"].d *= 64.0
    found = step(scaling, 2.0**11)
    assert np.isinf(x.g).any()
    assert np.isinf(found["a/affine/b"]).all()
    assert scaling.found_inf == ["a/affine"]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_no_bit_of_known_architectures_changes(network: str, method: str, delay: int) -> None:
    loss = NETWORKS[network]()
    buffers = [(v, v.d.copy()) for v in nn.get_parameters(grad_only=False).values() if not v.need_grad]

    def run(backward: Callable[[], None]) -> Dict[str, np.ndarray]:
        for v, value in buffers:
            v.d = value
        for v in nn.get_parameters().values():
            v.grad.zero()
        loss.forward(clear_no_need_grad=True)
        backward()
        return {name: v.g.copy() for name, v in nn.get_parameters().items()}

    expected = run(lambda: loss.backward(1.0, clear_buffer=True))
    scaling = AdaptiveLossScaling(loss, in_fp32(method, delay))
    for _ in range(3):
        found = run(lambda: scaling.backward(clear_buffer=True))
        for name, gradient in expected.items():
            np.testing.assert_array_equal(bits(found[name]), bits(gradient), err_msg=name)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_no_bit_changes_with_losses_of_any_weight(method: str, delay: int) -> None:
    x = nn.Variable.from_numpy_array(np.random.RandomState(1).randn(6, 8).astype(np.float32))
    h = F.tanh(PF.affine(x, 8, name="trunk", rng=np.random.RandomState(0)))
    heads = [PF.affine(h, 4, name=name, rng=np.random.RandomState(2)) for name in "ab"]
    loss = F.mean(heads[0] ** 2) + 1e-8 * F.sum(F.sigmoid(heads[1])) + 1e-3 * F.mean(h**2)
    loss.forward()
    for v in nn.get_parameters().values():
        v.grad.zero()
    loss.backward(1.0)
    expected = {name: v.g.copy() for name, v in nn.get_parameters().items()}
    scaling = AdaptiveLossScaling(loss, in_fp32(method, delay))
    for _ in range(4):
        found = step(scaling)
    for name, gradient in expected.items():
        np.testing.assert_array_equal(bits(found[name]), bits(gradient), err_msg=name)


def batch(scaling: AdaptiveLossScaling) -> int:
    """One iteration of a training loop of one's own: how often the batch was repeated."""
    iteration, repeats = scaling.iteration, 0
    step(scaling, iteration=iteration)
    while scaling.found_inf or not scaling.settled:
        if scaling.found_inf:
            assert scaling.after_overflow()
        repeats += 1
        assert repeats < 40
        step(scaling, again=True, iteration=iteration)
    scaling.after_update()
    return repeats


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_each_component_fills_the_range_but_for_the_margin(method: str, delay: int, storage: str) -> None:
    loss = mlp() * 1e-4
    config = AdaLossConfig(loss_scale_method=method, delay=delay)
    scaling = AdaptiveLossScaling(FormatEmulation(loss, storage), config)
    batch(scaling)
    # Scales that an overflow held down are chosen anew.
    assert sum(batch(scaling) for _ in range(3)) <= 1 - delay
    policy, components = scaling.components.policy, scaling.components
    amaxes = components.amaxes()
    # All but the loss itself, whose gradient is 1.
    assert set(amaxes) == set(scaling.plan.structure.components(by_layer=True).names[1:])
    u_max = scaling.config.range.u_max
    for name, amax in amaxes.items():
        scale = components.scale(name)
        assert scale == policy.scale(amax, u_max=components.u_max(name))
        if scale < policy.max_scale:
            assert components.u_max(name) / (2.0 * policy.margin) < scale * amax
        assert scale * amax <= components.u_max(name) / policy.margin
        assert components.u_max(name) >= u_max


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("network", ["transformer_block", "u_net", "dense_block", "unrolled_lstm"])
def test_branches_carry_one_scale_where_they_meet(
    network: str, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = NETWORKS[network]()
    scaling = AdaptiveLossScaling(loss, in_fp32("amax_history", delay))
    step(scaling)
    step(scaling)
    brought: List[Rescale] = []
    structure = scaling.plan.structure
    scalars = {p for p in structure.gradients if np.prod(structure.described.shapes[p]) == 1}
    # What a single element could not carry is added where it has been spread.
    spread = {position for node in structure.nodes if node.separates for position in node.inputs}
    real = BackwardPass.rescale

    def rescale(running: BackwardPass, rescales: Sequence[Rescale]) -> None:
        brought.extend(one for one in rescales if one.position not in scalars | spread)
        real(running, rescales)

    monkeypatch.setattr(BackwardPass, "rescale", rescale)
    # A hook, so that each gradient is brought to its scale where it is.
    step(scaling, function_post_hook=lambda f: None)
    assert not brought
    assert scaling.layer_scales
    steps = scaling.result.schedule.steps.values()
    everywhere = [one for s in steps for one in (*s.before, *s.after)]
    assert all(one.position in scalars | spread for one in everywhere)


@pytest.mark.parametrize("delay", [0, 1])
def test_an_overflow_lowers_the_component_where_it_is(delay: int) -> None:
    nn.clear_parameters()
    gates: Dict[str, Gate] = {}
    x = nn.Variable.from_numpy_array(np.random.RandomState(1).randn(8, 8).astype(np.float32))
    h = x
    for name in "abc":
        gates[name] = Gate()
        h = F.tanh(gates[name](PF.affine(h, 8, name=name, rng=np.random.RandomState(0))))
    config = AdaLossConfig(loss_scale_method="amax_history", delay=delay, measure_every=1)
    scaling = AdaptiveLossScaling(FormatEmulation(F.mean(h**2)), config)
    for _ in range(3):
        step(scaling)
        scaling.after_update()
    names = scaling.plan.structure.components(by_layer=True).names
    before = {name: scaling.components.scale(name) for name in names}
    gates["b"].first = 2.0**10
    step(scaling)
    assert scaling.found_inf
    assert scaling.after_overflow()
    after = {name: scaling.components.scale(name) for name in names}
    hit, *behind = [name for name in names if after[name] != before[name]]
    assert after[hit] == before[hit] / 16.0
    components = scaling.plan.structure.components(by_layer=True)
    # A pass that overflows says nothing about what is behind: gradients have mostly grown there, too.
    assert behind == names[names.index(hit) + 1 :]
    assert all(after[name] == before[name] / 16.0 for name in behind)
    (layer,) = [n for n in scaling.plan.nodes.values() if n.label == scaling.found_inf[0] == "b/affine"]
    assert hit == components.names[components.producers[layer.number]]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_what_was_silent_is_seen_when_it_speaks(method: str, delay: int) -> None:
    """Gradients that are zero at first, behind a gate, and small later."""
    gate = nn.Variable((1,))
    x = nn.Variable.from_numpy_array(np.random.RandomState(1).randn(8, 8).astype(np.float32))
    h = F.tanh(PF.affine(x, 8, name="a", rng=np.random.RandomState(0)))
    loss = F.sum(F.reshape(F.mean(PF.affine(h, 8, name="b", rng=np.random.RandomState(0)) ** 2), (1,)) * gate)
    config = AdaLossConfig(loss_scale_method=method, delay=delay)
    scaling = AdaptiveLossScaling(FormatEmulation(loss), config)

    gate.d = 0.0
    assert [batch(scaling) for _ in range(3)][1:] == [0, 0]
    gate.d = 1e-6
    assert batch(scaling) <= 2
    assert batch(scaling) == 0
    stored = {name: v.g.copy() for name, v in nn.get_parameters().items()}
    for v in nn.get_parameters().values():
        v.grad.zero()
    loss.forward()
    loss.backward(1.0)
    for name, v in nn.get_parameters().items():
        # The weight itself is a subnormal number of float16.
        np.testing.assert_allclose(stored[name], v.g, rtol=0.3, atol=0.1 * np.abs(v.g).max(), err_msg=name)


@pytest.mark.parametrize("on", ["one loss", "a graph for each batch"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_scalar_is_raised_no_further_than_it_fits(method: str, delay: int, on: str) -> None:
    """Many elements behind a mean ask for a scale at which the mean's own gradient would not fit."""
    config = AdaLossConfig(loss_scale_method=method, delay=delay)

    def build() -> AdaptiveLossScaling:
        return AdaptiveLossScaling(FormatEmulation(mlp(1, batch=512)), config)

    scaling = build()
    batch(scaling)
    for _ in range(3):
        if on != "one loss":
            before, scaling = scaling, build()
            scaling.go_on_from(before)
        assert batch(scaling) <= 1 - delay


def critic_on_two_batches(*sizes: Any) -> nn.Variable:
    """One network on two batches, of which one has gradients 2^10 times as large as the other."""
    random = np.random.default_rng(0)
    losses = []
    for size in sizes or (1.0, 2.0**-10):
        h = nn.Variable.from_numpy_array(random.standard_normal((16, 8), np.float32))
        for name in ("first", "second"):
            h = F.tanh(PF.affine(h, 8, name=name))
        losses.append(F.mean(PF.affine(h, 1, name="out") ** 2) * size)
    return losses[0] + losses[1]


@pytest.mark.parametrize("native", [False, True])
def test_a_weight_that_two_branches_read_counts_for_the_components_of_both(native: bool) -> None:
    # Nothing is trained, so gradients stay the same; a window of one entry forgets what the first pass saw.
    config = AdaLossConfig(AmaxHistory(window=1), dtype="float16", measure_every=3)
    with nn.context_scope(nn.Context(["cpu:half" if native else "cpu:float"])):
        loss = critic_on_two_batches() * 1e-3
    scaling = AdaptiveLossScaling(loss if native else FormatEmulation(loss, "float16"), config)
    batch(scaling)
    assert scaling.result.kind == "measuring"
    first = scaling.components.amaxes()
    for _ in range(9):
        assert batch(scaling) == 0
    assert scaling.result.kind != "measuring"
    measured = scaling.components.amaxes()
    assert measured.keys() == first.keys()
    for name, amax in measured.items():
        assert first[name] / 1.1 <= amax <= first[name] * 1.1


@pytest.mark.parametrize("grows", [0, 1])
def test_of_two_branches_with_the_same_weights_the_one_that_overflows_is_lowered(grows: int) -> None:
    sizes = [nn.Variable.from_numpy_array(np.array(size, np.float32)) for size in (1.0, 2.0**-10)]
    loss = FormatEmulation(critic_on_two_batches(*sizes) * 1e-3, "float16")
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(measure_every=3))
    for _ in range(4):
        batch(scaling)
    names = list(scaling.components.amaxes())
    before = {name: scaling.components.scale(name) for name in names}
    sizes[grows].d = sizes[grows].d * 2.0**6
    step(scaling, iteration=scaling.iteration)
    assert scaling.found_inf
    assert scaling.result.kind != "measuring"
    assert scaling.after_overflow()
    lowered = [name for name in names if scaling.components.scale(name) != before[name]]
    # From the mean of the branch that has grown, and nothing of the other.
    branch = ["Mean", "PowScalar", "Tanh", "Tanh"]
    assert [name.split("/")[2] for name in lowered] == [f"{name}#2" if grows else name for name in branch]


def with_attention() -> nn.Variable:
    """Softmax and means, between which gradients are larger than those of any layer."""
    rng = np.random.RandomState(0)
    x = nn.Variable.from_numpy_array(rng.randn(4, 8, 8).astype(np.float32))
    q, k, v = (PF.affine(x, 8, base_axis=2, name=name, rng=rng) for name in "qkv")
    h = F.batch_matmul(F.softmax(3.0 * F.batch_matmul(q, k, transpose_b=True)), v)
    h = F.mean(PF.affine(F.relu(h), 8, base_axis=2, name="out", rng=rng), axis=1)
    return F.mean(PF.affine(h, 3, name="top", rng=rng) ** 2)


@pytest.mark.parametrize("way", ["float", "emulated", "native"])
def test_every_gradient_counts_for_its_component_whether_a_layer_reads_it_or_not(way: str) -> None:
    # Nothing is trained, so gradients stay the same; a window of one entry forgets what the first pass saw.
    config = AdaLossConfig(AmaxHistory(window=1), dtype="float16", measure_every=3)
    backends = ["cpu:half", "cpu:float"] if way == "native" else ["cpu:float"]
    with nn.context_scope(nn.Context(backends, "CpuCachedArray", "0")):
        loss = with_attention()
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16") if way == "emulated" else loss, config)
    batch(scaling)
    for _ in range(9):
        assert batch(scaling) == 0
    assert scaling.result.kind != "measuring"
    measured, plan = scaling.components.amaxes(), scaling.plan
    components = plan.structure.components(by_layer=True)
    for v in nn.get_parameters().values():
        v.grad.zero()
    with nn.context_scope(nn.Context(["cpu:float"])):
        exact = with_attention()
    exact.forward()
    exact.backward(1.0)
    true = dict.fromkeys(components.names, 0.0)
    for position, v in zip(plan.structure.gradients, AdaptiveLossScaling(exact).plan.variables):
        name = components.names[components.of[position]]
        true[name] = max(true[name], float(np.abs(v.g).max()))
    for name, amax in measured.items():
        assert amax >= 0.9 * true[name], name


def test_maxima_of_branches_that_share_weights_stay_near_their_gradients_in_float() -> None:
    nn.clear_parameters()
    loss = critic_on_two_batches()
    solver = S.Sgd(1e-3)
    solver.set_parameters(nn.get_parameters())
    updater = AdaptiveLossScalingUpdater(solver, loss, config=AdaLossConfig(measure_every=1))
    updater.update()
    first = updater.scaling.components.amaxes()
    for _ in range(150):
        updater.update()
    for name, amax in updater.scaling.components.amaxes().items():
        assert first[name] / 16.0 <= amax <= 16.0 * first[name], name


def test_where_one_scale_is_for_all_it_is_searched_for_until_gradients_are_there() -> None:
    loss = mlp() * 1e-9
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16", float_tail=True), AdaLossConfig("fixed"))
    batch(scaling)
    assert all(v.g.any() for v in nn.get_parameters().values())
