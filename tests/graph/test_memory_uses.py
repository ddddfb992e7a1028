# SPDX-License-Identifier: Apache-2.0
"""Functions that nnabla computes on the host, as it has no CUDA implementation for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Callable, List, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.memory_uses import host_functions, numbers_on_host
from nnabla_adaloss.graph.plan import GraphPlan

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
def test_functions_on_the_host_and_the_arrays_that_they_move(
    network: Callable[[], nn.Variable],
    without: Sequence[str],
    backend: List[str],
    moved: List[Tuple[str, int]],
) -> None:
    plan = GraphPlan(network())
    described = plan.described._replace(backends=[backend] * len(plan.labels))
    classes = ["CpuCachedArray" if name in without else "CudaCachedArray" for name in described.type_names]
    made = [SimpleNamespace(context=nn.Context(backend, array_class, "0")) for array_class in classes]
    found = host_functions(described, numbers_on_host(described, made))
    assert [(described.type_names[number], size) for number, size in found.items()] == moved
    assert "CUDA" not in str(plan)


def test_nnabla_tells_by_the_array_class_where_a_function_runs() -> None:
    with nn.context_scope(nn.Context(FLOAT, "CudaCachedArray", "0")):  # of which it has nothing here
        graph = Graph(branches())
    assert {f.context.array_class[:3] for f in graph.functions} == {"Cpu"}
    last = str(GraphPlan(graph)).splitlines()[-1]
    assert last.startswith("on the host, for lack of a CUDA implementation: fc/affine (")
