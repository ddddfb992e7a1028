# SPDX-License-Identifier: Apache-2.0
"""Functions that write per-layer loss scales into a graph by hand."""

from __future__ import annotations

from .branch import branch
from .cast_loss_scaling import cast_loss_scaling
from .loss_scaling import loss_scaling
from .round_to_format import round_to_format
from .scale_tracker import ScaleTracker
from .scaled_layer import adaptive_loss_scaling
from .unscale import unscale

__all__ = [
    "ScaleTracker",
    "adaptive_loss_scaling",
    "branch",
    "cast_loss_scaling",
    "loss_scaling",
    "round_to_format",
    "unscale",
]
