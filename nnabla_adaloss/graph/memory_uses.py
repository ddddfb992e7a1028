# SPDX-License-Identifier: Apache-2.0
"""Times at which memory of a graph's variables is read and written, and its origin."""

from __future__ import annotations

from typing import Dict, List, NamedTuple

from .description import GraphDescription
from .functions import hands_memory_on


class MemoryUses(NamedTuple):
    """Uses of the memory of leaves and outputs: index of a function, by position."""

    # First function that reads the leaf, except trained parameters and `cut_off`.
    leaves: Dict[int, int]
    outputs: Dict[int, int]  # function that writes the output, except views of other memory
    cut_off: List[int]  # outputs that are also read as leaves, by later functions only


def origin_of(described: GraphDescription, use: int) -> int:
    """Find the input whose memory an input shares, such as a reshaped leaf, or the input itself."""
    producer = described.producers[use]
    while producer is not None and hands_memory_on(described.type_names[producer], described.args[producer]):
        use = described.inputs.part(producer).start
        producer = described.producers[use]
    return use


def memory_uses(described: GraphDescription) -> MemoryUses:
    """Find the uses of memory in a forward and backward pass."""
    kinds = map(hands_memory_on, described.type_names, described.args)
    read, written = described.inputs.by_function(), described.outputs.by_function()
    functions = list(zip(kinds, read, written, described.inputs.by_function(described.producers)))
    outputs: Dict[int, int] = {}
    # Includes views, whose memory is written at its first use.
    filled: Dict[int, int] = {}
    for index, (hands_on, inputs, results, _) in enumerate(functions):
        if not hands_on:
            outputs.update(dict.fromkeys(results, index))
            filled.update(dict.fromkeys(results, index))
        elif inputs[0] in filled:
            filled[results[0]] = filled[inputs[0]]
    never = len(functions)
    of_leaves: Dict[int, int] = {}
    of_others: Dict[int, int] = {}
    for index in reversed(range(never)):
        hands_on, inputs, results, producers = functions[index]
        at = of_others.get(results[0], never) if hands_on else index
        for position, producer in zip(inputs, producers):
            reads = of_leaves if producer is None else of_others
            reads[position] = min(reads.get(position, never), at)
    cut_off = [p for p, index in of_leaves.items() if filled.get(p, never) < index]
    trained = {p for p, need in zip(described.inputs.positions, described.needs) if need}
    left_out = {*cut_off, *(p for p in trained if described.kept.get(p, (0, None))[1] is not None)}
    leaves = {p: index for p, index in of_leaves.items() if p not in left_out}
    return MemoryUses(leaves, outputs, cut_off)
