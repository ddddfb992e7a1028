# SPDX-License-Identifier: Apache-2.0
"""Training loops with loss scaling: `updater.update()` trains on one batch."""

from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

__all__ = ["DynamicLossScalingUpdater"]
