# SPDX-License-Identifier: Apache-2.0
"""Layers on a page: underflow and scales over the iterations, numbers, and advice."""

from __future__ import annotations

import math
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from ..core.layer_record import Reason
from ..core.power_of_two import scale_text
from ..monitor.recording import Recording, Underflow
from ..monitor.rows import LayerRow
from . import pieces
from .pieces import Lines, Timeline, percent

_HARMLESS = 1e-3  # a smaller share of underflow harms no training and is drawn as zero
_LEAST_SPAN = 10  # bits from the darkest to the lightest colour of scales; even
_LARGELY = 0.5  # share of a gradient's elements from which it counts as largely subnormal
_UNUSED = 2.0  # unused bits of headroom from which advice is worth giving
_MOST_ADVICE = 3  # more is folded
_WIDER = "store gradients in a wider format, such as bfloat16"
_SHARED = f"Other gradients share its scale and need that headroom: {_WIDER}"
_REMEDIES: Mapping[str, str] = {
    **dict.fromkeys((Reason.SCALE_LIMIT, Reason.EQUALIZED, Reason.BRANCHES), _SHARED),
    Reason.WEIGHT_RANGE: "The scaled copy of its weight would overflow: store weights in a wider format, "
    "such as bfloat16",
    Reason.SCALE_BOUND: "Raise AdaLossConfig(scale_upper_bound=...)",
    Reason.ACCUMULATED_BOUND: "Raise AdaLossConfig(accum_upper_bound=...)",
}
_OTHERWISE = 'Try AdaLossConfig(loss_scale_method="amax_history"), and global_scale="history"'
_NOT_RECORDED = "not recorded"
_MEANINGS: Mapping[str, str] = {
    "alpha": "the layer's own scale, by which it multiplies its input gradient; 1 leaves it as it is",
    "S": "the scale that the input gradient is stored with: alpha times the S that arrives; in brackets its "
    "range over the iterations",
    "loss weight": "factor of the loss on the way to the layer, as a power of two; the smaller it is, the "
    "larger is S",
    Reason.SCALE_LIMIT: "alpha leads to the scale limit of the layer's input gradients",
    Reason.EQUALIZED: "the gradients before and after the layer have nearly the same limit, and share the "
    "smaller one",
    Reason.BRANCHES: "another function adds to the same gradient and determines its scale",
    Reason.METHOD: "loss_scale_method determines this alpha",
    Reason.SCALE_BOUND: "scale_upper_bound allows no larger alpha",
    Reason.ACCUMULATED_BOUND: "accum_upper_bound allows no larger product of alphas",
    Reason.OVERFLOW_GUARD: "with a larger alpha the input gradient could overflow",
    Reason.WEIGHT_RANGE: "with a larger alpha the scaled copy of the weight would overflow",
    Reason.NONFINITE: "the gradient or the weight holds an infinity or a NaN",
    Reason.UNKNOWN: "nothing was measured before",
    _NOT_RECORDED: "alpha was chosen in an iteration that was not recorded, and held since",
    "underflow": "share of the input gradient's nonzero elements that became zero when stored",
    "subnormal": "share of the elements below the format's normal range, which have lost precision",
    "not finite": "iterations in which the input gradient held infinities or NaNs",
    "headroom": "bits from the largest element to the end of the format",
}
_WHICH_LAYERS = (
    "Recorded are layers that pass a gradient on: not the first one, which reads the data, and none that "
    "AdaLossConfig(include=, exclude=) or Recorder(layers=) excludes."
)

Layers = Mapping[str, Sequence[LayerRow]]


def underflow_map(layers: Layers, timeline: Timeline) -> str:
    """Section with the underflow of each layer: a heat map unless all of it is harmless."""
    counted = _lines(layers, "underflow")
    worst = max((share for points in counted.values() for _, share in points), default=None)
    if worst is None:
        text = "Not known: only emulated storage counts it. Zeros and subnormals are in the table below."
        return pieces.section("Underflow", text if layers else "No layer was recorded.")
    if worst <= _HARMLESS:
        much = f"more than {percent(worst)} in an iteration" if worst else "anything"
        return pieces.section("Underflow", f"No layer lost {much}. {_WHICH_LAYERS}")
    return pieces.section(
        "Underflow",
        "Share of the nonzero elements of each layer's input gradient that became zero when stored. Hatched "
        f"is not recorded. {_WHICH_LAYERS}",
        pieces.heat_map(
            counted, timeline, percent, (_HARMLESS, 1.0), ("up to 0.1 %", "1 %", "10 %", "100 %")
        ),
    )


