# SPDX-License-Identifier: Apache-2.0
"""Gradients that are unscaled already, in a training loop that would divide them by the scale once more."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Optional

from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

# What divides by the scale. An updater with a loop of its own, though derived from nnabla's, may not.
_LOOP = DynamicLossScalingUpdater.update.__code__


def refuse_a_second_division(loss: Any) -> None:
    """Raise if it is the loop of nnabla's `DynamicLossScalingUpdater` that runs `loss`, whose gradients come
    out unscaled.

    The loop gives a scale as any other one does, so that only the loop itself tells.
    """
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _LOOP and frame.f_locals["self"].loss is loss:
            updater = type(frame.f_locals["self"]).__name__
            raise TypeError(
                f"{updater} divides gradients by the scale, but its loss is an {type(loss).__name__}, which "
                "unscales them by itself: give the loss that was wrapped in it to "
                "nnabla_adaloss.AdaptiveLossScalingUpdater"
            )
        frame = frame.f_back
