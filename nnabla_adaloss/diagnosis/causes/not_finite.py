# SPDX-License-Identifier: Apache-2.0
"""Functions that compute infinities or NaNs from finite numbers, and what to do about them."""

from __future__ import annotations

import math
from typing import FrozenSet, List, Sequence, Set

from ..numbers import FunctionNumbers, NetworkNumbers
from .cause import Cause, Kind, count, place, subject

# A relative error at which a gradient is not worth having.
_USELESS = 0.5
# What may stand between a softmax and the logarithm of it.
_BETWEEN: FrozenSet[str] = frozenset(
    {"Reshape", "Transpose", "Slice", "Split", "RSubScalar", "AddScalar", "MulScalar", "GatherNd", "Mul2"}
)
# What may stand between an exponential and the division by a sum of such.
_SUMS: FrozenSet[str] = frozenset({"Sum", "Mean", "Broadcast", "BroadcastTo", "Reshape", "AddScalar"})


def not_finite(network: NetworkNumbers) -> List[Cause]:
    """What is not finite in fp32 either, in forward order; forward before backward."""
    suffers = not math.isfinite(network.loss) or any(f.breaks_gradient for f in network.functions)
    found: List[Cause] = []
    for f in network.functions:
        if f.nonfinite and suffers:
            what = f"{subject(f)} computes {f.nonfinite} infinities or NaNs{_reads(f)}, in fp32 too"
            found.append(Cause(Kind.FORWARD_NOT_FINITE, place(f), what, remedy_of(f, network), True))
    if found:
        return found
    for f in network.functions:
        if f.breaks_gradient:
            whose = "its gradient" if f.name == place(f) else f"the gradient of its {f.type_name}"
            what = f"{whose} is not finite{_reads(f)}, in fp32 too"
            found.append(Cause(Kind.BACKWARD_NOT_FINITE, place(f), what, remedy_of(f, network), True))
    return found


def not_finite_as_stored(network: NetworkNumbers) -> List[Cause]:
    """What leaves the storage in forward."""
    if math.isfinite(network.stored_loss) and all(layer.floor < _USELESS for layer in network.layers):
        return []
    return [_as_stored(f, network) for f in network.functions if f.beyond or f.overflowed]


def _as_stored(f: FunctionNumbers, network: NetworkNumbers) -> Cause:
    stored, u_max = f.stored or (network.storage, network.u_max)
    ends = f"{stored}, which ends at {u_max:g}"
    if f.beyond:
        what = f"{f.beyond} holds numbers beyond {ends}"
        remedy = "bring them into range: normalise the data, or start from smaller weights"
        return Cause(Kind.BEYOND_STORAGE, place(f), what, remedy, True)
    if f.scores:
        what = f"its scores of an attention reach {f.amax:.2g}, beyond {ends}"
        remedy = (
            "normalise queries and keys, and divide the queries by the root of their size before the "
            "product, not the scores after it"
        )
        return Cause(Kind.ATTENTION_OVERFLOW, f.name, what, remedy, True)
    if f.stored_zeros and f.amax <= u_max:
        what = f"{subject(f)} reads {count(f.stored_zeros, 'number')} that become 0 in {stored}"
        return Cause(Kind.STORED_ZERO, place(f), what, remedy_of(f, network), True)
    if f.loss_section and f.type_name in ("MulScalar", "Sum"):
        what = f"the loss behind it reaches {f.amax:.2g} in {subject(f)}, beyond {ends}"
        remedy = (
            "remove the factor and adapt the learning rate" if f.type_name == "MulScalar" else "use F.mean"
        )
        return Cause(Kind.LARGE_LOSS, place(f), what, remedy, True)
    what = f"what {subject(f)} computes reaches {f.amax:.2g}, beyond {ends}"
    remedy = "normalise its input, make its weights smaller, keep it in fp32, or use bfloat16"
    if f.type_name == "Exp":
        remedy = remedy_of(f, network)
    return Cause(Kind.ACTIVATION_OVERFLOW, place(f), what, remedy, True)


def _reads(f: FunctionNumbers) -> str:
    """What is wrong with what it reads, where that is known."""
    values = f.values
    if values.negatives:
        return f" as it reads {count(values.negatives, 'number')} below 0"
    if not values.zeros:
        return ""
    times = count(values.zeros, "zero")
    return f" as it divides by {times}" if f.type_name in ("Div2", "RDivScalar") else f" as it reads {times}"


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
