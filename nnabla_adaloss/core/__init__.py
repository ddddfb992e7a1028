# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling apart from any framework: NumPy and SciPy only."""

from __future__ import annotations

from .abs_range import get_loss_scale_by_abs_range
from .ada_loss import AdaLoss
from .approx_range import get_loss_scale_by_approx_range
from .bounds import bound_loss_scale_by_heuristics, overflow_limit
from .branches import common_scale
from .config import AdaLossConfig
from .element_wise_range import get_loss_scale_by_element_wise_range
from .formats import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FORMATS,
    Format,
    get_format,
)
from .layer_record import LayerRecord
from .loss_scale import get_loss_scale
from .loss_section import loss_section_factor
from .methods import METHODS, Method, resolve_method
from .power_of_two import get_power_of_two_scale
from .scale_policy import ScalePolicy, ScaleState
from .statistics import ArrayStatistics, statistics_of

__all__ = [
    "BFLOAT16",
    "FLOAT8_E4M3",
    "FLOAT8_E5M2",
    "FLOAT16",
    "FLOAT32",
    "FORMATS",
    "METHODS",
    "AdaLoss",
    "AdaLossConfig",
    "ArrayStatistics",
    "Format",
    "LayerRecord",
    "Method",
    "ScalePolicy",
    "ScaleState",
    "bound_loss_scale_by_heuristics",
    "common_scale",
    "get_format",
    "get_loss_scale",
    "get_loss_scale_by_abs_range",
    "get_loss_scale_by_approx_range",
    "get_loss_scale_by_element_wise_range",
    "get_power_of_two_scale",
    "loss_section_factor",
    "overflow_limit",
    "resolve_method",
    "statistics_of",
]
