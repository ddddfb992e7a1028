# SPDX-License-Identifier: Apache-2.0
"""Decisions: components, choice, memory, verdict, methods and formats, apart from any framework."""

from .config import AdaLossConfig as AdaLossConfig
from .formats import BFLOAT16 as BFLOAT16
from .formats import FLOAT8_E4M3 as FLOAT8_E4M3
from .formats import FLOAT8_E5M2 as FLOAT8_E5M2
from .formats import FLOAT16 as FLOAT16
from .formats import FLOAT32 as FLOAT32
from .formats import FORMATS as FORMATS
from .formats import Format as Format
from .formats import get_format as get_format
from .layer_record import LayerRecord as LayerRecord
from .layer_record import Reason as Reason
from .layer_selection import LayerSelection as LayerSelection
from .methods import METHODS as METHODS
from .methods import AmaxHistory as AmaxHistory
from .methods import Method as Method
from .methods import Needs as Needs
from .methods import Range as Range
from .methods import overflow_limit as overflow_limit
from .methods import resolve_method as resolve_method
from .power_of_two import get_power_of_two_scale as get_power_of_two_scale
from .precision import PRECISIONS as PRECISIONS
from .precision import Precision as Precision
from .precision import StorageLike as StorageLike
from .precision import get_precision as get_precision
from .scale_history import HistoryPolicy as HistoryPolicy
from .scale_policy import ScalePolicy as ScalePolicy
from .scale_policy import ScaleState as ScaleState
from .statistics import ArrayStatistics as ArrayStatistics
from .statistics import statistics_of as statistics_of
