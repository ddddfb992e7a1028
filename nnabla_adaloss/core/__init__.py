# SPDX-License-Identifier: Apache-2.0
"""What decides: components, choice, memory, verdict, methods and formats, apart from any framework."""

from __future__ import annotations

from .config import AdaLossConfig
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
from .layer_record import LayerRecord, Reason
from .layer_selection import LayerSelection
from .loss_section import loss_section_factor
from .methods import METHODS, AmaxHistory, Method, Needs, Range, overflow_limit, resolve_method
from .power_of_two import get_power_of_two_scale
from .precision import PRECISIONS, Precision, StorageLike, get_precision
from .scale_history import HistoryPolicy
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
    "PRECISIONS",
    "AdaLossConfig",
    "AmaxHistory",
    "ArrayStatistics",
    "Format",
    "HistoryPolicy",
    "LayerRecord",
    "LayerSelection",
    "Method",
    "Needs",
    "Precision",
    "Range",
    "Reason",
    "ScalePolicy",
    "ScaleState",
    "StorageLike",
    "get_format",
    "get_power_of_two_scale",
    "get_precision",
    "loss_section_factor",
    "overflow_limit",
    "resolve_method",
    "statistics_of",
]
