# SPDX-License-Identifier: Apache-2.0
"""A state knows its network, and one of version 0.1 gets the names that layers have now."""

from __future__ import annotations

import re
from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss.engine.saved_names import fingerprint, with_names_of
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


def of_0_1(made: GraphPlan) -> List[str]:
    """What version 0.1 saved of a network."""
    then = {now: before for before, now in made.labels_before().items()}
    return [
        f"{node.type_name} {then[node.label]} {'x'.join(map(str, node.outputs[0].shape))}"
        for node in made.nodes.values()
    ]


def state(network: List[str], layers: Dict[str, Any]) -> Dict[str, Any]:
    return {"network": network, "layers": layers, "limits": dict(layers), "iteration": 3}


def test_a_network_is_known_by_its_functions_and_parameters() -> None:
    assert fingerprint(plan()) == fingerprint(plan())
    assert fingerprint(plan())[1] == "Affine last/affine 3x3 3"
    assert fingerprint(plan()) != fingerprint(plan(features=4))


def test_the_state_of_this_network_is_taken_as_it_is() -> None:
    made = plan()
    given = state(fingerprint(made), {"any": 1})
    assert with_names_of(made, given) is given


def test_layers_of_version_0_1_are_renamed() -> None:
    made = plan()
    then = made.labels_before()
    moved = [before for before, now in then.items() if before != now]
    assert moved
    layers = {name: index for index, name in enumerate(then)}
    # The second operand of a product has a number behind its name.
    layers.update({f"{moved[0]}:1": 100, "unknown": 101, "unknown:1": 102})
    found = with_names_of(made, state(of_0_1(made), layers))
    expected = {then[name]: index for index, name in enumerate(then)}
    expected.update({f"{then[moved[0]]}:1": 100, "unknown": 101, "unknown:1": 102})
    assert found["layers"] == found["limits"] == expected
    assert found["iteration"] == 3


@pytest.mark.parametrize("names_of", [fingerprint, of_0_1])
def test_the_first_function_that_differs_is_named(names_of: Any) -> None:
    made, network = plan(), names_of(plan())
    theirs = [*network[:2], "Affine other 2x3", *network[3:]]
    with pytest.raises(
        ValueError,
        match=f"another network: it has Affine other 2x3 where this one has {re.escape(network[2])}",
    ):
        with_names_of(made, state(theirs, {}))
    with pytest.raises(ValueError, match=f"it has None where this one has {re.escape(network[-1])}"):
        with_names_of(made, state(network[:-1], {}))
    with pytest.raises(ValueError, match="it has more where this one has None"):
        with_names_of(made, state([*network, "more"], {}))
