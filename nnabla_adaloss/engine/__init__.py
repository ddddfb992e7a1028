# SPDX-License-Identifier: Apache-2.0
"""The backward engine: per-layer loss scales applied around nnabla's own functions."""

from .adaptive_loss_scaling import AdaptiveLossScaling
from .batch_loop import BatchLoop, Outcome

__all__ = ["AdaptiveLossScaling", "BatchLoop", "Outcome"]
