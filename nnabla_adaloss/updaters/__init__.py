# SPDX-License-Identifier: Apache-2.0
"""Training loops with loss scaling: `updater.update()` trains on one batch."""

from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from .adaptive import AdaptiveLossScalingUpdater
from .checkpoint import load_checkpoint, save_checkpoint
from .fixed import FixedLossScalingUpdater
from .retries import Counters, UpdateResult

__all__ = [
    "AdaptiveLossScalingUpdater",
    "Counters",
    "DynamicLossScalingUpdater",
    "FixedLossScalingUpdater",
    "UpdateResult",
    "load_checkpoint",
    "save_checkpoint",
]
