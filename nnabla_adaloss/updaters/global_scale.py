# SPDX-License-Identifier: Apache-2.0
"""The two ways to a global loss scale: measured, or searched for."""

from __future__ import annotations

from typing import Optional, Union

from ..core.scale_history import HistoryPolicy


def history_of(
    global_scale: Union[str, HistoryPolicy], start_scale: float, min_scale: float
) -> Optional[HistoryPolicy]:
    """The policy of measured scales that `global_scale` stands for; None for `"dynamic"`.

    Args:
        global_scale: `"history"`, `"dynamic"`, or a `HistoryPolicy`, which is taken as it is.
        start_scale: what `"history"` starts with.
        min_scale: no scale of `"history"` is lower.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(global_scale, HistoryPolicy):
        return global_scale
    if global_scale == "history":
        return HistoryPolicy(start_scale=start_scale, min_scale=min_scale)
    if global_scale == "dynamic":
        return None
    raise ValueError(f"global_scale={global_scale!r} must be 'history', 'dynamic' or a HistoryPolicy")
