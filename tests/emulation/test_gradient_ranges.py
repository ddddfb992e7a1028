# SPDX-License-Identifier: Apache-2.0
"""A component of gradients in several formats reaches as far as the narrowest of them."""

from __future__ import annotations

from typing import Dict, Set

import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, FormatEmulation, GraphPlan
from nnabla_adaloss.emulation.gradient_ranges import GradientRanges
from tests.emulation.networks import leaf


@pytest.mark.parametrize("narrow", ["a", "b", "c"])
def test_the_narrowest_format_of_a_component_is_its_range(narrow: str) -> None:
    h = leaf(np.zeros((2, 3)))
    # The sums connect what follows several layers.
    for name in "abc":
        h = h + F.tanh(PF.affine(h, 3, name=name))
    loss = F.mean(h)
    plan = GraphPlan(loss)

    def ranges_in(storage: Dict[str, str]) -> GradientRanges:
        return GradientRanges(AdaLossConfig(), FormatEmulation(loss, storage).emulated_storage, plan)

    # A single element has 16 bits in any case.
    eight = ranges_in({f"{narrow}/*": "float8_e5m2", "*": "float8_e4m3"})
    assert eight.u_max_single(plan.positions[hash(loss)]) == 65504.0
    ranges = ranges_in({f"{narrow}/*": "float8_e4m3", "*": "float16"})
    components = plan.structure.components(by_layer=True)
    found: Dict[int, Set[float]] = {}
    for position, index in components.of.items():
        single = index in components.single
        u_max = ranges.u_max_single(position) if single else ranges.of(position).u_max
        found.setdefault(index, set()).add(u_max)
    assert any(each == {448.0, 65504.0} for each in found.values())
    assert ranges.of_components(components) == {index: min(each) for index, each in found.items()}
