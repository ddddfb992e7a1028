# SPDX-License-Identifier: Apache-2.0
"""What the tries of one iteration have come to so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Tuple

from ..core.layer_limits import LayerLimit
from ..core.scale_policy import ScaleState


@dataclass
class Tries:
    """An iteration that has begun: how scales were before it, and what happened since.

    Attributes:
        scale_state: the global scale before.
        limits: the limits of layers before.
        repeats: how often a batch was run again.
        thrown_away: batches (or windows of `accum_grad`) that were given up.
        hopeless: how many of these no scale helped, in a row.
        layers: names of the layers whose gradients were not finite in the last batch that was thrown away.
    """

    scale_state: ScaleState
    limits: Mapping[str, LayerLimit]
    repeats: int = 0
    thrown_away: int = 0
    hopeless: int = 0
    layers: Tuple[str, ...] = ()

    @property
    def retries(self) -> int:
        """How often gradients were computed in vain."""
        return self.repeats + self.thrown_away