def scale_maps(layers: Layers, timeline: Timeline) -> List[str]:
    """Sections with heat maps of accumulated scales and alphas, a row for each layer."""
    if not layers:
        return []
    return [
        pieces.section(
            "Accumulated scale S",
            "The scale that each layer's input gradient is stored with: the scale at the loss (S0, or "
            "another one for a term with a loss weight), times the alphas of all layers from there on.",
            _scales(_lines(layers, "scale"), timeline),
        ),
        pieces.section(
            "Layer scales alpha",
            "The factor that each layer multiplies its input gradient by; 1 leaves it as it is.",
            _scales(_lines(layers, "alpha"), timeline),
        ),
    ]


def _lines(layers: Layers, field: str) -> Lines:
    """Values of a field over the iterations, of each layer that has any."""
    lines = {
        name: [(row.iteration, value) for row in rows if (value := getattr(row, field)) is not None]
        for name, rows in layers.items()
    }
    return {name: points for name, points in lines.items() if points}


def _scales(lines: Lines, timeline: Timeline) -> str:
    """Heat map of scales by layer, or a list if none of them changes."""
    scales = [scale for points in lines.values() for _, scale in points]
    if all(scale == points[0][1] for points in lines.values() for _, scale in points):
        constant: Dict[str, List[str]] = {}
        for name, points in lines.items():
            constant.setdefault(scale_text(points[0][1]), []).append(name)
        return pieces.paragraph("The same in all iterations:") + pieces.definitions(
            (scale, ", ".join(names)) for scale, names in constant.items()
        )
    low, high = math.floor(math.log2(min(scales))), math.ceil(math.log2(max(scales)))
    # A least span keeps nearly equal scales alike; an even one puts a power of two in the middle.
    missing = max(_LEAST_SPAN, high - low + (high - low) % 2) - (high - low)
    low, high = low - missing // 2, high + missing - missing // 2
    labels = [scale_text(2.0**end) for end in (low, (low + high) // 2, high)]
    return pieces.heat_map(lines, timeline, scale_text, (2.0**low, 2.0**high), labels)


def worst_underflow(rows: Sequence[LayerRow]) -> Optional[float]:
    """The largest share of elements that a layer lost in one pass; None if unknown."""
    return max(_recorded(rows, "underflow"), default=None)


def _recorded(rows: Sequence[LayerRow], field: str) -> List[float]:
    """Recorded values of a field."""
    return [value for row in rows if (value := getattr(row, field)) is not None]


def why(rows: Sequence[LayerRow]) -> str:
    """Reason of a layer's scale at its last recorded measurement, if any."""
    return next((row.reason for row in reversed(rows) if row.reason != Reason.HELD), _NOT_RECORDED)


def all_advice(layers: Layers) -> str:
    """List of advice for layers whose gradients are largely subnormal; may be empty."""
    texts = [text for text in map(advice, layers.values()) if text]
    shown, rest = texts[:_MOST_ADVICE], texts[_MOST_ADVICE:]
    more = pieces.folded(f"{len(rest)} more", pieces.bullets(rest)) if rest else ""
    return pieces.bullets(shown) + more


def advice(rows: Sequence[LayerRow]) -> Optional[str]:
    """Advice for a layer whose gradient is largely subnormal; None for any other."""
    last = rows[-1]
    nonzero = (last.elements or 0) - (last.zeros or 0)
    if not nonzero or last.subnormals is None or last.subnormals < _LARGELY * nonzero:
        return None
    share = percent(last.subnormals / nonzero)
    text = f"{last.layer}: {share} of the nonzero elements are subnormal and have lost precision"
    if last.headroom is None or last.headroom < _UNUSED:
        text += ", and the largest is at the end of the format: no scale keeps both"
        return f"{text}. {_WIDER.capitalize()}."
    remedy = _REMEDIES.get(why(rows), _OTHERWISE)
    return f"{text}; {last.headroom:.0f} bits of headroom are unused. {remedy}."


def stretch(under: Underflow, what: str = "") -> str:
    """Number of iterations in which a layer lost more than 1 %, and their range, as text."""
    until = "on" if under.until is None else f"to {under.until:,}"
    when = f"from {under.since:,} {until}" if under.until != under.since else f"in {under.since:,}"
    return f"{round(under.share * under.iterations):,} of {under.iterations:,}{what}, {when}"


def _scale(rows: Sequence[LayerRow]) -> str:
    """The last S of a layer, and the range of all unless they are equal."""
    scales = _recorded(rows, "scale")
    return scale_text(scales[-1]) + (f" ({pieces.extent(scales)})" if min(scales) < max(scales) else "")


def _share(part: Optional[int], whole: Optional[int]) -> str:
    return percent(part / whole if part is not None and whole else None)


def _largest(values: Sequence[float]) -> str:
    return f"{max(values):.3g}" if values else "–"


Columns = Mapping[str, Callable[[Sequence[LayerRow]], str]]
"""Cells of a layer, by the head of the column."""

COLUMNS: Columns = {
    "alpha": lambda rows: scale_text(rows[-1].alpha),
    "why this alpha": why,
    "S": _scale,
    "loss weight": lambda rows: "–" if rows[-1].loss_weight is None else scale_text(rows[-1].loss_weight),
    "underflow": lambda rows: percent(rows[-1].underflow),
    "worst underflow": lambda rows: percent(worst_underflow(rows)),
    "iterations above 1 %": lambda rows: next(map(stretch, Recording(rows).underflows()), "–"),
    "subnormal": lambda rows: _share(rows[-1].subnormals, rows[-1].elements),
    "zero": lambda rows: _share(rows[-1].zeros, rows[-1].elements),
    "headroom": lambda rows: "–" if rows[-1].headroom is None else f"{rows[-1].headroom:.1f}",
    "not finite": lambda rows: f"{sum(map(bool, _recorded(rows, 'nonfinite'))) or '–'}",
}
_DATA_COLUMNS: Columns = {
    "largest weight": lambda rows: _largest(_recorded(rows, "weight_max")),
    "weights subnormal": lambda rows: percent(next(reversed(_recorded(rows, "weight_subnormal")), None)),
    "largest input": lambda rows: _largest(_recorded(rows, "input_max")),
    "inputs subnormal": lambda rows: percent(next(reversed(_recorded(rows, "input_subnormal")), None)),
}


def layer_tables(layers: Layers) -> List[str]:
    """Sections with a table of the layers, and one of weights and inputs if recorded."""
    if not layers:
        return []
    numbers = pieces.section(
        "Layers in numbers",
        "At the last recorded iteration, unless stated otherwise.",
        _table("The layers, from the loss backwards", COLUMNS, layers),
    )
    with_data = _lines(layers, "weight_max").keys() | _lines(layers, "input_max").keys()
    data = {name: rows for name, rows in layers.items() if name in with_data}
    if not data:
        return [numbers]
    weights = pieces.section(
        "Weights and activations",
        "The largest magnitude over all iterations, and the share of the nonzero elements that are below the "
        "format's normal range at the last one. Weights are without scale; a layer's input is the "
        "array that its weight is multiplied by.",
        _table("Weights and inputs of the layers, from the loss backwards", _DATA_COLUMNS, data),
    )
    return [numbers, weights]


def _table(caption: str, columns: Columns, layers: Layers) -> str:
    """Table of the nonempty columns, with explanations of its words."""
    cells = {name: [written(rows) for rows in layers.values()] for name, written in columns.items()}
    filled = {name: column for name, column in cells.items() if set(column) != {"–"}}
    words = {*filled, *filled.get("why this alpha", ())}
    meanings = pieces.definitions(pair for pair in _MEANINGS.items() if pair[0] in words)
    return meanings + pieces.table(caption, ("layer", *filled), zip(layers, *filled.values()))
