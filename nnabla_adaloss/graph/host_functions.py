# SPDX-License-Identifier: Apache-2.0
"""Functions of a network on a GPU that run on the host for lack of a CUDA implementation."""

from __future__ import annotations

import math
from itertools import chain
from typing import AbstractSet, Any, Dict, FrozenSet, Sequence

import nnabla as nn

from ..host_context import is_on_host
from .description import GraphDescription
from .functions import properties_of

_GPU = "cuda", "cudnn"


def runs_on_host(context: nn.Context) -> bool:
    """True if a function made for a GPU runs on the host, by its context after nnabla's setup."""
    return any(name.startswith(_GPU) for name in context.backend) and is_on_host(context)


def numbers_on_host(described: GraphDescription, functions: Sequence[Any]) -> FrozenSet[int]:
    """Numbers of the functions that run on the host although their context is a GPU's."""
    # Without a GPU no context has to be read from nnabla.
    if not any(name.startswith(_GPU) for name in {*chain.from_iterable(described.backends)}):
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
        moved = []  # positions, and whether the gradient moves, too
        for position, producer, need in {*zip(read[index], producers[index], needs[index])}:
            # Leaves without gradient are data, which come from the host.
            from_gpu = need if producer is None else producer not in on_host
            if from_gpu:
                moved.append((position, need))
        moved += [(p, described.need_grads[index]) for p in written[index] if p not in stays]
        elements = sum(math.prod(described.shapes[p]) * (2 if need else 1) for p, need in moved)
        # The host's implementation: the first one in the context.
        first = next((name for name in described.backends[index] if name.startswith("cpu")), "")
        sizes[index] = elements * (2 if first.endswith(":half") else 4)
    return sizes
