# SPDX-License-Identifier: Apache-2.0
"""What updates do to parameters: too much, or nothing."""

from __future__ import annotations

from typing import List

from ..numbers import NetworkNumbers
from .cause import Cause, Kind, count

# How many times larger than initialisations make it a weight may be after training before it is spoken of.
_EXPLODED = 32.0
_NAMED = 4


def too_large_updates(network: NetworkNumbers) -> List[Cause]:
    """The first layer whose weight an update makes larger than itself, or has made too large."""
    training = network.training
    if training is None:
        return []
    rate = f"a learning rate of {training.learning_rate:g}"
    for step in training.steps:
        exploded = training.updates and step.weight > _EXPLODED * step.usual
        if exploded:
            times = step.weight / step.usual
            updates = count(training.updates, "update")
            what = (
                f"its weights are {times:.1e} times what is usual for its fan-in, after {updates} with {rate}"
            )
        elif step.update > max(step.weight, step.usual):
            times = step.update / max(step.weight, step.usual)
            what = f"an update is {times:.1e} times as large as its weights, with {rate}"
        else:
            continue
        again = "start again with" if training.updates else "use"
        remedy = f"{again} a smaller learning rate, or warm it up and clip gradients"
        return [Cause(Kind.LEARNING_RATE, step.layer, what, remedy, True)]
    return []


def untrained(network: NetworkNumbers) -> List[Cause]:
    """Parameters that the loss does not depend on."""
    found = network.untrained
    if found is None:
        return []
    names, number = found.names, len(found.names)
    layer = names[0].rpartition("/")[0] or names[0]
    listed = ", ".join(names[:_NAMED]) + (f" and {number - _NAMED} more" if number > _NAMED else "")
    whose = "of the solver" if found.by_solver else "of nnabla.get_parameters()"
    what = f"the loss does not depend on {count(number, 'parameter')} {whose}: {listed}"
    remedy = "link it to the loss: look for unlinked(), need_grad=False or an unused output"
    remedy += "" if found.by_solver else ", unless it is frozen on purpose"
    return [Cause(Kind.UNTRAINED, layer, what, remedy, found.by_solver)]
