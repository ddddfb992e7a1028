# SPDX-License-Identifier: Apache-2.0
"""Examination of a training: which layer loses gradients, why, and what to do about it."""

from __future__ import annotations

from .advice import Harm, LayerAdvice, PrecisionAdvice
from .causes import Cause
from .examination import Diagnosis, diagnose
from .numbers import Way
from .profiling import LayerTimes, Profile, profile
from .sanity_checker import LayerLoss, SanityChecker
from .verdicts import LayerVerdict, Verdict

__all__ = [
    "Cause",
    "Diagnosis",
    "Harm",
    "LayerAdvice",
    "LayerLoss",
    "LayerTimes",
    "LayerVerdict",
    "PrecisionAdvice",
    "Profile",
    "SanityChecker",
    "Verdict",
    "Way",
    "diagnose",
    "profile",
]
