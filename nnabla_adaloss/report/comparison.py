# SPDX-License-Identifier: Apache-2.0
"""Two recordings on one page, what differs between them first."""

from __future__ import annotations

import math
from typing import Dict, List, Sequence, Tuple

from ..monitor import BatchRepeated, LayerRow, Recording
from .layers import COLUMNS, layer_maps, worst_underflow
from .page import loss_scales, losses, scale_and_loss, settings_of
from .pieces import document, section, table
from .text import by_cause, extent, percent, power
from .timeline import Timeline


def comparison_of(runs: Dict[str, Recording], title: str) -> str:
    """One HTML page that shows two recorded trainings, by their names, beside each other."""
    timeline = Timeline.of(Recording(row for recording in runs.values() for row in recording.rows))
    rows = {name: recording.by_layer() for name, recording in runs.items()}
    layers = _by_difference(*rows.values())
    beside = {f"{layer}, {run}": of[layer] for layer in layers for run, of in rows.items() if layer in of}
    differs, alike = _whole_runs(runs)
    return document(
        title,
        section("What differs", "– stands for what was not recorded, or is not in use.", *differs),
        *scale_and_loss(runs, timeline),
        _layers(layers, rows) if layers else "",
        *(layer_maps(beside, timeline) if layers else ()),
        section("What is the same", "Of the runs as a whole.", *alike) if alike else "",
    )


def _whole_runs(runs: Dict[str, Recording]) -> Tuple[List[str], List[str]]:
    """Tables of settings and results that differ, and of those that are the same."""
    found: Dict[Tuple[str, bool], List[Sequence[str]]] = {}
    for subject, of in (("Setting", settings_of), ("Result", _facts)):
        one, two = (of(recording) for recording in runs.values())
        for what in dict.fromkeys([*one, *two]):
            pair = one.get(what, "–"), two.get(what, "–")
            found.setdefault((subject, pair[0] == pair[1]), []).append((what, *pair))
    differs, alike = (
        [
            table(f"{what}s that {verb}", (what.lower(), *runs), found[what, same], words=True)
            for what in ("Setting", "Result")
            if (what, same) in found
        ]
        for same, verb in ((False, "differ"), (True, "are the same"))
    )
    return differs, alike


def _facts(recording: Recording) -> Dict[str, str]:
    """What is known of a run as a whole."""
    iterations = [row.iteration for row in recording.rows]
    loss, scales = losses(recording), [scale for _, scale in loss_scales(recording)]
    lost, underflows = recording.lost_batches(), recording.underflows()
    counted = [(row.underflow, row.layer) for row in recording.of(LayerRow) if row.underflow is not None]
    worst, layer = max(counted, default=(None, ""))
    return {
        "iterations recorded": f"{min(iterations):,} to {max(iterations):,}",
        "loss at the end": f"{loss[-1][1]:.4g}" if loss else "–",
        "batches lost": f"{sum(lost.values()):,}" + (f": {by_cause(lost)}" if lost else ""),
        "batches repeated": f"{len(recording.of(BatchRepeated)):,}",
        "loss scale S0 at the end": power(scales[-1]) if scales else "–",
        "S0, range": extent(scales) if scales else "–",
        "layers recorded": f"{len(recording.layers):,}",
        "layers that lost more than 1 % to underflow": f"{len(underflows):,}" if counted else percent(None),
        "worst underflow": f"{percent(worst)}, {layer}" if counted else percent(None),
    }


def _by_difference(first: Dict[str, List[LayerRow]], second: Dict[str, List[LayerRow]]) -> List[str]:
    """All layers: those of one run alone, then by what differs most in underflow, and in alpha."""

    def difference(name: str) -> Tuple[bool, float, float]:
        if name not in first or name not in second:
            return True, 0.0, 0.0
        a, b = first[name], second[name]
        underflow = abs((worst_underflow(a) or 0.0) - (worst_underflow(b) or 0.0))
        return False, underflow, abs(math.log2(a[-1].alpha) - math.log2(b[-1].alpha))

    return sorted(dict.fromkeys([*first, *second]), key=difference, reverse=True)


def _layers(names: Sequence[str], rows: Dict[str, Dict[str, List[LayerRow]]]) -> str:
    columns = ("alpha", "S", "underflow at worst")
    body = [
        (name, *(COLUMNS[what](of[name]) if name in of else "–" for what in columns for of in rows.values()))
        for name in names
    ]
    return section(
        "Layers",
        "Scales at the last iteration that was recorded. First come layers that only one run has, then those "
        "whose underflow differs most, then those whose alpha does.",
        table("The layers", ("layer", *(f"{what}, {run}" for what in columns for run in rows)), body),
    )
