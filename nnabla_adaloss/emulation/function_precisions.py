# SPDX-License-Identifier: Apache-2.0
"""Which precision each function and each variable of a graph has, where layers differ."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Optional, Sequence

from ..core.layer_precisions import LayerPrecisions, widest
from ..core.precision import Precision
from ..graph.matrix_products import is_matrix_product
from ..graph.names import function_names
from ..graph.plan import completed_names
from ..graph.reading import GraphReading

Names = Callable[[], Mapping[int, str]]
"""Tells the names of parameters, by variable key."""


def function_precisions(reading: GraphReading, precisions: LayerPrecisions, names: Names) -> List[Precision]:
    """The precision of each function, in forward order.

    Layers are the functions that read a parameter, and products of activations: patterns match their names.
    Every other function has the precision of the layers that it follows, and the widest of them where it
    follows several. What comes before all layers goes by its own name.

    Args:
        reading: the graph.
        precisions: those of layers.
        names: is called where layers differ.

    Raises:
        ValueError: a pattern decides about no layer.
    """
    if precisions.only is not None:
        return [precisions.only] * len(reading.functions)
    described = reading.description(completed_names(names(), reading))
    labels = function_names(described)
    # What each function hands on; None before all layers.
    followed: List[Optional[Precision]] = []
    found: List[Precision] = []
    matched: List[str] = []
    producers = described.inputs.by_function(described.producers)
    for index, positions in enumerate(described.inputs.by_function()):
        behind = [followed[producer] for producer in producers[index] if producer is not None]
        known = [precision for precision in behind if precision is not None]
        reads_parameter = not described.kept.keys().isdisjoint(positions)
        is_layer = reads_parameter or is_matrix_product(described.type_names[index])
        if known and not is_layer:
            own = widest(known)
        else:
            own = precisions.of(labels[index])
            matched.append(labels[index])
        found.append(own)
        followed.append(own if known or is_layer else None)
    precisions.check(matched)
    return found


def variable_precisions(reading: GraphReading, of_functions: Sequence[Precision]) -> Dict[int, Precision]:
    """The precision of each variable, by key: that of the function that computes it; of leaves that of the
    function that reads them, or the widest if several do.
    """
    described, keys = reading.described, reading.keys
    found: Dict[int, Precision] = {}
    for positions, precision in zip(described.outputs.by_function(), of_functions):
        found.update((keys[position], precision) for position in positions)
    readers: Dict[int, List[Precision]] = {}
    for positions, precision in zip(described.inputs.by_function(), of_functions):
        for position in positions:
            if position in reading.leaves:
                readers.setdefault(keys[position], []).append(precision)
    found.update((key, widest(precisions)) for key, precisions in readers.items())
    return found
