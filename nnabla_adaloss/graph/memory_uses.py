# SPDX-License-Identifier: Apache-2.0
"""Uses of the memory of a graph's variables: when it is read and written, its origin, moves to the host."""

from __future__ import annotations

import math
from itertools import chain, compress
from typing import AbstractSet, Any, Dict, FrozenSet, List, NamedTuple, Optional, Sequence

import nnabla as nn

from ..host_context import has_gpu, is_on_host
from .description import GraphDescription
from .functions import hands_memory_on, properties_of, written_inputs


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
    read, written = described.inputs.by_function(), described.outputs.by_function()
    producers, never = described.inputs.by_function(described.producers), len(read)
    # First input and output of the functions that hand memory on.
    kinds = enumerate(zip(described.type_names, described.args))
    views = {index: (read[index][0], written[index][0]) for index, kind in kinds if hands_memory_on(*kind)}
    outputs = {p: index for index, own in enumerate(written) if index not in views for p in own}
    # Function that writes the memory of each variable, also through a view of it.
    writers = {**outputs}
    for index, (source, view) in views.items():
        if writers.get(source, never) < index:
            writers[view] = writers[source]
    # First function that reads each leaf, or other variable. A view is read when its output is; so from the
    # last function to the first, whose entry remains.
    readers: Dict[int, int] = {}
    readers_of_others: Dict[int, int] = {}
    for index in reversed(range(len(read))):
        reader = readers_of_others.get(views[index][1], never) if index in views else index
        for position, producer in zip(read[index], producers[index]):
            first = readers if producer is None else readers_of_others
            if reader <= first.get(position, never):
                first[position] = reader
    # A leaf that a function writes: the variable was cut off from the graph where it is read.
    cut_off = [p for p, reader in readers.items() if writers.get(p, never) < reader]
    with_gradient = {*compress(described.inputs.positions, described.needs)}
    trained = {p for p, (_, name) in described.kept.items() if name is not None} & with_gradient
    left_out = trained.union(cut_off)
    leaves = {p: reader for p, reader in readers.items() if p not in left_out}
    return MemoryUses(leaves, outputs, cut_off)


def state_leaves(described: GraphDescription) -> Dict[int, Optional[int]]:
    """Functions that write leaves in forward, by position; None for other leaves without gradient."""
    positions, producers = described.inputs.positions, described.producers
    uses = zip(positions, producers, described.needs)
    unwritten = [p for p, producer, need in uses if producer is None and not need]
    leaves: Dict[int, Optional[int]] = dict.fromkeys(unwritten)
    for index, (type_name, args) in enumerate(zip(described.type_names, described.args)):
        part = described.inputs.part(index)
        written = [part.start + number for number in sorted(written_inputs(type_name, args))]
        # A function that writes to `w.reshape(...)` writes to w. Optional inputs may be missing.
        origins = [origin_of(described, use) for use in written if use < part.stop]
        leaves.update((positions[use], index) for use in origins if producers[use] is None)
    return leaves


def runs_on_host(context: nn.Context) -> bool:
    """True if a function made for a GPU runs on the host, by its context after nnabla's setup."""
    return has_gpu(context.backend) and is_on_host(context)


def numbers_on_host(described: GraphDescription, functions: Sequence[Any]) -> FrozenSet[int]:
    """Numbers of the functions that run on the host although their context is a GPU's."""
    # Without a GPU no context has to be read from nnabla.
    if not has_gpu({*chain.from_iterable(described.backends)}):
        return frozenset()
    return frozenset(number for number, f in enumerate(functions) if runs_on_host(f.context))


def host_functions(described: GraphDescription, on_host: AbstractSet[int]) -> Dict[int, int]:
    """Bytes that an iteration moves between host and GPU, for each function that runs on the host."""
    # Arrays move in the implementation's dtype, but not between two such functions. Not counted: gradients
    # that move to the host because another branch has written them.
    read, written = described.inputs.by_function(), described.outputs.by_function()
    producers = described.inputs.by_function(described.producers)
    needs = described.inputs.by_function(described.needs)
    read_on_gpu = {p for index, positions in enumerate(read) if index not in on_host for p in positions}
    stays = {p for positions in read for p in positions} - read_on_gpu  # read on the host alone
    sizes = {}
    for index in sorted(on_host):
        if properties_of(described.type_names[index]).moves_nothing:
            continue
        # Positions, and whether the gradient moves, too. Leaves without one are data, from the host.
        moved = [
            (position, need)
            for position, producer, need in {*zip(read[index], producers[index], needs[index])}
            if (need if producer is None else producer not in on_host)
        ]
        moved += [(p, described.need_grads[index]) for p in written[index] if p not in stays]
        elements = sum(math.prod(described.shapes[p]) * (2 if need else 1) for p, need in moved)
        # The host's implementation: the first one in the context.
        first = next((name for name in described.backends[index] if name.startswith("cpu")), "")
        sizes[index] = elements * (2 if first.endswith(":half") else 4)
    return sizes
