# SPDX-License-Identifier: Apache-2.0
"""A recording as a page."""

from __future__ import annotations

import math
from html import escape
from typing import Dict, List, Mapping

from ..monitor import (
    BatchRepeated,
    BatchThrownAway,
    LayerRow,
    Overflowed,
    Recording,
    ScaleChanged,
    TrainingBegan,
    UpdateEnded,
)
from .layers import data_table, layer_maps, layer_table, worst_underflow
from .pieces import Points, curve, document, section, table, time_line
from .text import by_cause, in_words, percent, power, short
from .timeline import Timeline

# Of a table.
_MOST_ROWS = 60
_MOST_CHANGES = 10


def page_of(recording: Recording, title: str) -> str:
    """One HTML page about a recorded training: nothing else is needed to look at it.

    Raises:
        ValueError: nothing was recorded.
    """
    timeline, layers = Timeline.of(recording), recording.by_layer()
    sections = [
        *layer_maps(layers, timeline),
        _incidents(recording, timeline),
        *_scale_and_loss(recording, timeline),
    ]
    if layers:
        sections += [layer_table(layers, recording), *data_table(layers)]
    settings = list(settings_of(recording).items())
    if settings:
        sections.append(
            section(
                "Settings",
                "What the updater was made with.",
                table("What was set", ("setting", "value"), settings, words=True),
            )
        )
    return document(title, _facts(recording, timeline), *sections)


def settings_of(recording: Recording) -> Dict[str, str]:
    """With which settings the recorded training began, or was resumed last; empty if it is not recorded."""
    began = recording.of(TrainingBegan)
    if not began:
        return {}
    return {"date": began[-1].date, "nnabla_adaloss": began[-1].version, **began[-1].settings}


def loss_scales(recording: Recording) -> Points:
    """Iterations and the global loss scale S0 after them, wherever it is known."""
    found = {}
    for row in recording.rows:
        if isinstance(row, UpdateEnded):
            found[row.iteration] = row.scale
        elif isinstance(row, ScaleChanged):
            found[row.iteration] = row.after
    return list(found.items())


def losses(recording: Recording) -> Points:
    """Iterations and the loss in them."""
    return [(row.iteration, row.loss) for row in recording.of(UpdateEnded)]


def _facts(recording: Recording, timeline: Timeline) -> str:
    lost, underflows = recording.lost_batches(), recording.underflows()
    facts = [
        (f"{timeline.first:,} to {timeline.last:,}", "iterations recorded"),
        (f"{sum(lost.values()):,}", "batches lost" + (f": {by_cause(lost)}" if lost else "")),
        (f"{len(recording.of(BatchRepeated)):,}", "times a batch was repeated"),
    ]
    if underflows:
        worst = underflows[0]
        when = f"since iteration {worst.since}" if worst.until is None else f"up to iteration {worst.until}"
        when += f": more than 1 % in {percent(worst.share)} of the iterations"
        facts.append((percent(worst.worst), f"of the gradient of {worst.layer} underflowed at worst, {when}"))
    elif worst_underflow(recording.of(LayerRow)) is not None:
        facts.append(("none", "of the layers lost more than 1 % to underflow"))
    items = "".join(f"<li><b>{escape(number)}</b> {escape(what)}</li>\n" for number, what in facts)
    return f'<ul class="facts">\n{items}</ul>\n'


def _incidents(recording: Recording, timeline: Timeline) -> str:
    overflows, repeats = recording.of(Overflowed), recording.of(BatchRepeated)
    lost = recording.of(BatchThrownAway)
    marks = (
        ("gradients overflowed", "triangle", [row.iteration for row in overflows]),
        ("batch repeated", "ring", [row.iteration for row in repeats]),
        ("batch lost", "cross", [row.iteration for row in lost]),
    )
    incidents = [(row.iteration, "batch repeated", row.cause, row.layers, "") for row in repeats]
    for gone in lost:
        what = "1 batch lost" if gone.batches == 1 else f"{gone.batches:,} batches lost"
        incidents.append((gone.iteration, what, gone.cause, gone.layers, gone.detail))
    incidents.sort(key=lambda incident: incident[0])
    rows = [
        (f"{iteration:,}", what, in_words(cause), layers[0] if layers else "", detail)
        for iteration, what, cause, layers, detail in incidents[-_MOST_ROWS:]
    ]
    caption = f"Repeated and lost batches: {len(incidents)}"
    if len(incidents) > _MOST_ROWS:
        caption += f", of which these are the last {_MOST_ROWS}"
    head = ("iteration", "what", "why", "first bad layer", "what was wrong in forward")
    return section(
        "Overflows, repeats, lost batches",
        "A batch whose gradients overflow runs again with a lower scale, and is lost if that does not help.",
        time_line(marks, timeline),
        table(caption, head, rows, words=True) if rows else "",
    )


def scale_section(lines: Mapping[str, Points], timeline: Timeline, *tables: str) -> str:
    """The loss scale S0 of one run, or of two by their names."""
    explanation = "What the loss's own gradient, 1, is multiplied by. Heights are powers of two."
    picture = curve(lines, timeline, power, logarithmic=True, steps=True)
    return section("Loss scale S0", explanation, picture, *tables)


def loss_section(lines: Mapping[str, Points], timeline: Timeline, *tables: str) -> str:
    """The loss of one run, or of two by their names."""
    values = [value for points in lines.values() for _, value in points if math.isfinite(value)]
    decades = bool(values) and min(values) > 0.0 and max(values) > 20.0 * min(values)
    explanation = "The loss of each iteration's last batch, as stored."
    if decades:
        explanation += " Equal heights are equal ratios."
    picture = curve(lines, timeline, short, logarithmic=decades, steps=False)
    return section("Loss", explanation, picture, *tables)


def _scale_and_loss(recording: Recording, timeline: Timeline) -> List[str]:
    """The loss scale and the loss as curves and tables."""
    found, scales, points = [], loss_scales(recording), losses(recording)
    if scales:
        changes = [scales[0], *(b for a, b in zip(scales, scales[1:]) if a[1] != b[1])]
        times = f"{len(changes) - 1:,} time{'' if len(changes) == 2 else 's'}"
        caption = f"Where S0 changed: {times} after the first"
        if len(changes) > _MOST_CHANGES:
            caption += f"; these are the last {_MOST_CHANGES}"
        rows = [(f"{iteration:,}", power(value)) for iteration, value in changes[-_MOST_CHANGES:]]
        found.append(scale_section({"S0": scales}, timeline, table(caption, ("iteration", "S0"), rows)))
    if points:
        some = sorted({len(points) * i // 9 if i < 9 else len(points) - 1 for i in range(10)})
        rows = [(f"{points[i][0]:,}", f"{points[i][1]:.4g}") for i in some]
        found.append(
            loss_section(
                {"loss": points}, timeline, table("The loss at some iterations", ("iteration", "loss"), rows)
            )
        )
    return found
