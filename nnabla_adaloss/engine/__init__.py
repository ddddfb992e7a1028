# SPDX-License-Identifier: Apache-2.0
"""The backward engine: per-layer loss scales applied around nnabla's own functions."""

from .adaptive_loss_scaling import AdaptiveLossScaling as AdaptiveLossScaling
from .batch_loop import BatchLoop as BatchLoop
from .batch_loop import Outcome as Outcome
from .report import PassReport as PassReport
