# SPDX-License-Identifier: Apache-2.0
"""What to do about functions that are not finite at 0 or for large numbers."""

from __future__ import annotations

import math
from typing import FrozenSet, Sequence, Set

from ..numbers import FunctionNumbers, NetworkNumbers

# What may stand between a softmax and the logarithm of it.
_BETWEEN: FrozenSet[str] = frozenset(
    {"Reshape", "Transpose", "Slice", "Split", "RSubScalar", "AddScalar", "MulScalar", "GatherNd", "Mul2"}
)
# What may stand between an exponential and the division by a sum of such.
_SUMS: FrozenSet[str] = frozenset({"Sum", "Mean", "Broadcast", "BroadcastTo", "Reshape", "AddScalar"})


def remedy_of(f: FunctionNumbers, network: NetworkNumbers) -> str:
    """What to do about a function that computes what is not finite, or whose gradient is not."""
    functions = network.functions
    eps = f"2**{round(math.log2(network.tiny))}"
    away = "away from 0 by a number the storage can hold"
    if f.type_name == "Log":
        source = _source(f, functions)
        if source == "Softmax":
            return "use F.log_softmax for both, or F.softmax_cross_entropy of what the softmax reads"
        if source == "Sigmoid":
            return "use F.sigmoid_cross_entropy of what the sigmoid reads"
        return f"keep its input {away}: F.log(F.maximum_scalar(x, {eps}))"
    if f.type_name in ("Div2", "RDivScalar"):
        if f.type_name == "Div2" and "Exp" in _behind(f, functions, _SUMS):
            return "use F.softmax, which subtracts the largest number first"
        return f"keep the divisor {away}: add {eps} to it"
    if f.type_name == "PowScalar":
        return f"keep its input {away}: (x + {eps}) before the root"
    if f.type_name == "Exp":
        own = next((i for i, g in enumerate(functions) if g is f), None)
        if any(own in g.inputs and g.type_name == "Sum" for g in functions):
            return "use F.softmax, or F.log_softmax, which subtract the largest number first"
        return "bound its input: F.minimum_scalar(x, 10.0)"
    return "check its input: a logarithm, root or division at 0, or an exponential of a large number"


def _source(f: FunctionNumbers, functions: Sequence[FunctionNumbers]) -> str:
    """The type of the function that the input of `f` comes from, but for what rearranges it."""
    while f.inputs:
        f = functions[f.inputs[0]]
        if f.type_name not in _BETWEEN:
            return f.type_name
    return ""


def _behind(f: FunctionNumbers, functions: Sequence[FunctionNumbers], through: FrozenSet[str]) -> Set[str]:
    """The types of the functions that `f` reads, by way of functions of some types."""
    found: Set[str] = set()
    waiting = list(f.inputs)
    while waiting:
        g = functions[waiting.pop()]
        found.add(g.type_name)
        if g.type_name in through:
            waiting += g.inputs
    return found
