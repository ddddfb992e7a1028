# SPDX-License-Identifier: Apache-2.0
"""Two recordings on one page, what differs between them first."""

from __future__ import annotations

import math
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..monitor import BatchRepeated, LayerRow, Recording, UpdateEnded
from ..monitor.exports import loss_scales
from .layer_maps import layer_maps
from .pieces import curve, document, line_names, section, spans_decades, table
from .text import by_cause, percent, power, short
from .timeline import Timeline


class Run(NamedTuple):
    """One of the two.

    Attributes:
        name: what it is called on the page.
        recording: what was recorded.
    """

    name: str
    recording: Recording


def comparison_of(first: Run, second: Run, title: str) -> str:
    """One HTML page that shows two recorded trainings beside each other.

    Args:
        first: one of them.
        second: the other.
        title: the heading of the page.

    Raises:
        ValueError: nothing was recorded in one of them.
    """
    runs = (first, second)
    for run in runs:
        if not run.recording.rows:
            raise ValueError(f"nothing was recorded in {run.name}: there is nothing to compare")
    timeline = Timeline.of(Recording(row for run in runs for row in run.recording.rows))
    rows = [run.recording.by_layer() for run in runs]
    names = _by_difference(*rows)
    sections = [_whole_runs(runs)]
    if names:
        sections.append(_layers(names, runs, rows))
    sections += _curves(runs, timeline)
    if names:
        beside = [_renamed(of[name], run.name) for name in names for run, of in zip(runs, rows) if name in of]
        sections += layer_maps(beside, timeline)
    return document(title, *sections)


def _whole_runs(runs: Sequence[Run]) -> str:
    facts = [_facts(run.recording) for run in runs]
    pairs = [(what, *(of[what] for of in facts)) for what in facts[0]]
    differs = [pair for pair in pairs if pair[1] != pair[2]]
    same = [pair for pair in pairs if pair[1] == pair[2]]
    head = ("", *(run.name for run in runs))
    tables = [
        table(caption, head, found) for caption, found in (("Differs", differs), ("Same", same)) if found
    ]
    return section("The runs", "What differs comes first.", *tables)


def _facts(recording: Recording) -> Dict[str, str]:
    """What is known of a run as a whole."""
    iterations = [row.iteration for row in recording.rows]
    losses = [row.loss for row in recording.of(UpdateEnded)]
    scales = [scale for _, scale in loss_scales(list(recording.rows))]
    lost, underflows = recording.lost_batches(), recording.underflows()
    known = any(row.underflow is not None for row in recording.of(LayerRow))
    return {
        "iterations recorded": f"{min(iterations):,} to {max(iterations):,}",
        "loss at the end": f"{losses[-1]:.4g}" if losses else "–",
        "batches lost": f"{sum(lost.values()):,}" + (f": {by_cause(lost)}" if lost else ""),
        "batches repeated": f"{len(recording.of(BatchRepeated)):,}",
        "loss scale S0 at the end": power(scales[-1]) if scales else "–",
        "S0, range": f"{power(min(scales))} to {power(max(scales))}" if scales else "–",
        "layers recorded": f"{len(recording.layers):,}",
        "layers that lost more than 1 % to underflow": f"{len(underflows):,}" if known else "–",
        "worst underflow": f"{percent(underflows[0].worst)}, {underflows[0].layer}" if underflows else "–",
    }


def _by_difference(first: Dict[str, List[LayerRow]], second: Dict[str, List[LayerRow]]) -> List[str]:
    """All layers: those of one run alone, then by what differs most in underflow, and in alpha."""

    def difference(name: str) -> Tuple[bool, float, float]:
        if name not in first or name not in second:
            return True, 0.0, 0.0
        a, b = first[name], second[name]
        underflow = abs((_worst(a) or 0.0) - (_worst(b) or 0.0))
        return False, underflow, abs(math.log2(a[-1].alpha / b[-1].alpha))

    return sorted(dict.fromkeys([*first, *second]), key=difference, reverse=True)


def _worst(rows: Sequence[LayerRow]) -> Optional[float]:
    return max((row.underflow for row in rows if row.underflow is not None), default=None)


def _renamed(rows: Sequence[LayerRow], run: str) -> List[LayerRow]:
    return [row._replace(layer=f"{row.layer}, {run}") for row in rows]


def _layers(names: Sequence[str], runs: Sequence[Run], rows: Sequence[Dict[str, List[LayerRow]]]) -> str:
    columns: List[Tuple[str, Callable[[List[LayerRow]], str]]] = [
        ("alpha", lambda of: power(of[-1].alpha)),
        ("S", lambda of: power(of[-1].scale)),
        ("underflow at worst", lambda of: percent(_worst(of))),
    ]
    head = ["layer", *(f"{what}, {run.name}" for what, _ in columns for run in runs)]
    body = [
        [name, *(written(of[name]) if name in of else "–" for _, written in columns for of in rows)]
        for name in names
    ]
    return section(
        "Layers",
        "Scales at the last iteration that was recorded. First come layers that only one run has, then those "
        "whose underflow differs most, then those whose alpha does.",
        table("The layers", head, body),
    )


def _curves(runs: Sequence[Run], timeline: Timeline) -> List[str]:
    """Loss scale and loss of both runs."""
    scales = [loss_scales(list(run.recording.rows)) for run in runs]
    losses = [[(row.iteration, row.loss) for row in run.recording.of(UpdateEnded)] for run in runs]
    key = line_names([run.name for run in runs])
    found = []
    if any(scales):
        alt_text = _ends(runs, scales, power)
        picture = curve(scales, timeline, power, alt_text, logarithmic=True, steps=True)
        found.append(section("Loss scale S0", "Heights are powers of two.", key, picture))
    if any(losses):
        logarithmic = spans_decades(value for points in losses for _, value in points)
        alt_text = _ends(runs, losses, short)
        picture = curve(losses, timeline, short, alt_text, logarithmic=logarithmic, steps=False)
        explanation = "Equal heights are equal ratios." if logarithmic else ""
        found.append(section("Loss", f"Of the last batch of each iteration. {explanation}", key, picture))
    return found


def _ends(
    runs: Sequence[Run], lines: Sequence[Sequence[Tuple[int, float]]], written: Callable[[float], str]
) -> str:
    """Where the lines begin and end, in words."""
    return "; ".join(
        f"{run.name}: {written(points[0][1])} at first, {written(points[-1][1])} at the end"
        for run, points in zip(runs, lines)
        if points
    )
