# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of a `LossScaler`, made whenever one is assigned."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Union

from ..core.scale_history import HistoryPolicy
from ..core.validation import boolean, integer, number, positive_number


def _growth_factor(name: str, value: object) -> float:
    if positive_number(name, value) < 1.0:
        raise ValueError(f"{name}={value!r} must be 1 or more")
    return number(name, value)


def _backoff_factor(name: str, value: object) -> float:
    if positive_number(name, value) > 1.0:
        raise ValueError(f"{name}={value!r} must not be larger than 1")
    return number(name, value)


def _growth_interval(name: str, value: object) -> int:
    if integer(name, value) < 1:
        raise ValueError(f"{name}={value!r} must be 1 or more")
    return integer(name, value)


CHECKS: Dict[str, Callable[[str, object], Any]] = {
    "scale": positive_number,
    "initial_scale": positive_number,
    "dynamic_scaling": boolean,
    "growth_interval": _growth_interval,
    "growth_factor": _growth_factor,
    "backoff_factor": _backoff_factor,
    "min_scale": positive_number,
    "max_scale": positive_number,
}
COUNTS = ("total_updates", "skipped_updates")


def history_of(global_scale: Union[str, HistoryPolicy]) -> Optional[HistoryPolicy]:
    """The policy of measured scales; None for `"dynamic"`."""
    if isinstance(global_scale, HistoryPolicy):
        return global_scale
    if global_scale not in ("dynamic", "history"):
        raise ValueError(f"global_scale={global_scale!r} must be 'dynamic', 'history' or a HistoryPolicy")
    return HistoryPolicy() if global_scale == "history" else None


def count(name: str, value: object) -> int:
    """`value` as an integer of at least 0; else ValueError or TypeError."""
    if integer(name, value) < 0:
        raise ValueError(f"{name}={value!r} must be 0 or more")
    return integer(name, value)
