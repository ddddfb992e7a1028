# SPDX-License-Identifier: Apache-2.0
"""Layers on a page: scales and underflow over the iterations, numbers, and what to do about them."""

from __future__ import annotations

import math
from html import escape
from typing import Callable, List, Mapping, Optional, Sequence

from ..core.layer_record import Reason
from ..monitor import LayerRow, Recording
from .pieces import Lines, Timeline, extent, heat_map, percent, power, section, table

# Less is drawn as none.
_LEAST_SHARE = 1e-6
# Bits from the darkest to the lightest colour of scales; even.
_LEAST_SPAN = 10
# From this share on, "mostly".
_MOSTLY = 0.5
# So many bits that are free above the largest element are worth using.
_ROOM = 2.0
_WIDER = "store gradients in a wider format, such as bfloat16"
_SHARED = f"Other gradients share its scale and need that room: {_WIDER}"
_REMEDIES: Mapping[str, str] = {
    **dict.fromkeys((Reason.ROOM, Reason.LEVEL, Reason.BRANCHES), _SHARED),
    Reason.WEIGHT_RANGE: "The scaled copy of its weight would overflow: store weights in a wider format, "
    "such as bfloat16",
    Reason.SCALE_BOUND: "Raise AdaLossConfig(scale_upper_bound=...)",
    Reason.ACCUMULATED_BOUND: "Raise AdaLossConfig(accum_upper_bound=...)",
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
    counted = _lines(layers, "underflow")
    told = ["Not known: only emulated storage counts it. Zeros and subnormals are in the table below."]
    if counted:
        labels = ("none", "0.01 %", "1 %", "100 %")
        shares = heat_map(counted, timeline, percent, (_LEAST_SHARE, 1.0), labels)
        told = ["The share of nonzero gradient elements that became zero when stored. Dark is none.", shares]
    return [
        section(
            "Accumulated scale S",
            "What each layer's input gradient is multiplied by when it is stored: S0 times all alphas from "
            "the loss to here. Dark is small, light is large, hatched is not recorded.",
            _scales(_lines(layers, "scale"), timeline),
        ),
        section(
            "Layer scales alpha",
            "What each layer multiplies its input gradient by, besides the S that arrives: 1 leaves it as it "
            "is.",
            _scales(_lines(layers, "alpha"), timeline),
        ),
        section("Underflow", *told),
    ]


def _lines(layers: Layers, field: str) -> Lines:
    lines = {
        name: [(row.iteration, value) for row in rows if (value := getattr(row, field)) is not None]
        for name, rows in layers.items()
    }
    return {name: points for name, points in lines.items() if points}


def _scales(lines: Lines, timeline: Timeline) -> str:
    scales = [scale for points in lines.values() for _, scale in points]
    if min(scales) == max(scales):
        return f"<p>{power(min(scales))} for each layer, throughout.</p>\n"
    low, high = math.floor(math.log2(min(scales))), math.ceil(math.log2(max(scales)))
    # Scales that hardly differ look alike, and the middle is a power of two.
    missing = max(_LEAST_SPAN, high - low + (high - low) % 2) - (high - low)
    low, high = low - missing // 2, high + missing - missing // 2
    labels = [power(2.0**end) for end in (low, (low + high) // 2, high)]
    return heat_map(lines, timeline, power, (2.0**low, 2.0**high), labels)


def worst_underflow(rows: Sequence[LayerRow]) -> Optional[float]:
    """The largest share of elements that a layer lost in one pass; None where it is not known."""
    return max(_known(rows, "underflow"), default=None)


def _known(rows: Sequence[LayerRow], field: str) -> List[float]:
    return [value for row in rows if (value := getattr(row, field)) is not None]


def why(rows: Sequence[LayerRow]) -> Optional[str]:
    """The reason of a layer's scale when it was last measured; None where no such iteration was recorded."""
    return next((row.reason for row in reversed(rows) if row.reason != Reason.HELD), None)


def advice(rows: Sequence[LayerRow]) -> Optional[str]:
    """Advice for a layer whose gradient is mostly below the normal range; None for any other."""
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


def _stretch(rows: Sequence[LayerRow]) -> str:
    for under in Recording(rows).underflows():
        until = "" if under.until is None else f" to {under.until:,}"
        return f"{'from ' * (not until)}{under.since:,}{until} ({percent(under.share)})"
    return ""


def _share(part: Optional[int], whole: Optional[int]) -> str:
    return percent(part / whole if part is not None and whole else None)


def _largest(values: Sequence[float]) -> str:
    return f"{max(values):.3g}" if values else "–"


Columns = Mapping[str, Callable[[Sequence[LayerRow]], str]]
"""Cells of a layer, by the head of the column."""

COLUMNS: Columns = {
    "alpha": lambda rows: power(rows[-1].alpha),
    "S": lambda rows: power(rows[-1].scale),
    "S, range": lambda rows: extent(_known(rows, "scale")),
    "why this alpha": lambda rows: why(rows) or "not recorded",
    "underflow": lambda rows: percent(rows[-1].underflow),
    "underflow at worst": lambda rows: percent(worst_underflow(rows)),
    "more than 1 %": _stretch,
    "subnormal": lambda rows: _share(rows[-1].subnormals, rows[-1].elements),
    "zero": lambda rows: _share(rows[-1].zeros, rows[-1].elements),
    "headroom, bits": lambda rows: "–" if rows[-1].headroom is None else f"{rows[-1].headroom:.1f}",
    "iterations not finite": lambda rows: f"{sum(bool(row.nonfinite) for row in rows):,}",
}
_DATA_COLUMNS: Columns = {
    "largest weight": lambda rows: _largest(_known(rows, "weight_max")),
    "weights subnormal": lambda rows: percent(next(reversed(_known(rows, "weight_subnormal")), None)),
    "largest input": lambda rows: _largest(_known(rows, "input_max")),
    "inputs subnormal": lambda rows: percent(next(reversed(_known(rows, "input_subnormal")), None)),
}


def layer_tables(layers: Layers) -> List[str]:
    """Sections with the layers in numbers and advice about them, and with weights and inputs if recorded."""
    if not layers:
        return []
    advised = "".join(f"<li>{escape(found)}</li>\n" for found in map(advice, layers.values()) if found)
    numbers = section(
        "Layers in numbers",
        "At the last recorded iteration, unless stated otherwise. In brackets: the share of iterations "
        f"with more than 1 % underflow in that stretch. {_WHICH_LAYERS}",
        f"<ul>\n{advised}</ul>\n" if advised else "",
        _table("The layers, from the loss backwards", COLUMNS, layers),
    )
    looked_at = {**_lines(layers, "weight_max"), **_lines(layers, "input_max")}
    data = {name: rows for name, rows in layers.items() if name in looked_at}
    if not data:
        return [numbers]
    weights = section(
        "Weights and activations",
        "The largest magnitude over all iterations, and the share of the nonzero elements that are below the "
        "format's normal range at the last one. Weights are without scale; a layer's input is what its "
        "weight is multiplied by.",
        _table("Weights and inputs of the layers, from the loss backwards", _DATA_COLUMNS, data),
    )
    return [numbers, weights]


def _table(caption: str, columns: Columns, layers: Layers) -> str:
    body = [(name, *(written(rows) for written in columns.values())) for name, rows in layers.items()]
    return table(caption, ("layer", *columns), body)
