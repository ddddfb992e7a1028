# SPDX-License-Identifier: Apache-2.0
"""The gradients of a graph's leaves, as a pass finds them."""

from __future__ import annotations

from operator import attrgetter
from typing import Collection, List, Mapping, NamedTuple

import nnabla as nn

_gradient = attrgetter("grad")
_zeroing = attrgetter("zeroing")


class LeafArrays(NamedTuple):
    """Gradients of leaves: nnabla makes a new object for each that is asked for, so they are asked for once.

    Attributes:
        keys: keys of the leaves.
        arrays: the gradient of each.
        all_zero: whether all of them are lazily zero.
    """

    keys: Collection[int]
    arrays: List[nn.NdArray]
    all_zero: bool


def leaf_arrays(leaves: Mapping[int, nn.Variable]) -> LeafArrays:
    """The gradients of `leaves`, by key, as they are now.

    Example:
        >>> w = nn.Variable((2,), need_grad=True)
        >>> w.grad.zero()
        >>> leaf_arrays({hash(w): w}).all_zero
        True
    """
    arrays = list(map(_gradient, leaves.values()))
    return LeafArrays(leaves.keys(), arrays, all(map(_zeroing, arrays)))
