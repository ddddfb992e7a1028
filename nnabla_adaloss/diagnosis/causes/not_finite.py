# SPDX-License-Identifier: Apache-2.0
"""Functions that compute infinities or NaNs from finite numbers, in fp32 or as stored."""

from __future__ import annotations

import math
from typing import List

from ..numbers import FunctionNumbers, NetworkNumbers
from .cause import Cause, Kind, count, place, subject
from .remedies import remedy_of

# A relative error at which a gradient is not worth having.
_USELESS = 0.5


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
