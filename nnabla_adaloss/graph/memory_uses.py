# SPDX-License-Identifier: Apache-2.0
"""Times at which memory of a graph's variables is read and written, and its origin."""

from __future__ import annotations

from itertools import compress
from typing import Dict, List, NamedTuple

from .description import GraphDescription
from .functions import hands_memory_on, written_inputs


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
    inputs, written, never = described.inputs, described.outputs, len(described.type_names)
    kinds = enumerate(zip(described.type_names, described.args))
    # First input and output of the functions that hand memory on.
    views = {
        index: (inputs.positions[inputs.part(index).start], written.positions[written.part(index).start])
        for index, (type_name, args) in kinds
        if hands_memory_on(type_name, args)
    }
    outputs = {p: index for p, index in zip(written.positions, written.functions) if index not in views}
    # Function that writes the memory of each variable, also through a view of it.
    writers = {**outputs} if views else outputs
    for index, (source, view) in views.items():
        if writers.get(source, never) < index:
            writers[view] = writers[source]
    # First function that reads each leaf, or other variable. A view is read when its output is; so from the
    # last use to the first, whose entry remains.
    readers: Dict[int, int] = {}
    readers_of_others: Dict[int, int] = {}
    for position, producer, index in list(zip(inputs.positions, described.producers, inputs.functions))[::-1]:
        reader = readers_of_others.get(views[index][1], never) if index in views else index
        first = readers if producer is None else readers_of_others
        if reader <= first.get(position, never):
            first[position] = reader
    # A leaf that a function writes: the variable was cut off from the graph where it is read.
    cut_off = [p for p, reader in readers.items() if writers.get(p, never) < reader]
    with_gradient = {*compress(inputs.positions, described.needs)}
    trained = {p for p, (_, name) in described.kept.items() if name is not None} & with_gradient
    left_out = trained.union(cut_off)
    leaves = {p: reader for p, reader in readers.items() if p not in left_out}
    return MemoryUses(leaves, outputs, cut_off)


def state_leaves(described: GraphDescription) -> Dict[int, bool]:
    """Leaves that may hold state, by position: all that forward writes, True, and others without gradient."""
    positions, producers = described.inputs.positions, described.producers
    uses = zip(positions, producers, described.needs)
    leaves = dict.fromkeys([p for p, producer, need in uses if producer is None and not need], False)
    for index, (type_name, args) in enumerate(zip(described.type_names, described.args)):
        part = described.inputs.part(index)
        written = [part.start + number for number in sorted(written_inputs(type_name, args))]
        # A function that writes to `w.reshape(...)` writes to w. Optional inputs may be missing.
        origins = [origin_of(described, use) for use in written if use < part.stop]
        leaves.update((positions[use], True) for use in origins if producers[use] is None)
    return leaves
