# SPDX-License-Identifier: Apache-2.0
"""Names of functions: unique, the same when a network is built again, and patterns of themselves."""

from __future__ import annotations

from typing import Any, Callable, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from nnabla.core.module import Module

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, Graph, GraphPlan
from nnabla_adaloss.core.layer_selection import LayerSelection
from nnabla_adaloss.graph.names import function_names, registered_names
from tests.worlds.architectures import NETWORKS as ARCHITECTURES
from tests.worlds.networks import two_layers
from tests.worlds.trainings import updater_of


def names_of(loss: nn.Variable) -> List[str]:
    return function_names(Graph(loss).description(registered_names()))


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
    labels = {node.label for node in plan.nodes}
    assert {"block0/attn/Softmax", "block1/ReLU"} <= labels


def test_a_function_between_two_scopes_belongs_to_the_one_before() -> None:
    h = PF.affine(F.relu(PF.convolution(nn.Variable((2, 1, 6, 6)), 3, (3, 3), name="conv")), 4, name="fc")
    assert names_of(F.mean(h)) == ["conv/conv", "conv/conv/ReLU", "fc/affine", "fc/affine/Mean"]


def test_the_last_relu_of_a_residual_block_belongs_to_its_own_block() -> None:
    def block(h: nn.Variable, name: str) -> nn.Variable:
        with nn.parameter_scope(name):
            inner = F.relu(PF.convolution(h, 3, (3, 3), pad=(1, 1), name="conv1"))
            return F.relu(h + PF.convolution(inner, 3, (3, 3), pad=(1, 1), name="conv2"))

    found = names_of(F.mean(block(block(nn.Variable((2, 3, 4, 4)), "block1"), "block2")))
    assert [name for name in found if "ReLU" in name or "Add2" in name] == [
        "block1/ReLU",
        "block1/conv2/conv/Add2",
        "block1/conv2/conv/ReLU",
        "block2/ReLU",
        "block2/conv2/conv/Add2",
        "block2/conv2/conv/ReLU",
    ]


def test_a_function_without_any_name_is_named_after_its_type() -> None:
    h = nn.Variable((2, 3), need_grad=True)
    assert names_of(F.tanh(F.tanh(h))) == ["Tanh", "Tanh#2"]
    weight = nn.Variable((3, 3), need_grad=True)
    assert names_of(F.affine(F.affine(h, weight), weight)) == ["Affine", "Affine#2"]


def test_functions_of_a_weight_belong_to_its_layer() -> None:
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
    """A convolution that no registry knows."""

    def call(self, x: nn.Variable) -> nn.Variable:
        return PF.convolution(x, 4, (3, 3), pad=(1, 1), name="own")


class Towers(Module):  # type: ignore[misc]
    """Modules within a module."""

    def __init__(self) -> None:
        self.lower, self.upper = Tower(), Tower()

    def call(self, x: nn.Variable) -> nn.Variable:
        return F.mean(self.upper(F.relu(self.lower(x))) ** 2)


def test_layers_of_modules_are_named_by_the_solver_or_by_the_module() -> None:
    network, x = Towers(), nn.Variable((2, 1, 6, 6), need_grad=True)
    loss = network(x)
    assert nn.get_parameters() == {}
    updater = updater_of(loss, parameters=network.get_parameters())
    layers = AdaptiveLossScaling(network(x), parameters=network.get_parameters()).layers
    assert updater.scaling.layers == layers == ["@upper/own/conv", "@lower/own/conv"]
    assert AdaptiveLossScaling(network(x)).layers == ["Convolution#2", "Convolution"]


@pytest.mark.parametrize("build", [*ARCHITECTURES.values(), transformer], ids=lambda build: build.__name__)
def test_names_are_unique_stable_and_patterns(build: Callable[[], nn.Variable]) -> None:
    def selected(**options: Any) -> List[str]:
        return GraphPlan(build(), LayerSelection(**options)).layers

    first, layers = names_of(build()), selected()
    assert first == names_of(build())
    assert len(set(first)) == len(first)
    assert len(set(layers)) == len(layers)
    for layer in layers:
        chosen = selected(include=(layer,))
        assert layer in chosen
        # The name of a product of two activations is that of both; with a number it is the second's.
        assert {name.partition(":")[0] for name in chosen} == {layer.partition(":")[0]}
        assert layer not in selected(exclude=(layer,))


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
