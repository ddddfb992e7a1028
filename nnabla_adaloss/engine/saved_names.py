# SPDX-License-Identifier: Apache-2.0
"""Which network a saved state is of, and the names of its layers."""

from __future__ import annotations

from itertools import takewhile, zip_longest
from typing import Any, Dict, List, Mapping, Sequence

from ..graph.plan import GraphPlan


def fingerprint(plan: GraphPlan) -> List[str]:
    """Type, name, and shapes of the parameters of each function, in backward order.

    Batches of other sizes make no other network, nor do sentences of other lengths.
    """
    return [
        " ".join([node.type_name, node.label, *(_by(leaf.shape) for leaf in node.leaves)])
        for node in plan.nodes.values()
    ]


def with_names_of(plan: GraphPlan, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state` as one of this network; the layers of one that version 0.1 saved get the names they have now.

    Raises:
        ValueError: it is of another network.
        KeyError, TypeError, AttributeError: it is no state.
    """
    network, ours = list(state["network"]), fingerprint(plan)
    if network == ours:
        return state
    name_now = plan.labels_before()
    before = _of_0_1(plan, {now: before for before, now in name_now.items()})
    if network == before:
        return {**state, **{part: _renamed(state[part], name_now) for part in ("layers", "limits")}}
    known = max((ours, before), key=lambda names: _agreeing(network, names))
    theirs, mine = next((a, b) for a, b in zip_longest(network, known) if a != b)
    raise ValueError(f"state is of another network: it has {theirs} where this one has {mine}")


def _agreeing(network: List[str], names: List[str]) -> int:
    """How many functions agree before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(network, names)))


def _of_0_1(plan: GraphPlan, names: Mapping[str, str]) -> List[str]:
    """Type, name then, and shape of the output of each function."""
    return [
        f"{node.type_name} {names.get(node.label, node.label)} {_by(node.outputs[0].shape)}"
        for node in plan.nodes.values()
    ]


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _renamed(layers: Mapping[str, Any], name_now: Mapping[str, str]) -> Dict[str, Any]:
    found = {}
    for layer, values in layers.items():
        # The second operand of a product has a number behind the name of the function.
        label, colon, operand = layer.rpartition(":")
        if layer in name_now or label not in name_now:
            found[name_now.get(layer, layer)] = values
        else:
            found[f"{name_now[label]}{colon}{operand}"] = values
    return found
