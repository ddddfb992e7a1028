# SPDX-License-Identifier: Apache-2.0
"""Names of functions: unique, the same when a network is built again, and patterns of themselves."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Callable, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import pytest
from nnabla.core.module import Module

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater, GraphPlan
from nnabla_adaloss.core import LayerSelection
from nnabla_adaloss.graph.names import function_names, named, registered_names
from tests.worlds.architectures import NETWORKS as ARCHITECTURES
from tests.worlds.networks import two_layers


def names_of(loss: nn.Variable, parameters: Any = None) -> List[str]:
    known = {**registered_names(), **named(parameters or {})}
    return function_names(GraphPlan.read(loss).description(known))


def attention(x: nn.Variable, width: int = 8) -> nn.Variable:
    q, k, v = (PF.affine(x, width, base_axis=2, name=name) for name in "qkv")
    weights = F.softmax(F.batch_matmul(q, k, transpose_b=True) * width**-0.5)
    return PF.affine(F.batch_matmul(weights, v), width, base_axis=2, name="out")


def transformer() -> nn.Variable:
    h = nn.Variable((2, 5, 8))
    for block in ("block0", "block1"):
        with nn.parameter_scope(block), nn.parameter_scope("attn"):
            h = h + attention(h)
        with nn.parameter_scope(block):
            h = h + PF.affine(F.relu(PF.affine(h, 16, base_axis=2, name="up")), 8, base_axis=2, name="down")
    return F.mean(h**2)


def test_functions_without_parameters_stand_in_the_scope_around_them() -> None:
    plan = GraphPlan(transformer())
    assert len(plan.layers) == 17
    attention = {"out/affine", "BatchMatmul#2", "BatchMatmul#2:1", "BatchMatmul", "BatchMatmul:1"}
    affine = {f"block{block}/{name}/affine" for block in "01" for name in ("up", "down")}
    # The first block's q, k and v read data, whose gradient is nobody's.
    first = {f"block1/attn/{name}/affine" for name in "qkv"}
    assert (
        set(plan.layers)
        == {f"block{block}/attn/{name}" for block in "01" for name in attention} | affine | first
    )
    labels = {node.label for node in plan.nodes.values()}
    assert {"block0/attn/Softmax", "block1/ReLU"} <= labels


def test_without_scopes_in_common_the_nearer_one_counts() -> None:
    h = PF.affine(F.relu(PF.convolution(nn.Variable((2, 1, 6, 6)), 3, (3, 3), name="conv")), 4, name="fc")
    assert names_of(F.mean(h)) == ["conv/conv", "conv/conv/ReLU", "fc/affine", "fc/affine/Mean"]


def test_without_any_name_it_is_the_type() -> None:
    h = nn.Variable((2, 3), need_grad=True)
    assert names_of(F.tanh(F.tanh(h))) == ["Tanh", "Tanh#2"]
    weight = nn.Variable((3, 3), need_grad=True)
    assert names_of(F.affine(F.affine(h, weight), weight)) == ["Affine", "Affine#2"]


def test_what_is_computed_from_a_weight_belongs_to_the_layer() -> None:
    h = nn.Variable((2, 3), need_grad=True)

    def normalized(w: nn.Variable) -> nn.Variable:
        return F.weight_normalization(w, PF.get_parameter_or_create("g", (3,), need_grad=True))

    y = PF.affine(h, 4, name="fc", with_bias=False, apply_w=normalized)
    assert sorted(names_of(y)) == ["fc/affine", "fc/affine/WeightNormalization"]
    # The layer keeps the bare name, whatever comes first in forward order.
    assert GraphPlan(y).layers == ["fc/affine"]


def test_a_parameter_that_a_layer_reads_as_its_data_names_nothing() -> None:
    state = PF.get_parameter_or_create("state/h", (2, 3))
    assert names_of(PF.affine(state, 4, name="fc")) == ["fc/affine"]


def test_names_of_users_that_look_like_numbers() -> None:
    h = nn.Variable((2, 3), need_grad=True)
    for name in ("a", "a#2", "a", "a"):
        with nn.parameter_scope(name):
            h = F.affine(h, PF.get_parameter_or_create("W", (3, 3)))
    assert names_of(h) == ["a", "a#2", "a#3", "a#4"]


class Tower(Module):  # type: ignore[misc]  # nnabla has no type hints
    """Convolutions that no registry knows."""

    def call(self, x: nn.Variable) -> nn.Variable:
        for name in ("first", "second"):
            x = F.relu(PF.convolution(x, 4, (3, 3), pad=(1, 1), name=name))
        return x


class Network2(Module):  # type: ignore[misc]
    """Modules within a module."""

    def __init__(self) -> None:
        self.left, self.right = Tower(), Tower()

    def call(self, x: nn.Variable) -> nn.Variable:
        return F.mean((self.left(x) + self.right(x)) ** 2)


MODULE_LAYERS = ["@left/second/conv", "@right/second/conv"]


def test_layers_of_modules_are_named_by_the_solver_or_by_the_module() -> None:
    network, x = Network2(), nn.Variable((2, 1, 6, 6))
    loss = network(x)
    assert nn.get_parameters() == {}
    solver = S.Sgd(0.1)
    solver.set_parameters(network.get_parameters())
    updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16")
    updater.update()
    assert sorted(updater.scaling.layers) == sorted(updater.scaling.layer_scales) == MODULE_LAYERS
    scaling = AdaptiveLossScaling(network(x), parameters=network.get_parameters())
    assert sorted(scaling.layers) == MODULE_LAYERS
    unnamed = AdaptiveLossScaling(network(x))
    assert sorted(unnamed.layers) == ["Convolution#2", "Convolution#4"]


def lstm() -> nn.Variable:
    x, h, c = nn.Variable((4, 2, 3)), nn.Variable((1, 1, 2, 5)), nn.Variable((1, 1, 2, 5))
    y, _, _ = PF.lstm(x, h, c, training=True)
    return F.mean(PF.affine(F.reshape(y, (8, 5)), 2, name="head") ** 2)


NETWORKS: Dict[str, Callable[[], nn.Variable]] = {
    **ARCHITECTURES,
    "transformer": transformer,
    "lstm cell": lstm,
}


def check(build: Callable[[], nn.Variable]) -> None:
    plan = GraphPlan(build())
    labels = [node.label for node in plan.nodes.values()]
    assert len(set(labels)) == len(labels)
    assert len(set(plan.layers)) == len(plan.layers)
    for layer in plan.layers:
        chosen = GraphPlan(build(), LayerSelection(include=(layer,))).layers
        assert layer in chosen
        # The name of a product of two activations is that of both; with a number it is the second's.
        assert {name.partition(":")[0] for name in chosen} == {layer.partition(":")[0]}
        assert layer not in GraphPlan(build(), LayerSelection(exclude=(layer,))).layers


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_names_are_unique_stable_and_patterns(name: str) -> None:
    def build() -> nn.Variable:
        with nn.parameter_scope("", OrderedDict(parameters)):
            loss = NETWORKS[name]()
            parameters.update(nn.get_parameters())
        return loss

    parameters: Dict[str, Any] = {}
    first, again = names_of(build(), parameters), names_of(build(), parameters)
    assert first == again
    assert len(set(first)) == len(first)
    check(NETWORKS[name])


def test_freezing_a_layer_renames_nothing() -> None:
    x = nn.Variable((2, 3))
    loss = F.mean(PF.affine(PF.affine(PF.affine(x, 3, name="a"), 3, name="a"), 3, name="b"))
    before = names_of(loss)
    for v in nn.get_parameters().values():
        v.need_grad = False
    assert names_of(loss) == before


def test_a_pattern_that_matches_no_layer_is_an_error_that_lists_the_names() -> None:
    loss = two_layers(nn.Variable((2, 3)))
    for config in (AdaLossConfig(include=("nosuch*",)), AdaLossConfig(exclude=("b/affine", "c"))):
        with pytest.raises(ValueError, match="matches no layer; the network's layers are b/affine"):
            AdaptiveLossScaling(loss, config).backward(8.0)
