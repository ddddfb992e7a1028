# SPDX-License-Identifier: Apache-2.0
"""The row of a layer, and the curves that rows are drawn as."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Type

import numpy as np

from .events import BatchThrownAway, Event, LayerScaled, ScaleChanged, UpdateEnded


class LayerRow(NamedTuple):
    """One layer in one backward pass.

    Counts are of the layer's input gradient as stored, the gradient that `alpha` protects. They are None if
    no gradient was written.

    Attributes:
        iteration: number of the iteration.
        attempt: number of the pass within it, from 0, over repeats and micro-batches of `accum_grad`.
        layer: name of the layer.
        alpha: the layer's own scale.
        scale: S, the accumulated scale that the gradient carries: from the loss to here.
        reason: the limit that determined alpha, a value of `Reason`.
        elements: number of elements.
        zeros: number of zeros.
        subnormals: number of nonzero elements below the format's normal range, which have lost precision.
        underflowed: number that became zero when stored; None where the storage does not count it.
        overflowed: number that became infinite when stored, likewise.
        nonfinite: number of infinities and NaNs.
        abs_max: the largest finite magnitude, S included.
        headroom: bits between `abs_max` and the format's maximum; None when all are zero.
        exponents: histogram of binary exponents: the least one, then the counts from it on; empty if no
            magnitude is at least 2^-126. None unless histograms are recorded.
        weight_max: the largest finite magnitude of the weight, without scale. This and the next three are
            None unless data is recorded.
        weight_subnormal: share of the weight's nonzero elements that are below the format's normal range.
        input_max: the largest finite magnitude of the array that the weight is multiplied by.
        input_subnormal: share of its nonzero elements that are below the normal range.
        loss_weight: factor of the loss on the way to the layer, which S compensates; None in recordings of
            older versions.
    """

    iteration: int
    attempt: int
    layer: str
    alpha: float
    scale: float
    reason: str
    elements: Optional[int] = None
    zeros: Optional[int] = None
    subnormals: Optional[int] = None
    underflowed: Optional[int] = None
    overflowed: Optional[int] = None
    nonfinite: Optional[int] = None
    abs_max: Optional[float] = None
    headroom: Optional[float] = None
    exponents: Optional[List[int]] = None
    weight_max: Optional[float] = None
    weight_subnormal: Optional[float] = None
    input_max: Optional[float] = None
    input_subnormal: Optional[float] = None
    loss_weight: Optional[float] = None

    @property
    def underflow(self) -> Optional[float]:
        """Share of the nonzero elements that became zero when stored; None if unknown."""
        if self.underflowed is None or self.elements is None or self.zeros is None:
            return None
        nonzero = self.elements - self.zeros + self.underflowed
        return self.underflowed / nonzero if nonzero else 0.0

    @property
    def overflow(self) -> Optional[float]:
        """Share of the elements that became infinite when stored; None if unknown."""
        if self.overflowed is None or not self.elements:
            return None
        return self.overflowed / self.elements


_LAYER_CURVES = ["alpha", "scale", "underflow", "overflow", "nonfinite", "headroom"]
_LAYER_CURVES += ["weight_max", "weight_subnormal", "input_max", "input_subnormal"]
# Fields of a row that TensorBoard and `to_monitor_series` draw over iterations, by the name of the curve.
_CURVES: Dict[Type[Any], Dict[str, str]] = {
    LayerRow: dict(zip(_LAYER_CURVES, _LAYER_CURVES)),
    UpdateEnded: {"loss": "loss", "retries": "retries", "loss_scale": "scale"},
    ScaleChanged: {"loss_scale": "after"},
    BatchThrownAway: {"batches_lost": "batches"},
}


def points_of(row: Event) -> Dict[str, float]:
    """Values of a row for `_CURVES`, by the name of the curve: `conv/scale`, or `loss`."""
    layer = f"{row.layer}/" if isinstance(row, LayerRow) else ""
    fields = _CURVES.get(type(row), {}).items()
    values = ((layer + name, getattr(row, field)) for name, field in fields)
    return {name: float(value) for name, value in values if value is not None}


def row_of(event: LayerScaled, *, histograms: bool, data: bool) -> LayerRow:
    """Make the row of a layer that has just been scaled; with `data`, from its weight and input as well."""
    record, gradient = event.record, event.look.gradient
    measured: Dict[str, Any] = {}
    if gradient is not None:
        statistics, headroom = gradient.statistics, gradient.headroom
        measured = {
            "elements": statistics.count,
            "zeros": statistics.zeros,
            "subnormals": gradient.subnormals,
            "underflowed": gradient.underflowed,
            "overflowed": gradient.overflowed,
            "nonfinite": statistics.nonfinite,
            "abs_max": statistics.abs_max,
            "headroom": headroom if math.isfinite(headroom) else None,
            "exponents": _compact(gradient.exponents) if histograms else None,
        }
    for name in ("weight", "input") if data else ():
        seen = getattr(event.look, name)
        if seen is not None:
            nonzero = seen.statistics.count - seen.statistics.zeros
            measured[f"{name}_max"] = seen.statistics.abs_max
            measured[f"{name}_subnormal"] = seen.subnormals / nonzero if nonzero else 0.0
    return LayerRow(
        iteration=record.iteration,
        attempt=record.attempt,
        layer=record.layer,
        alpha=record.alpha,
        scale=record.accumulated_scale,
        reason=record.reason.value,
        loss_weight=record.loss_weight,
        **measured,
    )


def _compact(exponents: Any) -> List[int]:
    """Least binary exponent, and counts from it to the largest, of a histogram by float32's exponent bits."""
    # Bin 0 is of zeros and magnitudes below 2^-126, bin 255 of infinities and NaNs.
    (present,) = np.nonzero(exponents[1:255])
    if not present.size:
        return []
    first, last = int(present[0]) + 1, int(present[-1]) + 1
    return [first - 127, *exponents[first : last + 1].tolist()]
