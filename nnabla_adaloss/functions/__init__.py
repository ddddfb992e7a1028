# SPDX-License-Identifier: Apache-2.0
"""Loss scaling by hand: functions in a graph, and the scale of a single layer, as in the paper."""

from .ada_loss import AdaLoss as AdaLoss
from .ada_loss import NNablaAdaLoss as NNablaAdaLoss
from .branch import branch as branch
from .formulas import bound_loss_scale_by_heuristics as bound_loss_scale_by_heuristics
from .formulas import get_loss_scale as get_loss_scale
from .formulas import get_loss_scale_by_abs_range as get_loss_scale_by_abs_range
from .formulas import get_loss_scale_by_approx_range as get_loss_scale_by_approx_range
from .formulas import get_loss_scale_by_element_wise_range as get_loss_scale_by_element_wise_range
from .loss_scaling import loss_scaling as loss_scaling
from .loss_scaling import unscale as unscale
from .round_to_format import round_to_format as round_to_format
from .scale_tracker import ScaleTracker as ScaleTracker
from .scaled_layer import adaptive_loss_scaling as adaptive_loss_scaling
from .scaled_layer import cast_loss_scaling as cast_loss_scaling
