# SPDX-License-Identifier: Apache-2.0
"""Backward without a scale: no bit of a gradient changes, and each component has what it has room for."""

from __future__ import annotations

from typing import Any, Callable, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AmaxHistory, FormatEmulation
from tests.worlds.networks import layers
from tests.worlds.passes import run
from tests.worlds.tampering import Gate
from tests.worlds.values import FLOAT, HALF, data

METHODS = ("approx_range", "amax_history")


def batch(scaling: AdaptiveLossScaling) -> int:
    """One iteration of a training loop of one's own: how often the batch was repeated."""
    iteration, repeats = scaling.iteration, 0
    run(scaling, iteration=iteration)
    while scaling.found_inf or not scaling.calibrated:
        if scaling.found_inf:
            assert scaling.after_overflow()
        repeats += 1
        assert repeats < 40
        run(scaling, rerun=True, iteration=iteration)
    scaling.after_update()
    return repeats


def amaxes_of(scaling: AdaptiveLossScaling) -> Dict[str, float]:
    """Largest magnitude of each component, with the loss weights of the last pass."""
    schedule = scaling.result.schedule
    weights = dict(zip(schedule.components.names, schedule.loss_weights))
    return {name: amax * weights[name] for name, amax in scaling.components.unit_amaxes().items()}


def room(scaling: AdaptiveLossScaling) -> Dict[str, Any]:
    """The scales that there is room for, by component."""
    planned = scaling._graph.current()
    found = scaling.components.limits(planned.components, planned.loss_weights(None), planned.u_maxes)
    return dict(zip(planned.components.names, found.limits))


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_each_component_fills_the_range_but_for_the_margin(method: str, delay: int, storage: str) -> None:
    loss = F.mean(layers(8, 8, 8, batch=8, width=8) ** 2) * 1e-4
    config = AdaLossConfig(loss_scale_method=method, delay=delay)
    scaling = AdaptiveLossScaling(FormatEmulation(loss, storage), config)
    batch(scaling)
    # Scales that an overflow held down are chosen anew.
    assert sum(batch(scaling) for _ in range(3)) <= 1 - delay
    policy, amaxes = scaling.components.policy, amaxes_of(scaling)
    graph, limits = scaling.result.schedule.components, scaling._graph.current().u_maxes
    # All but the loss itself, whose gradient is 1.
    assert set(amaxes) == set(graph.names[1:])
    scales, u_max = room(scaling), scaling.config.range.u_max
    for index, (name, limit) in enumerate(zip(graph.names[1:], limits[1:]), 1):
        scale, amax = scales[name], amaxes[name]
        assert scale == policy.scale(amax, u_max=limit)
        if scale < policy.max_scale:
            assert limit / (2.0 * policy.margin) < scale * amax
        assert scale * amax <= limit / policy.margin
        # Of a single element, 16 bits are stored at least.
        assert (limit > u_max) == (index in graph.scalar_components and storage.startswith("float8"))


@pytest.mark.parametrize("delay", [0, 1])
def test_an_overflow_lowers_the_component_where_it_is(delay: int) -> None:
    gates: Dict[str, Gate] = {}
    h = data(8, 8)
    for name in "abc":
        gates[name] = Gate()
        h = F.tanh(gates[name](PF.affine(h, 8, name=name, rng=np.random.RandomState(0))))
    config = AdaLossConfig(loss_scale_method="amax_history", delay=delay, measure_every=1)
    scaling = AdaptiveLossScaling(FormatEmulation(F.mean(h**2)), config)
    for _ in range(3):
        run(scaling)
        scaling.after_update()
    names = scaling.plan.components(by_layer=True).names
    before = room(scaling)
    gates["b"].first = 2.0**10
    run(scaling)
    assert scaling.found_inf
    assert scaling.after_overflow()
    after = room(scaling)
    hit, *behind = [name for name in names if after[name] != before[name]]
    assert after[hit] == before[hit] / 16.0
    # A pass that overflows says nothing about what is behind: gradients have mostly grown there, too.
    assert behind == names[names.index(hit) + 1 :]
    assert all(after[name] == before[name] / 16.0 for name in behind)
    assert scaling.found_inf[0] == "b/affine"
    assert hit == scaling.result.component


