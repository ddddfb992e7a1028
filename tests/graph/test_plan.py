# SPDX-License-Identifier: Apache-2.0
"""The plan: order, roles, names and fan-ins, and on a GPU, which functions run on the host."""

from __future__ import annotations

from typing import Callable, List, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss import AdaptiveLossScaling
from nnabla_adaloss.graph.host_functions import host_functions
from nnabla_adaloss.graph.plan import GraphPlan
from tests.worlds.random_graphs import Network, networks


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks)
def test_the_order_is_nnablas(network: Network) -> None:
    seen: List[int] = []
    network.loss.forward()
    network.loss.backward(function_pre_hook=lambda f: seen.append(hash(f)))
    assert list(GraphPlan(network.loss).nodes) == seen


def residual() -> nn.Variable:
    nn.clear_parameters()
    x = nn.Variable((2, 3, 8, 8))
    h = F.relu(PF.convolution(x, 4, (3, 3), pad=(1, 1), stride=(2, 2), name="stem"))
    h = h + PF.convolution(h, 4, (3, 3), pad=(1, 1), group=2, name="block")
    with nn.parameter_scope("head"):
        y = PF.affine(h, 5, name="fc")
    labels = F.constant(0, (2, 1))
    return F.mean(F.softmax_cross_entropy(y, labels)) * 0.5


def test_the_table_tells_roles_layers_and_fan_ins() -> None:
    table = str(AdaptiveLossScaling(residual()).plan).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table] == [
        ["MulScalar", "passed through (loss)"],
        ["Mean", "passed through (loss)"],
        ["SoftmaxCrossEntropy", "passed through (loss)"],
        ["Affine", "scaled", "head/fc/affine", "5", "64x5"],
        ["Add2", "passed through"],
        ["Convolution", "scaled", "block/conv", "18", "4x2x3x3"],
        ["ReLU", "passed through, fan-out"],
        ["Convolution", "passed through", "stem/conv"],
        ["Constant", "stop"],
    ]


# What nnabla has no CUDA implementation for, it computes on the host.

FLOAT = ["cudnn:float", "cuda:float", "cpu:float"]
HALF = ["cudnn:half", "cudnn:float", "cuda:half", "cuda:float", "cpu:float"]
HALF_ON_THE_HOST = ["cuda:half", "cpu:half", "cpu:float"]
HOST = ["cpu:half", "cpu:float"]
POOLING = "GlobalAveragePooling"


def pooled() -> nn.Variable:
    h = PF.convolution(nn.Variable((2, 3, 8, 8)), 4, (3, 3), pad=(1, 1), name="conv")
    return F.mean(PF.affine(F.global_average_pooling(F.relu(h)), 5, name="fc"))


def divergence() -> nn.Variable:
    p = F.softmax(PF.affine(nn.Variable((2, 3)), 5, name="fc"))
    return F.mean(F.kl_multinomial(p, F.constant(0.2, (2, 5))))


def branches() -> nn.Variable:
    h = PF.affine(nn.Variable((2, 3)), 5, name="fc")
    return F.sink(F.mean(h), F.mean(h**2), one_input_grad=True)


def twice_on_the_host() -> nn.Variable:
    h = F.relu(PF.affine(nn.Variable((2, 3)), 5, name="fc"))
    return F.mean(F.mod2(F.mod2(h, F.constant(1.0, (2, 5))), nn.Variable((2, 5))))


# Data and gradient of each array, in the type in which the host computes.
@pytest.mark.parametrize(
    ("network", "without", "backend", "moved"),
    [
        (pooled, [POOLING], FLOAT, [(POOLING, 8 * (512 + 8))]),
        (pooled, [POOLING], HALF, [(POOLING, 8 * (512 + 8))]),
        (pooled, [POOLING], HALF_ON_THE_HOST, [(POOLING, 4 * (512 + 8))]),
        (pooled, [POOLING], HOST, []),
        (pooled, [POOLING], [], []),
        (pooled, [], FLOAT, []),
        (divergence, ["KLMultinomial", "Constant"], FLOAT, [("KLMultinomial", 8 * (10 + 2))]),
        (branches, ["Sink"], FLOAT, []),
        # One reads the activation, the other is read: what goes between them is not moved.
        (twice_on_the_host, ["Mod2", "Constant"], FLOAT, [("Mod2", 8 * 10), ("Mod2", 8 * 10)]),
    ],
)
def test_what_runs_on_the_host_and_what_that_moves(
    network: Callable[[], nn.Variable],
    without: Sequence[str],
    backend: List[str],
    moved: List[Tuple[str, int]],
) -> None:
    plan = GraphPlan(network())
    described, labels = plan.structure.described, plan.structure.labels
    classes = ["CpuCachedArray" if name in without else "CudaCachedArray" for name in described.type_names]
    contexts = [nn.Context(backend, array_class, "0") for array_class in classes]
    assert [(f.type_name, f.moved) for f in host_functions(described, contexts, labels)] == moved
    assert "CUDA" not in str(plan)


def test_nnabla_tells_by_the_array_class_where_a_function_runs() -> None:
    with nn.context_scope(nn.Context(FLOAT, "CudaCachedArray", "0")):  # of which it has nothing here
        plan = GraphPlan(branches())
    assert [f.context.array_class[:3] for f in plan.functions] == ["Cpu"] * len(plan.functions)
    last = str(plan).splitlines()[-1]
    assert last.startswith("on the host, for want of a CUDA implementation: fc/affine (")
