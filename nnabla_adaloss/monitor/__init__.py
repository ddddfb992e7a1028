# SPDX-License-Identifier: Apache-2.0
"""Watching a training: events, monitors that take them, and recordings that answer questions."""

from __future__ import annotations

from .audience import Audience, Monitor, audience_of
from .events import (
    BatchRepeated,
    BatchThrownAway,
    Event,
    GradientSeen,
    LayerArrays,
    LayerScaled,
    Overflowed,
    ScaleChanged,
    TrainingBegan,
    UpdateEnded,
)
from .log_monitor import LogMonitor
from .nan_dump import NanDump
from .recorder import Recorder
from .recording import Recording, Underflow
from .rows import LayerRow

__all__ = [
    "Audience",
    "BatchRepeated",
    "BatchThrownAway",
    "Event",
    "GradientSeen",
    "LayerArrays",
    "LayerRow",
    "LayerScaled",
    "LogMonitor",
    "Monitor",
    "NanDump",
    "Overflowed",
    "Recorder",
    "Recording",
    "ScaleChanged",
    "TrainingBegan",
    "Underflow",
    "UpdateEnded",
    "audience_of",
]
