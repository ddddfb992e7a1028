# SPDX-License-Identifier: Apache-2.0
"""Training loops with loss scaling: `updater.update()` trains on one batch."""

from nnabla.experimental.mixed_precision_training import (
    DynamicLossScalingUpdater as DynamicLossScalingUpdater,
)

from .adaptive import AdaptiveLossScalingUpdater as AdaptiveLossScalingUpdater
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .fixed import FixedLossScalingUpdater as FixedLossScalingUpdater
from .retries import Counters as Counters
from .retries import UpdateResult as UpdateResult
