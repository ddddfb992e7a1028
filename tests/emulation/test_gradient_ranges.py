# SPDX-License-Identifier: Apache-2.0
"""A component of gradients in several formats reaches as far as the narrowest of them."""

from __future__ import annotations

from typing import Dict, Set

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss import AdaLossConfig, FormatEmulation, GraphPlan
from nnabla_adaloss.emulation.gradient_ranges import GradientRanges


@pytest.mark.parametrize("narrow", ["a", "b", "c"])
def test_the_narrowest_format_of_a_component_is_its_range(narrow: str) -> None:
    with nn.parameter_scope("", {}):
        h = nn.Variable((2, 3), need_grad=True)
        # The sums connect what follows several layers.
        for name in "abc":
            h = h + F.tanh(PF.affine(h, 3, name=name))
        loss = F.mean(h)
        storage = {f"{narrow}/*": "float8_e4m3", "*": "float16"}
        emulated = FormatEmulation(loss, storage).emulated_storage
        plan = GraphPlan(loss)
    ranges = GradientRanges(AdaLossConfig(), emulated, plan)
    components = plan.structure.components(by_layer=True)
    found: Dict[int, Set[float]] = {}
    for position, index in components.of.items():
        single = index in components.single
        u_max = ranges.u_max_single(position) if single else ranges.of(position).u_max
        found.setdefault(index, set()).add(u_max)
    assert any(len(each) > 1 for each in found.values())
    assert ranges.of_components(components) == {index: min(each) for index, each in found.items()}