@pytest.mark.parametrize("on", ["one loss", "a graph for each batch"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_scalar_is_raised_no_further_than_it_fits(method: str, delay: int, on: str) -> None:
    """Many elements behind a mean ask for a scale at which the mean's own gradient would not fit."""
    config = AdaLossConfig(loss_scale_method=method, delay=delay)

    def build() -> AdaptiveLossScaling:
        return AdaptiveLossScaling(FormatEmulation(F.mean(layers(8, batch=512, width=8) ** 2)), config)

    scaling = build()
    batch(scaling)
    for _ in range(3):
        if on != "one loss":
            before, scaling = scaling, build()
            scaling.go_on_from(before)
        assert batch(scaling) <= 1 - delay


def critic_on_two_batches(*gates: Gate) -> nn.Variable:
    """One network on two batches, of which one has gradients 2^10 times as large as the other."""
    losses = []
    for seed, (size, gate) in enumerate(zip((1.0, 2.0**-10), gates or (Gate(), Gate()))):
        h = data(16, 8, seed=seed)
        for name in ("first", "second"):
            h = F.tanh(PF.affine(h, 8, name=name))
        losses.append(F.mean(gate(PF.affine(h, 1, name="out") ** 2)) * size)
    return (losses[0] + losses[1]) * 1e-3


def with_attention() -> nn.Variable:
    """Softmax and means, between which gradients are larger than those of any layer."""
    rng = np.random.RandomState(0)
    q, k, v = (PF.affine(data(4, 8, 8), 8, base_axis=2, name=name, rng=rng) for name in "qkv")
    h = F.batch_matmul(F.softmax(3.0 * F.batch_matmul(q, k, transpose_b=True)), v)
    h = F.mean(PF.affine(F.relu(h), 8, base_axis=2, name="out", rng=rng), axis=1)
    return F.mean(PF.affine(h, 3, name="top", rng=rng) ** 2)


@pytest.mark.parametrize(
    ("network", "way"),
    # In float, what two branches add to one weight at other scales is seen as a sum.
    [
        *((with_attention, way) for way in ("float", "emulated", "native")),
        *((critic_on_two_batches, way) for way in ("emulated", "native")),
    ],
)
def test_every_gradient_counts_for_its_component(network: Callable[[], nn.Variable], way: str) -> None:
    """Also where no layer reads it, or two branches read one weight."""
    # Nothing is trained, so gradients stay the same; a window of one entry forgets what the first pass saw.
    config = AdaLossConfig(AmaxHistory(window=1), dtype="float16", measure_every=3)
    with nn.context_scope(HALF if way == "native" else FLOAT):
        loss = network()
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16") if way == "emulated" else loss, config)
    batch(scaling)
    assert scaling.result.kind == "measuring"
    first = amaxes_of(scaling)
    assert sum(batch(scaling) for _ in range(9)) == 0
    assert scaling.result.kind != "measuring"
    plan, components = scaling.plan, scaling.result.schedule.components
    with nn.context_scope(FLOAT):
        exact = network()
    run(exact, 1.0)
    true: Dict[str, float] = {}
    variables = AdaptiveLossScaling(exact).graph.variables
    for position in plan.gradients:
        name = components.names[components.of[position]]
        true[name] = max(true.get(name, 0.0), float(np.abs(variables[position].g).max()))
    assert first.keys() == amaxes_of(scaling).keys()
    for name, amax in amaxes_of(scaling).items():
        assert 0.9 * max(true[name], first[name]) <= amax <= 1.1 * first[name], name


@pytest.mark.parametrize("grows", [0, 1])
def test_the_branch_that_overflows_is_lowered_though_another_has_its_weights(grows: int) -> None:
    gates = Gate(), Gate()
    loss = FormatEmulation(critic_on_two_batches(*gates), "float16")
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(measure_every=3))
    for _ in range(4):
        batch(scaling)
    names = list(amaxes_of(scaling))
    before = room(scaling)
    # The small branch has the scale of the other, which it shares weights with.
    gates[grows].factor = 2.0 ** (6 + 10 * grows)
    run(scaling, iteration=scaling.iteration)
    assert scaling.found_inf
    assert scaling.result.kind != "measuring"
    assert scaling.after_overflow()
    lowered = [name for name in names if room(scaling)[name] != before[name]]
    # From where the branch has grown, and nothing of the other.
    branch = ["Gate", "Tanh", "Tanh"]
    assert [name.split("/")[2] for name in lowered] == [f"{name}#2" if grows else name for name in branch]


def test_a_scale_for_all_is_one_at_which_gradients_are_nonzero() -> None:
    loss = F.mean(layers(8, 8, 8, batch=8, width=8) ** 2) * 1e-9
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16", float_tail=True), AdaLossConfig("fixed"))
    batch(scaling)
    assert all(v.g.any() for v in nn.get_parameters().values())
