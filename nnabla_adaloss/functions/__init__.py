# SPDX-License-Identifier: Apache-2.0
"""Functions that write per-layer loss scales into a graph by hand."""

from .branch import branch as branch
from .loss_scaling import loss_scaling as loss_scaling
from .round_to_format import round_to_format as round_to_format
from .scale_tracker import ScaleTracker as ScaleTracker
from .scaled_layer import adaptive_loss_scaling as adaptive_loss_scaling
from .scaled_layer import cast_loss_scaling as cast_loss_scaling
from .unscale import unscale as unscale
