# SPDX-License-Identifier: Apache-2.0
"""Examination of a training: which layer loses gradients, why, and what to do about it."""

from __future__ import annotations

from .causes import Cause
from .examination import diagnose
from .numbers import Way
from .result import Diagnosis
from .verdicts import LayerVerdict, Verdict

__all__ = ["Cause", "Diagnosis", "LayerVerdict", "Verdict", "Way", "diagnose"]
