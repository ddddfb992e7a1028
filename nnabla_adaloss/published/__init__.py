# SPDX-License-Identifier: Apache-2.0
"""The scale of one layer by itself, as the paper has it: for `functions`, and for NumPy arrays alone."""

from __future__ import annotations

from .ada_loss import AdaLoss
from .functions import (
    bound_loss_scale_by_heuristics,
    get_loss_scale,
    get_loss_scale_by_abs_range,
    get_loss_scale_by_approx_range,
    get_loss_scale_by_element_wise_range,
)

__all__ = [
    "AdaLoss",
    "bound_loss_scale_by_heuristics",
    "get_loss_scale",
    "get_loss_scale_by_abs_range",
    "get_loss_scale_by_approx_range",
    "get_loss_scale_by_element_wise_range",
]
