# SPDX-License-Identifier: Apache-2.0
"""Graphs that never run: of nnabla, and of numbers alone, as a plan has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List, Mapping, NamedTuple, Sequence

import hypothesis.strategies as st
import nnabla as nn

from nnabla_adaloss.core.components import Components, LayerInput, NodeStructure, ScaledInput, components_of
from nnabla_adaloss.graph import graph as read
from nnabla_adaloss.graph.plan import GraphPlan

SLOT = ScaledInput(0, 1, 1.0, 1.0)
KINDS = "layer", "layer", "sum", "clip", "clipping layer"


class Graph:
    """A graph of nnabla that never runs, with its components; variables go by themselves."""

    def __init__(self, loss: nn.Variable) -> None:
        self.graph = read.Graph(loss)
        self.structure = GraphPlan(self.graph)
        self.components = self.structure.components(by_layer=True)

    def position(self, v: nn.Variable) -> int:
        return self.graph.positions[hash(v)]

    def index(self, v: nn.Variable) -> int:
        return self.components.of[self.position(v)]


class Drawn(NamedTuple):
    """A graph: its functions in backward order, and how many elements each variable has, 2 for several."""

    nodes: Sequence[NodeStructure]
    sizes: Sequence[int]

    @property
    def structure(self) -> Any:
        """What of a structure a schedule looks at."""
        return SimpleNamespace(nodes=self.nodes)

    def components(self) -> Components:
        return components_of(self.nodes, self.sizes, by_layer=True)


def node(
    number: int,
    outputs: Sequence[int],
    inputs: Sequence[int],
    *,
    sizes: Mapping[int, int] = {},
    leaves: Sequence[int] = (),
    layers: Mapping[int, int] = {},
    clips: bool = False,
    at_loss: bool = False,
) -> NodeStructure:
    """A function; `sizes` has how many elements variables have that have not several, and `layers` the weight
    by which it multiplies the gradient of an input.
    """
    layer_inputs = tuple(
        LayerInput(f"f{number}:{target}", SLOT, target, factor, target in leaves, False)
        for target, factor in layers.items()
    )
    scalars = sizes.get(outputs[0]) == 1 and len(outputs) == 1
    return NodeStructure(
        number=number,
        type_name="Clip" if clips else "Product" if layers else "Sum",
        args={},
        label=f"f{number}",
        outputs=tuple(outputs),
        inputs=tuple(inputs),
        leaves=tuple(leaves),
        layer_inputs=layer_inputs,
        loss_section=at_loss,
        linear=not clips,
        own_references=False,
        half=False,
        separates=clips or (at_loss and scalars),
    )


@st.composite
def structures(draw: Any) -> Drawn:
    """Graphs with layers, branches that meet, functions of one element at the loss, and some that clip."""
    count = draw(st.integers(1, 7))
    readers: List[List[int]] = [[] for _ in range(count)]
    for position in range(1, count):
        # Backward comes to a function after all that read its output.
        readers[position] = draw(st.lists(st.integers(0, position - 1), min_size=1, max_size=3, unique=True))
    at_loss = draw(st.integers(0, min(count, 3)))
    # Behind the functions of one element at the loss everything has several.
    sizes = {p: 1 if p < at_loss else 2 for p in range(count)}
    nodes: List[NodeStructure] = []
    for position in range(count):
        inputs = [p for p in range(count) if position in readers[p]]
        weight, other = count + 2 * position, count + 2 * position + 1
        sizes.update({weight: 2, other: 2})
        kind = "at loss" if position < at_loss else draw(st.sampled_from(KINDS))
        layers, leaves = {}, []
        if kind.endswith("layer"):
            # What it multiplies may itself be a leaf; a product of two has a scale for each.
            leaves = [weight] if inputs else [weight, other]
            layers = dict.fromkeys((inputs or [other])[: draw(st.integers(1, 2))], weight)
        elif not inputs or draw(st.booleans()):
            leaves = [weight]
        nodes.append(
            node(
                count - position,
                [position],
                inputs,
                sizes=sizes,
                leaves=leaves,
                layers=layers,
                clips=kind.startswith("clip"),
                at_loss=kind == "at loss",
            )
        )
    return Drawn(nodes, [sizes[p] for p in range(3 * count)])
