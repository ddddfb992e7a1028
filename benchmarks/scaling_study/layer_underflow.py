# SPDX-License-Identifier: Apache-2.0
"""Which share of the gradient of each layer's output becomes zero in its storage."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import nnabla as nn

from .training import Trainee

_EVERY = 20


class LayerUnderflow:
    """Called after each update of a training; looks at one of twenty."""

    def __init__(self) -> None:
        self._updates = 0
        self._outputs: Dict[int, str] = {}
        self._counts: Dict[str, Tuple[int, int]] = {}

    def __call__(self, trainee: Trainee) -> None:
        """Count what the last backward has stored of the gradients of layers."""
        self._updates += 1
        emulation = trainee.loop.emulation
        if emulation is None or self._updates % _EVERY:
            return
        if not self._outputs:
            self._outputs = _outputs_of_layers(emulation.variable, trainee.player.parameters)
            self._counts = dict.fromkeys(self._outputs.values(), (0, 0))
        for key, name in self._outputs.items():
            found = emulation.emulated_storage.gradients.get(key)
            if found is None:
                continue
            count, zeros = found.statistics.count, found.statistics.zeros
            # Behind a gradient that was lost whole, nothing is left to be flushed.
            flushed = count if zeros == count else found.underflowed
            elements, lost = self._counts[name]
            self._counts[name] = elements + count, lost + flushed

    def shares(self) -> Dict[str, float]:
        """By layer, from the loss to the input."""
        return {name: round(lost / n, 6) for name, (n, lost) in self._counts.items() if n}


def _outputs_of_layers(loss: nn.Variable, parameters: Dict[str, nn.Variable]) -> Dict[int, str]:
    names = {hash(p): name.rsplit("/", 1)[0] for name, p in parameters.items()}
    found: Dict[int, str] = {}

    def look(function: Any) -> None:
        own = [names[hash(v)] for v in function.inputs if hash(v) in names]
        if own:
            found[hash(function.outputs[0])] = own[0]

    loss.visit(look)
    return dict(reversed(found.items()))
