# SPDX-License-Identifier: Apache-2.0
"""A component of gradients in several formats reaches as far as the narrowest of them."""

from __future__ import annotations

from typing import Dict, Set

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, Graph, GraphPlan, Precision
from nnabla_adaloss.engine.gradient_ranges import GradientRanges
from tests.emulation.networks import leaf


@pytest.mark.parametrize("narrow", ["a", "b", "c"])
def test_the_narrowest_format_of_a_component_is_its_range(narrow: str) -> None:
    h = leaf(np.zeros((2, 3)))
    # The sums connect what follows several layers.
    for name in "abc":
        h = h + F.tanh(PF.affine(h, 3, name=name))
    loss = F.mean(h)
    graph = Graph(loss)
    plan = GraphPlan(graph)

    def ranges_in(storage: Dict[str, str]) -> GradientRanges:
        return GradientRanges(AdaLossConfig(), FormatEmulation(loss, storage).emulated_storage, graph, plan)

    # A single element has 16 bits in any case.
    eight = ranges_in({f"{narrow}/*": "float8_e5m2", "*": "float8_e4m3"})
    assert eight.u_max_scalar(graph.positions[hash(loss)]) == 65504.0
    ranges = ranges_in({f"{narrow}/*": "float8_e4m3", "*": "float16"})
    components = plan.components(by_layer=True)
    found: Dict[int, Set[float]] = {}
    for position, index in components.of.items():
        scalars = index in components.scalars
        u_max = ranges.u_max_scalar(position) if scalars else ranges.of(position).u_max
        found.setdefault(index, set()).add(u_max)
    assert any(each == {448.0, 65504.0} for each in found.values())
    assert ranges.of_components(components) == {index: min(each) for index, each in found.items()}


def test_a_scaled_weight_stays_in_the_formats_of_its_own_layer() -> None:
    h = leaf(np.ones((2, 3)))
    for name in "abcd":
        h = F.tanh(PF.affine(h * 1e-2, 3, name=name, with_bias=False))
    for v in nn.get_parameters().values():
        v.d = 100.0
    # What layer c hands on is stored as what it reads, which is in the formats of layer b.
    storage = {"b/*": Precision("float16", "float8_e4m3"), "d/*": Precision("float8_e4m3", "float16")}
    emulation = FormatEmulation(F.mean(h) * 1e-6, {**storage, "*": "float16"})
    scaling = AdaptiveLossScaling(emulation, AdaLossConfig("fixed", fixed_loss_scale=16.0, delay=0))
    for again in (False, True):
        scaling.forward()
        scaling.backward(1.0, iteration=0, rerun=again)
    # 400 is in the range of float8_e4m3, 1600 is not: what c and d leave undone, b makes up for.
    assert [scaling.layer_scales[f"{name}/affine"] for name in "bcd"] == [64.0, 4.0, 4.0]
