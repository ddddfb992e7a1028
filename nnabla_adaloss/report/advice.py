# SPDX-License-Identifier: Apache-2.0
"""What a layer's rows say about its scale: why alpha is what it is, and what would help."""

from __future__ import annotations

from typing import Optional, Sequence

from ..core.layer_record import Reason
from ..monitor import LayerRow
from .text import percent

# From this share on, "mostly".
_MOSTLY = 0.5
# So many bits that are free above the largest element are worth using.
_ROOM = 2.0
_SHARED = (
    "Other gradients share its scale and need that room: store gradients in a wider format, such as bfloat16"
)
_REMEDIES = {
    Reason.ROOM.value: _SHARED,
    Reason.LEVEL.value: _SHARED,
    Reason.BRANCHES.value: _SHARED,
    Reason.WEIGHT_RANGE.value: (
        "The scaled copy of its weight would overflow: store weights in a wider format, such as bfloat16"
    ),
    Reason.SCALE_BOUND.value: "Raise AdaLossConfig(scale_upper_bound=...)",
    Reason.ACCUMULATED_BOUND.value: "Raise AdaLossConfig(accum_upper_bound=...)",
}
_OTHERWISE = 'Try AdaLossConfig(loss_scale_method="amax_history"), and global_scale="history"'


def why(rows: Sequence[LayerRow]) -> Optional[str]:
    """The reason of a layer's scale when it was last measured; None where no such iteration was recorded."""
    measured = (row.reason for row in reversed(rows) if row.reason != Reason.HELD.value)
    return next(measured, None)


def advice(rows: Sequence[LayerRow]) -> Optional[str]:
    """What to do about a layer whose gradient is mostly below the normal range; None about any other.

    Example:
        >>> row = LayerRow(7, 0, "fc", 4.0, 32.0, "accumulated bound", 100, 0, 97, headroom=12.0)
        >>> advice([row]).split("; ")[1]
        '12 bits of headroom are unused. Raise AdaLossConfig(accum_upper_bound=...).'
    """
    last = rows[-1]
    if last.elements is None or last.zeros is None or last.subnormals is None:
        return None
    nonzero = last.elements - last.zeros
    if not nonzero or last.subnormals < _MOSTLY * nonzero:
        return None
    share = percent(last.subnormals / nonzero)
    found = f"{last.layer}: {share} of the nonzero elements are subnormal and have lost precision"
    if last.headroom is None or last.headroom < _ROOM:
        return (
            f"{found}, and the largest is at the end of the format: no scale keeps both. "
            "Store gradients in a wider format, such as bfloat16."
        )
    return (
        f"{found}; {last.headroom:.0f} bits of headroom are unused. "
        f"{_REMEDIES.get(why(rows) or '', _OTHERWISE)}."
    )
