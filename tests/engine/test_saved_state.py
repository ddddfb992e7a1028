# SPDX-License-Identifier: Apache-2.0
"""A state knows its network, and comes back in another process."""

from __future__ import annotations

import json
import re
from typing import Any

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from nnabla_adaloss.engine.saved_state import check_network, fingerprint, read_state, state_of
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


def loss() -> nn.Variable:
    x = nn.Variable((2, 3))
    x.d = 0.5
    return F.mean(PF.affine(F.tanh(PF.affine(x, 3, name="a")), 2, name="b") ** 2)


def trained(iterations: int, method: str) -> AdaptiveLossScaling:
    scaling = AdaptiveLossScaling(loss(), AdaLossConfig(loss_scale_method=method, measure_every=3))
    for _ in range(iterations):
        scaling.forward()
        scaling.backward()
        scaling.after_update()
    return scaling


def read(state: Any, scaling: AdaptiveLossScaling) -> Any:
    return read_state(state, scaling._graph)


@pytest.mark.parametrize("method", ["approx_range", "amax_history"])
@pytest.mark.parametrize("iterations", [0, 1, 3, 5])
def test_a_state_comes_back_wherever_in_a_cycle_it_was_saved(iterations: int, method: str) -> None:
    scaling = trained(iterations, method)
    state = state_of(scaling._graph.prepared(), scaling.components, scaling.iteration, 7)
    fresh = trained(0, method)
    found = read(json.loads(json.dumps(state)), fresh)
    assert (found.iteration, found.draws) == (iterations, 7)
    assert found.statistics.state(fresh.plan.structure.measured) == state["delayed"]
    assert found.cache.state_dict() == state["schedule"]
    fresh.components.load(found.measured)
    assert fresh.components.state_dict() == state["components"]
    assert bool(state["delayed"]) == (iterations > 0)
    # The graph itself goes on as it was, until all is taken over.
    assert fresh._graph.prepared().cache.schedule is None


@pytest.mark.parametrize("part", ["network", "delayed", "components", "schedule", "draws", "iteration"])
def test_a_state_without_a_part_is_damaged(part: str) -> None:
    scaling = trained(2, "approx_range")
    state = state_of(scaling._graph.prepared(), scaling.components, scaling.iteration, 0)
    del state[part]
    with pytest.raises(KeyError, match=part):
        read(state, scaling)
