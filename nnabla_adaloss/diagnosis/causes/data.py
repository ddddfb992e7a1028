# SPDX-License-Identifier: Apache-2.0
"""Data, labels and weights that are wrong before anything is computed from them."""

from __future__ import annotations

import math
from typing import List, Optional, Tuple

from ..numbers import FunctionNumbers, NetworkNumbers, ReadLeaf, Targets, Training
from .cause import Cause, Kind, count, place

_INDEXED = ("Embed", "OneHot")


def wrong_data(network: NetworkNumbers) -> List[Cause]:
    """What is not finite, and labels and indices that there is nothing for, in forward order."""
    suffers = not math.isfinite(network.loss) or any(f.breaks_gradient for f in network.functions)
    found: List[Cause] = []
    for f in network.functions:
        targets = f.values.targets
        wrong = None if targets is None else _wrong(f, targets)
        if targets is not None and wrong is not None:
            kind = Kind.WRONG_INDICES if f.type_name in _INDEXED else Kind.WRONG_LABELS
            found.append(Cause(kind, targets.name, *wrong, True))
            continue
        # An attention mask of minus infinity harms nobody.
        found += [_leaf(f, leaf, network.training) for leaf in f.leaves if leaf.nans or suffers]
    return _first_weight(found)


def _first_weight(found: List[Cause]) -> List[Cause]:
    """The causes with one in the place of all that are about weights: a bad update spoils them together."""
    weights = [cause for cause in found if cause.kind is Kind.WEIGHT_NOT_FINITE]
    if len(weights) < 2:
        return found
    others = count(len(weights) - 1, "other parameter")
    first = weights[0]._replace(what=f"{weights[0].what} ({others} are not finite either)")
    return [first if cause is weights[0] else cause for cause in found if cause not in weights[1:]]


def _leaf(f: FunctionNumbers, leaf: ReadLeaf, training: Optional[Training]) -> Cause:
    held = count(leaf.nans, "NaN") if leaf.nans else f"{leaf.infinities} infinities"
    if not leaf.is_parameter:
        what = f"it reads data that holds {held} ({leaf.name})"
        remedy = "clean the data, or drop what is not finite"
        if not leaf.nans:
            remedy += "; a mask must leave at least one place per row open"
        return Cause(Kind.DATA_NOT_FINITE, place(f), what, remedy, True)
    what = f"its parameter {leaf.name} holds {held}"
    remedy = "restore earlier weights and check what updates them"
    if training is not None and training.updates:
        updates = count(training.updates, "update")
        what += f", after {updates} with a learning rate of {training.learning_rate:g}"
        remedy = "restore earlier weights, and lower the learning rate or clip gradients"
    return Cause(Kind.WEIGHT_NOT_FINITE, place(f), what, remedy, True)


def _wrong(f: FunctionNumbers, targets: Targets) -> Optional[Tuple[str, str]]:
    """What is wrong with labels or indices, and what to do; None when nothing is."""
    limit, least, largest = targets.limit, targets.least, targets.largest
    run = f"they run from {least:g} to {largest:g}"
    if targets.nans:
        return f"{f.type_name} reads {count(targets.nans, 'NaN')} from them", "clean them"
    if not limit:
        if least >= 0.0 and largest <= 1.0:
            return None
        return f"{run}, and {f.type_name} takes numbers from 0 to 1", "map them to that range"
    if not targets.whole:
        remedy = "use whole numbers; for soft labels, sum -t * F.log_softmax(y)"
        if f.type_name == "SigmoidCrossEntropy":
            remedy = "use 0 and 1, or F.binary_cross_entropy(F.sigmoid(y), t)"
        return f"they are not whole numbers, and {f.type_name} reads 0.7 as 0", remedy
    if f.type_name == "SigmoidCrossEntropy":
        if least >= 0.0 and largest <= 1.0:
            return None
        return f"{run}, and {f.type_name} takes 0 or 1", "map them to 0 and 1"
    if f.type_name in _INDEXED:
        if least >= 0.0 and largest < limit:
            return None
        has = "rows" if f.type_name == "Embed" else "classes"
        return (
            f"{run}, and {f.name} has {limit} {has}, 0 to {limit - 1}",
            f"count them from 0, or make it {largest + 1:g} {has}",
        )
    if largest >= limit:
        return (
            f"{run}, and {f.type_name} has {limit} classes, 0 to {limit - 1}: it reads beyond its array",
            f"count them from 0, or give the last layer {largest + 1:g} outputs",
        )
    if largest < 0.0:
        return (
            f"all of them are negative ({least:g} to {largest:g}), which {f.type_name} ignores: there is "
            "nothing to learn",
            "feed labels, or skip such batches",
        )
    return None
