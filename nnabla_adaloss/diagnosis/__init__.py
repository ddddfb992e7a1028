# SPDX-License-Identifier: Apache-2.0
"""Examination of a training: whether it needs scaling, and where its gradient is lost, not finite or ends."""

from __future__ import annotations

from .advice import Harm, LayerAdvice, PrecisionAdvice
from .examination import Diagnosis, diagnose
from .finite import Cause
from .passes import Kept
from .sanity_checker import LayerLoss, SanityChecker
from .verdicts import LayerNumbers, LayerVerdict, NetworkNumbers, Verdict, Way

__all__ = [
    "Cause",
    "Diagnosis",
    "Harm",
    "Kept",
    "LayerAdvice",
    "LayerLoss",
    "LayerNumbers",
    "LayerVerdict",
    "NetworkNumbers",
    "PrecisionAdvice",
    "SanityChecker",
    "Verdict",
    "Way",
    "diagnose",
]
