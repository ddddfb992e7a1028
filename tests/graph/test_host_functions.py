# SPDX-License-Identifier: Apache-2.0
"""Which functions run on the host in a network on a GPU, and what that moves."""

from __future__ import annotations

from typing import Callable, List, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss.graph.host_functions import host_functions, runs_on_host
from nnabla_adaloss.graph.plan import GraphPlan

FLOAT = ["cudnn:float", "cuda:float", "cpu:float"]
Moved = Tuple[str, int]
HALF = ["cudnn:half", "cudnn:float", "cuda:half", "cuda:float", "cpu:float"]


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


def on_gpu(network: Callable[[], nn.Variable], without: Sequence[str], backend: List[str]) -> List[Moved]:
    """What is moved in a network, where nnabla has no CUDA implementation for some functions."""
    nn.clear_parameters()
    plan = GraphPlan(network())
    described, labels = plan.structure.described, plan.structure.labels
    classes = ["CpuCachedArray" if name in without else "CudaCachedArray" for name in described.type_names]
    contexts = [nn.Context(backend, array_class, "0") for array_class in classes]
    return [(f.type_name, f.moved) for f in host_functions(described, contexts, labels)]


# Data and gradient of each array, 4 bytes an element: the host computes in float in both contexts.
@pytest.mark.parametrize("backend", [FLOAT, HALF])
@pytest.mark.parametrize(
    ("network", "without", "moved"),
    [
        (pooled, ["GlobalAveragePooling"], [("GlobalAveragePooling", 8 * (512 + 8))]),
        (divergence, ["KLMultinomial", "Constant"], [("KLMultinomial", 8 * (10 + 2))]),
        (branches, ["Sink"], []),
        (pooled, [], []),
    ],
)
def test_three_networks(
    network: Callable[[], nn.Variable], without: List[str], moved: List[Moved], backend: List[str]
) -> None:
    assert on_gpu(network, without, backend) == moved


def test_what_goes_from_one_to_the_next_is_not_moved() -> None:
    # One reads the activation, the other is read; of each the data and the gradient.
    moved = on_gpu(twice_on_the_host, ["Mod2", "Constant"], FLOAT)
    assert moved == [("Mod2", 8 * 10), ("Mod2", 8 * 10)]


def test_half_is_moved_where_the_host_computes_in_half() -> None:
    moved = on_gpu(pooled, ["GlobalAveragePooling"], ["cuda:half", "cpu:half", "cpu:float"])
    assert moved == [("GlobalAveragePooling", 4 * 520)]


@pytest.mark.parametrize("backend", [["cpu:float"], ["cpu:half", "cpu:float"], []])
def test_a_network_on_the_host_has_none(backend: List[str]) -> None:
    assert not runs_on_host(nn.Context(backend, "CpuCachedArray", "0"))
    assert on_gpu(pooled, ["GlobalAveragePooling"], backend) == []
    assert "CUDA" not in str(GraphPlan(pooled()))


def test_nnabla_tells_by_the_array_class_where_a_function_runs() -> None:
    with nn.context_scope(nn.Context(FLOAT, "CudaCachedArray", "0")):  # of which it has nothing here
        plan = GraphPlan(branches())
    assert [f.context.array_class[:3] for f in plan.functions] == ["Cpu"] * len(plan.functions)
    assert (
        str(plan).splitlines()[-1].startswith("on the host, for want of a CUDA implementation: fc/affine (")
    )
