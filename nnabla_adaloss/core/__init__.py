# SPDX-License-Identifier: Apache-2.0
"""Decisions: components, choice, memory, verdict, methods and formats, apart from any framework."""

from .config import AdaLossConfig as AdaLossConfig
from .formats import Format as Format
from .layer_record import LayerRecord as LayerRecord
from .layer_record import Reason as Reason
from .methods import AmaxHistory as AmaxHistory
from .methods import Method as Method
from .methods import Needs as Needs
from .methods import Range as Range
from .power_of_two import get_power_of_two_scale as get_power_of_two_scale
from .precision import Precision as Precision
from .precision import StorageLike as StorageLike
from .scale_history import HistoryPolicy as HistoryPolicy
from .statistics import ArrayStatistics as ArrayStatistics
