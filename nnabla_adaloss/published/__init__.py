# SPDX-License-Identifier: Apache-2.0
"""The scale of one layer by itself, as the paper has it: for `functions`, and for NumPy arrays alone."""

from .ada_loss import AdaLoss as AdaLoss
from .functions import bound_loss_scale_by_heuristics as bound_loss_scale_by_heuristics
from .functions import get_loss_scale as get_loss_scale
from .functions import get_loss_scale_by_abs_range as get_loss_scale_by_abs_range
from .functions import get_loss_scale_by_approx_range as get_loss_scale_by_approx_range
from .functions import get_loss_scale_by_element_wise_range as get_loss_scale_by_element_wise_range
