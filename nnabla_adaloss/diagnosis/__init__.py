# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a training: its need of scaling, and places where its gradient is lost, not finite or ends."""

from .advice import Harm as Harm
from .advice import LayerAdvice as LayerAdvice
from .advice import PrecisionAdvice as PrecisionAdvice
from .causes import Cause as Cause
from .examination import diagnose as diagnose
from .passes import StorageEffect as StorageEffect
from .passes import Way as Way
from .presentation import Diagnosis as Diagnosis
from .sanity_checker import LayerLoss as LayerLoss
from .sanity_checker import SanityChecker as SanityChecker
from .verdicts import LayerNumbers as LayerNumbers
from .verdicts import LayerVerdict as LayerVerdict
from .verdicts import NetworkNumbers as NetworkNumbers
from .verdicts import Verdict as Verdict
