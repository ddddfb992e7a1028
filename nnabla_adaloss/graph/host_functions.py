# SPDX-License-Identifier: Apache-2.0
"""Functions of a network on a GPU that run on the host: nnabla has no CUDA implementation for them."""

from __future__ import annotations

import math
from typing import List, NamedTuple, Sequence

import nnabla as nn

from ..host_context import is_on_host
from .description import GraphDescription
from .functions import known


class HostFunction(NamedTuple):
    """A function that runs on the host, in a network on a GPU."""

    name: str
    type_name: str
    moved: int  # bytes per iteration between host and GPU: inputs, outputs, and their gradients

    def __str__(self) -> str:
        return f"{self.name} ({self.moved / 1e6:.3g} MB per iteration)"


def runs_on_host(context: nn.Context) -> bool:
    """Whether a function that was made for a GPU runs on the host, by its context after nnabla's setup."""
    wanted = {name.partition(":")[0] for name in context.backend}
    return bool(wanted & {"cuda", "cudnn"}) and is_on_host(context)


def host_functions(
    described: GraphDescription, contexts: Sequence[nn.Context], names: Sequence[str]
) -> List[HostFunction]:
    """The functions that run on the host though their context is a GPU's, which nnabla does silently."""
    # Arrays are moved in the type of the implementation. What goes from one such function to the next is not
    # moved. Not counted are gradients that go to the host because another branch has written them before.
    on_host = [runs_on_host(context) for context in contexts]
    read, written = described.inputs.by_function(), described.outputs.by_function()
    producers = described.inputs.by_function(described.producers)
    needs = described.inputs.by_function(described.needs)
    read_on_gpu = {p for positions, here in zip(read, on_host) if not here for p in positions}
    stays = {p for positions in read for p in positions} - read_on_gpu
    found = []
    for index, here in enumerate(on_host):
        if not here or known(described.type_names[index]).moves_nothing:
            continue
        # What has no producer and no gradient is data: it comes from the host.
        read_here = {*zip(read[index], producers[index], needs[index])}
        moved = [(p, need) for p, g, need in read_here if (need if g is None else not on_host[g])]
        moved += [(p, described.need_grads[index]) for p in written[index] if p not in stays]
        elements = sum(math.prod(described.shapes[p]) * (2 if need else 1) for p, need in moved)
        # Those of the host's implementation, the first that the context has.
        first = next((name for name in contexts[index].backend if name.startswith("cpu")), "")
        bytes_moved = elements * (2 if first.endswith(":half") else 4)
        found.append(HostFunction(names[index], described.type_names[index], bytes_moved))
    return found
