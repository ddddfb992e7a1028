# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a network that is no matter of the loss scale: judged from numbers alone."""

from __future__ import annotations

from typing import List

from ..numbers import NetworkNumbers
from .cause import Cause, Kind
from .data import wrong_data
from .gradient_ends import gradient_ends
from .not_finite import not_finite, not_finite_as_stored
from .parameters import too_large_updates, untrained
from .sizes import sizes

__all__ = ["Cause", "Kind", "causes_of"]


def causes_of(network: NetworkNumbers) -> List[Cause]:
    """Everything that is wrong, in forward order; what no scale helps first.

    Consequences of other causes are left out: data that is not finite comes before what is computed from
    it, weights that an update made too large before the activations that overflow.
    """
    updates = too_large_updates(network)
    found = [*wrong_data(network), *updates]
    found = found or not_finite(network) or not_finite_as_stored(network)
    # Neither follows from wrong labels.
    if all(cause.kind is Kind.WRONG_LABELS for cause in found):
        found += gradient_ends(network)
    found += untrained(network)
    named = {cause.layer for cause in found}
    if not updates:
        found += [cause for cause in sizes(network, among=bool(found)) if cause.layer not in named]
    return sorted(found, key=lambda cause: not cause.fatal)
