# SPDX-License-Identifier: Apache-2.0
"""Scales and underflow of layers over the iterations, as heat maps."""

from __future__ import annotations

import math
from typing import List, Sequence

from ..monitor import LayerRow
from .pieces import HeatRow, Legend, heat_map, section
from .text import percent, power
from .timeline import Timeline


def layer_maps(layers: Sequence[List[LayerRow]], timeline: Timeline) -> List[str]:
    """Sections that show accumulated scales, alphas and underflow over the iterations.

    Args:
        layers: the rows of each layer, in the order in which they are drawn.
        timeline: the columns of the page.
    """
    if not layers:
        return [section("Layers", "No layer was recorded.")]
    found = [
        section(
            "Accumulated scale S",
            "What each layer's gradient is multiplied by when it is stored: dark for the smallest scale, "
            "light for the largest, hatched where nothing was recorded.",
            _scales(layers, timeline, "scale"),
        ),
        section(
            "Layer scales alpha",
            "What each layer multiplies it by.",
            _scales(layers, timeline, "alpha"),
        ),
    ]
    known = [rows for rows in layers if any(row.underflow is not None for row in rows)]
    explanation = (
        "The share of nonzero gradient elements that became zero when stored. Dark is none."
        if known
        else "Not known: only emulated storage counts it. Zeros and subnormals are in the table below."
    )
    rows = [
        HeatRow(
            of_layer[-1].layer,
            timeline.cells((row.iteration, row.underflow) for row in of_layer),
            f"{of_layer[-1].layer}: {percent(of_layer[-1].underflow)} at the end, "
            f"{percent(max((row.underflow or 0.0) for row in of_layer))} at worst",
        )
        for of_layer in known
    ]
    legend = Legend(_place_of_share, ("none", "0.01 %", "1 %", "100 %"))
    found.append(section("Underflow", explanation, heat_map(rows, legend, timeline) if rows else ""))
    return found


def _place_of_share(share: float) -> float:
    # Evenly from one in a million to all; less is drawn as none.
    return 1.0 + math.log10(share) / 6.0 if share > 1e-6 else 0.0


def _scales(layers: Sequence[List[LayerRow]], timeline: Timeline, name: str) -> str:
    values = [math.log2(getattr(row, name)) for rows in layers for row in rows]
    low, high = min(values), max(values)
    if low == high:
        return f"<p>{power(2.0**low)} for each layer, throughout.</p>\n"
    rows = []
    for of_layer in layers:
        own = [getattr(row, name) for row in of_layer]
        alt_text = f"{power(own[-1])} at the end, from {power(min(own))} to {power(max(own))}"
        cells = timeline.cells((row.iteration, math.log2(getattr(row, name))) for row in of_layer)
        rows.append(HeatRow(of_layer[-1].layer, cells, f"{of_layer[-1].layer}: {alt_text}"))
    middle = (low + high) / 2
    labels = [power(2.0**value) for value in (low, middle, high) if value != middle or value.is_integer()]
    return heat_map(rows, Legend(lambda value: (value - low) / (high - low), labels), timeline)
