# SPDX-License-Identifier: Apache-2.0
"""A state knows its network."""

from __future__ import annotations

import re

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from nnabla_adaloss.engine.saved_names import check_network, fingerprint

from nnabla_adaloss.graph.names import registered_names
from nnabla_adaloss.graph.plan import GraphPlan


def plan(features: int = 3, *, more: bool = False) -> GraphPlan:
    nn.clear_parameters()
    h = nn.Variable((2, 3))
    for _ in range(2):
        h = F.tanh(PF.affine(h, 3, name="twice"))
    h = PF.affine(
        F.batch_matmul(F.reshape(h, (1, 2, 3)), nn.Variable((1, 3, 3), need_grad=True)),
        features,
        2,
        name="last",
    )
    return GraphPlan(F.mean(F.tanh(h) if more else h), names=registered_names())


def test_a_network_is_known_by_its_functions_and_parameters() -> None:
    assert fingerprint(plan()) == fingerprint(plan())
    assert fingerprint(plan())[1] == "Affine last/affine 3x3 3"
    assert fingerprint(plan()) != fingerprint(plan(features=4))


def test_the_state_of_this_network_is_taken() -> None:
    made = plan()
    check_network(made, fingerprint(made))


def test_the_first_function_that_differs_is_named() -> None:
    made, network = plan(), fingerprint(plan())
    theirs = [*network[:2], "Affine other 2x3", *network[3:]]
    with pytest.raises(
        ValueError,
        match=f"another network: it has Affine other 2x3 where this one has {re.escape(network[2])}",
    ):
        check_network(made, theirs)
    with pytest.raises(ValueError, match=f"it has None where this one has {re.escape(network[-1])}"):
        check_network(made, network[:-1])
    with pytest.raises(ValueError, match="it has more where this one has None"):
        check_network(made, [*network, "more"])
