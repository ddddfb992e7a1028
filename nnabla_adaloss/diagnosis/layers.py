# SPDX-License-Identifier: Apache-2.0
"""Which gradients belong to which layer of a graph, and which layer every function belongs to."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, NamedTuple, Set

import nnabla as nn

from ..graph.plan import GraphPlan

_SOFTMAX: FrozenSet[str] = frozenset({"Softmax", "LogSoftmax"})
_PRODUCT: FrozenSet[str] = frozenset({"BatchMatmul", "Einsum"})
# What may stand between the scores of an attention and their softmax.
_BETWEEN: FrozenSet[str] = frozenset(
    {"Add2", "AddScalar", "MulScalar", "Mul2", "Div2", "Sub2", "Reshape", "Transpose", "Where", "MaskedFill"}
)


class Layer(NamedTuple):
    """A function with weights, or a product of activations.

    Attributes:
        name: its name.
        type_name: nnabla's type name of it.
        outputs: its outputs that some function reads, or that are the loss, by key; nnabla has no gradient
            for others, such as unused last states of an LSTM.
        weights: the leaves whose gradients it computes, by key; a weight with several uses belongs to the
            first.
    """

    name: str
    type_name: str
    outputs: Dict[int, nn.Variable]
    weights: Dict[int, nn.Variable]


def layers_of(plan: GraphPlan) -> List[Layer]:
    """The layers of a graph, in forward order."""
    found: List[Layer] = []
    taken: Set[int] = set()
    read = {*plan.readers, *map(hash, plan.roots)}
    for node in reversed(list(plan.nodes.values())):
        if not (node.scalings or node.leaves):
            continue
        weights = {key: v for key, v in zip(node.leaf_keys, node.leaves) if key not in taken}
        taken.update(weights)
        outputs = {key: v for key, v in zip(node.output_keys, node.outputs) if key in read}
        found.append(Layer(node.label, node.type_name, outputs, weights))
    return found


def nearest_layers(plan: GraphPlan) -> Dict[int, str]:
    """The layer that each function is or comes after, by function key; empty where there is none."""
    found: Dict[int, str] = {}
    for f in plan.functions:
        node = plan.nodes.get(hash(f))
        if node is not None and (node.scalings or node.leaves):
            found[hash(f)] = node.label
            continue
        before = [found[hash(v.parent)] for v in f.inputs if v.parent is not None]
        found[hash(f)] = next(filter(None, before), "")
    return found


def attention_scores(plan: GraphPlan) -> Set[int]:
    """Keys of the functions that compute scores for a softmax: products, and what is done to them."""
    leads: Set[int] = set()
    consumers: Dict[int, List[Any]] = {}
    for f in plan.functions:
        for v in f.inputs:
            if v.parent is not None:
                consumers.setdefault(hash(v.parent), []).append(f)
    for f in reversed(plan.functions):
        if f.info.type_name in _PRODUCT | _BETWEEN and any(
            c.info.type_name in _SOFTMAX or (hash(c) in leads and c.info.type_name in _BETWEEN)
            for c in consumers.get(hash(f), [])
        ):
            leads.add(hash(f))
    return {hash(f) for f in plan.functions if hash(f) in leads and f.info.type_name in _PRODUCT}
