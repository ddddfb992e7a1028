# SPDX-License-Identifier: Apache-2.0
"""Layers on a page: scales and underflow over the iterations, numbers, and what to do about them."""

from __future__ import annotations

import math
from html import escape
from typing import List, Mapping, Optional, Sequence

from ..core.layer_record import Reason
from ..monitor import LayerRow, Recording
from .pieces import heat_map, section, table
from .text import percent, power, short
from .timeline import Timeline

# From this share on, "mostly".
_MOSTLY = 0.5
# So many bits that are free above the largest element are worth using.
_ROOM = 2.0
_WIDER = "store gradients in a wider format, such as bfloat16"
_SHARED = f"Other gradients share its scale and need that room: {_WIDER}"
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
_WHICH_LAYERS = (
    "Listed are layers that multiply by a weight and pass a gradient on: not the first one, which reads the "
    "data, and none that AdaLossConfig(include=, exclude=) or Recorder(layers=) excludes."
)

Layers = Mapping[str, Sequence[LayerRow]]


def layer_maps(layers: Layers, timeline: Timeline) -> List[str]:
    """Sections with heat maps of accumulated scales, alphas and underflow, a row for each layer."""
    if not layers:
        return [section("Layers", "No layer was recorded.")]
    known = {name: rows for name, rows in layers.items() if worst_underflow(rows) is not None}
    explanation = (
        "The share of nonzero gradient elements that became zero when stored. Dark is none."
        if known
        else "Not known: only emulated storage counts it. Zeros and subnormals are in the table below."
    )
    lines = [
        (
            name,
            timeline.cells((row.iteration, row.underflow) for row in rows),
            f"{percent(rows[-1].underflow)} at the end, {percent(worst_underflow(rows))} at worst",
        )
        for name, rows in known.items()
    ]
    labels = ("none", "0.01 %", "1 %", "100 %")
    shares = heat_map(lines, _place_of_share, percent, labels, timeline) if known else ""
    return [
        section(
            "Accumulated scale S",
            "What each layer's input gradient is multiplied by when it is stored: S0 times all alphas from "
            "the loss to here. Dark is the smallest, light the largest, hatched is not recorded.",
            _scales(layers, timeline, "scale"),
        ),
        section(
            "Layer scales alpha",
            "What each layer multiplies its input gradient by, besides the S that arrives: 1 leaves it as it "
            "is.",
            _scales(layers, timeline, "alpha"),
        ),
        section("Underflow", explanation, shares),
    ]


def worst_underflow(rows: Sequence[LayerRow]) -> Optional[float]:
    """The largest share of elements that a layer lost in one pass; None where it is not known."""
    return max((row.underflow for row in rows if row.underflow is not None), default=None)


def _place_of_share(share: float) -> float:
    # Evenly from one in a million to all; less is drawn as none.
    return 1.0 + math.log10(share) / 6.0 if share > 1e-6 else 0.0


def _scales(layers: Layers, timeline: Timeline, field: str) -> str:
    scales = {name: [getattr(row, field) for row in rows] for name, rows in layers.items()}
    everything = [math.log2(scale) for own in scales.values() for scale in own]
    low, high = min(everything), max(everything)
    if low == high:
        return f"<p>{power(2.0**low)} for each layer, throughout.</p>\n"
    lines = [
        (
            name,
            timeline.cells((row.iteration, math.log2(scale)) for row, scale in zip(layers[name], own)),
            f"{power(own[-1])} at the end, from {power(min(own))} to {power(max(own))}",
        )
        for name, own in scales.items()
    ]
    middle = (low + high) / 2
    labels = [power(2.0**value) for value in (low, middle, high) if value != middle or value.is_integer()]
    return heat_map(
        lines, lambda value: (value - low) / (high - low), lambda value: power(2.0**value), labels, timeline
    )


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
    nonzero = (last.elements or 0) - (last.zeros or 0)
    if not nonzero or last.subnormals is None or last.subnormals < _MOSTLY * nonzero:
        return None
    share = percent(last.subnormals / nonzero)
    found = f"{last.layer}: {share} of the nonzero elements are subnormal and have lost precision"
    if last.headroom is None or last.headroom < _ROOM:
        found += ", and the largest is at the end of the format: no scale keeps both"
        return f"{found}. {_WIDER.capitalize()}."
    remedy = _REMEDIES.get(why(rows) or "", _OTHERWISE)
    return f"{found}; {last.headroom:.0f} bits of headroom are unused. {remedy}."


def layer_table(layers: Layers, recording: Recording) -> str:
    """A section with the layers in numbers, and advice about them."""
    stretches = {u.layer: u for u in recording.underflows()}
    body = []
    for name, rows in layers.items():
        last, under, scales = rows[-1], stretches.get(name), [row.scale for row in rows]
        stretch = ""
        if under is not None:
            stretch = (
                f"from {under.since:,}" if under.until is None else f"{under.since:,} to {under.until:,}"
            )
            stretch += f" ({percent(under.share)})"
        body.append(
            (
                name,
                power(last.alpha),
                power(last.scale),
                f"{power(min(scales))} to {power(max(scales))}",
                why(rows) or "not recorded",
                percent(last.underflow),
                percent(worst_underflow(rows)),
                stretch,
                percent(_share(last.subnormals, last.elements)),
                percent(_share(last.zeros, last.elements)),
                "–" if last.headroom is None else f"{last.headroom:.1f}",
                f"{sum(bool(row.nonfinite) for row in rows):,}",
            )
        )
    head = (
        *("layer", "alpha", "S", "S, range", "why this alpha", "underflow", "underflow at worst"),
        *("more than 1 %", "subnormal", "zero", "headroom, bits", "iterations not finite"),
    )
    advised = [f"<li>{escape(found)}</li>\n" for found in map(advice, layers.values()) if found is not None]
    return section(
        "Layers in numbers",
        "At the last recorded iteration, unless stated otherwise. In brackets: the share of iterations with "
        f"more than 1 % underflow in that stretch. {_WHICH_LAYERS}",
        f"<ul>\n{''.join(advised)}</ul>\n" if advised else "",
        table("The layers, from the loss backwards", head, body),
    )


def _share(part: Optional[int], whole: Optional[int]) -> Optional[float]:
    return part / whole if part is not None and whole else None


def data_table(layers: Layers) -> List[str]:
    """A section with weights and activations, where they were recorded."""
    body = []
    for name, rows in layers.items():
        looked_at = [row for row in rows if row.weight_max is not None or row.input_max is not None]
        if looked_at:
            cells = [name]
            for what in ("weight", "input"):
                largest = [value for row in looked_at if (value := getattr(row, f"{what}_max")) is not None]
                cells.append(short(max(largest)) if largest else "–")
                cells.append(percent(getattr(looked_at[-1], f"{what}_subnormal")))
            body.append(cells)
    if not body:
        return []
    head = ("layer", "largest weight", "weights subnormal", "largest input", "inputs subnormal")
    return [
        section(
            "Weights and activations",
            "The largest magnitude over all iterations, and the share of the nonzero elements that are below "
            "the format's normal range at the last one. Weights are without scale; a layer's input is what "
            "its weight is multiplied by.",
            table("Weights and inputs of the layers, from the loss backwards", head, body),
        )
    ]
