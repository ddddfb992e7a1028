# SPDX-License-Identifier: Apache-2.0
"""A recording as a page."""

from __future__ import annotations

from html import escape
from typing import List, Optional, Sequence

from ..monitor import BatchRepeated, BatchThrownAway, LayerRow, Overflowed, Recording, Underflow, UpdateEnded
from ..monitor.exports import loss_scales
from .advice import advice, why
from .layer_maps import layer_maps
from .pieces import Marks, curve, document, section, spans_decades, table, time_line
from .text import by_cause, count, in_words, percent, power, short
from .timeline import Timeline

# Of a table.
_MOST_ROWS = 60
_MOST_CHANGES = 10
_WHICH_LAYERS = (
    "Listed are layers that multiply by a weight and pass a gradient on: not the first one, which reads the "
    "data, and none that AdaLossConfig(include=, exclude=) or Recorder(layers=) excludes."
)


def page_of(recording: Recording, title: str) -> str:
    """One HTML page about a recorded training: nothing else is needed to look at it.

    Args:
        recording: what was recorded.
        title: its heading.

    Raises:
        ValueError: nothing was recorded.
    """
    timeline = Timeline.of(recording)
    layers = list(recording.by_layer().values())
    sections = [*layer_maps(layers, timeline), _incidents(recording, timeline)]
    sections += [*_loss_scale(recording, timeline), *_loss(recording, timeline)]
    if layers:
        sections += [_layer_table(layers, recording), *_data_table(layers)]
    return document(title, _facts(recording, timeline), *sections)


def _facts(recording: Recording, timeline: Timeline) -> str:
    lost, underflows = recording.lost_batches(), recording.underflows()
    worst = underflows[0] if underflows else None
    known = any(row.underflow is not None for row in recording.of(LayerRow))
    facts = [
        (f"{timeline.first:,} to {timeline.last:,}", "iterations recorded"),
        (f"{sum(lost.values()):,}", "batches lost" + (f": {by_cause(lost)}" if lost else "")),
        (f"{len(recording.of(BatchRepeated)):,}", "times a batch was repeated"),
    ]
    if worst is not None:
        when = f"since iteration {worst.since}" if worst.until is None else f"up to iteration {worst.until}"
        when += f": more than 1 % in {percent(worst.share)} of the iterations"
        facts.append((percent(worst.worst), f"of the gradient of {worst.layer} underflowed at worst, {when}"))
    elif known:
        facts.append(("none", "of the layers lost more than 1 % to underflow"))
    items = "".join(f"<li><b>{escape(number)}</b> {escape(what)}</li>\n" for number, what in facts)
    return f'<ul class="facts">\n{items}</ul>\n'


def _incidents(recording: Recording, timeline: Timeline) -> str:
    overflows, repeats = recording.of(Overflowed), recording.of(BatchRepeated)
    lost = recording.of(BatchThrownAway)
    marks = (
        Marks("gradients overflowed", "triangle", [row.iteration for row in overflows]),
        Marks("batch repeated", "ring", [row.iteration for row in repeats]),
        Marks("batch lost", "cross", [row.iteration for row in lost]),
    )
    rows = [(row.iteration, "batch repeated", in_words(row.cause), _first(row.layers), "") for row in repeats]
    for gone in lost:
        what = f"{count(gone.batches, 'batch', 'batches')} lost"
        rows.append((gone.iteration, what, in_words(gone.cause), _first(gone.layers), gone.detail))
    rows.sort(key=lambda row: row[0])
    caption = f"Repeated and lost batches: {len(rows)}"
    if len(rows) > _MOST_ROWS:
        caption += f", of which these are the last {_MOST_ROWS}"
    written = [(f"{iteration:,}", *rest) for iteration, *rest in rows[-_MOST_ROWS:]]
    head = ("iteration", "what", "why", "first bad layer", "what was wrong in forward")
    return section(
        "Overflows, repeats, lost batches",
        "A batch whose gradients overflow runs again with a lower scale, and is lost if that does not help.",
        time_line(marks, timeline),
        table(caption, head, written, words=True) if rows else "",
    )


def _first(layers: Sequence[str]) -> str:
    return layers[0] if layers else ""


def _loss_scale(recording: Recording, timeline: Timeline) -> List[str]:
    points = loss_scales(list(recording.rows))
    if not points:
        return []
    values = [value for _, value in points]
    alt_text = f"S0: {power(values[0])} at first, {power(values[-1])} at the end"
    alt_text += f", from {power(min(values))} to {power(max(values))}"
    changes = [points[0], *(b for a, b in zip(points, points[1:]) if a[1] != b[1])]
    caption = f"Where S0 changed: {count(len(changes) - 1, 'time')} after the first"
    if len(changes) > _MOST_CHANGES:
        caption += f"; these are the last {_MOST_CHANGES}"
    rows = [(f"{iteration:,}", power(value)) for iteration, value in changes[-_MOST_CHANGES:]]
    picture = curve([points], timeline, power, alt_text, logarithmic=True, steps=True)
    explanation = "The scale of the gradient behind the loss. Heights are powers of two."
    return [section("Loss scale S0", explanation, picture, table(caption, ("iteration", "S0"), rows))]


def _loss(recording: Recording, timeline: Timeline) -> List[str]:
    points = [(row.iteration, row.loss) for row in recording.of(UpdateEnded)]
    if not points:
        return []
    logarithmic = spans_decades(value for _, value in points)
    alt_text = f"loss: {points[0][1]:.4g} at first, {points[-1][1]:.4g} at the end"
    some = sorted({len(points) * i // 9 if i < 9 else len(points) - 1 for i in range(10)})
    rows = [(f"{points[i][0]:,}", f"{points[i][1]:.4g}") for i in some]
    picture = curve([points], timeline, short, alt_text, logarithmic=logarithmic, steps=False)
    explanation = "The loss of each iteration's last batch, as stored."
    if logarithmic:
        explanation += " Equal heights are equal ratios."
    return [
        section(
            "Loss", explanation, picture, table("The loss at some iterations", ("iteration", "loss"), rows)
        )
    ]


def _layer_table(layers: Sequence[List[LayerRow]], recording: Recording) -> str:
    underflows = {u.layer: u for u in recording.underflows()}
    rows = []
    for of_layer in layers:
        last, under = of_layer[-1], underflows.get(of_layer[-1].layer)
        scales = [row.scale for row in of_layer]
        rows.append(
            (
                last.layer,
                power(last.alpha),
                power(last.scale),
                f"{power(min(scales))} to {power(max(scales))}",
                why(of_layer) or "not recorded",
                percent(last.underflow),
                percent(max((row.underflow for row in of_layer if row.underflow is not None), default=None)),
                "" if under is None else _stretch(under),
                percent(_share(last.subnormals, last.elements)),
                percent(_share(last.zeros, last.elements)),
                "–" if last.headroom is None else f"{last.headroom:.1f}",
                f"{sum(bool(row.nonfinite) for row in of_layer):,}",
            )
        )
    head = (
        *("layer", "alpha", "S", "S, range", "why this alpha", "underflow", "underflow at worst"),
        *("more than 1 %", "subnormal", "zero", "headroom, bits", "iterations not finite"),
    )
    advised = [f"<li>{escape(found)}</li>\n" for found in map(advice, layers) if found is not None]
    return section(
        "Layers in numbers",
        "At the last recorded iteration, unless stated otherwise. In brackets: the share of iterations with "
        f"more than 1 % underflow in that stretch. {_WHICH_LAYERS}",
        f"<ul>\n{''.join(advised)}</ul>\n" if advised else "",
        table("The layers, from the loss backwards", head, rows),
    )


def _data_table(layers: Sequence[List[LayerRow]]) -> List[str]:
    """Weights and activations, where they were recorded."""
    rows = []
    for of_layer in layers:
        looked_at = [row for row in of_layer if row.weight_max is not None or row.input_max is not None]
        if looked_at:
            cells = [looked_at[0].layer]
            for name in ("weight", "input"):
                largest = [value for row in looked_at if (value := getattr(row, f"{name}_max")) is not None]
                cells.append(short(max(largest)) if largest else "–")
                cells.append(percent(getattr(looked_at[-1], f"{name}_subnormal")))
            rows.append(cells)
    if not rows:
        return []
    head = ("layer", "largest weight", "weights subnormal", "largest input", "inputs subnormal")
    explanation = (
        "The largest magnitude over all iterations, and the share of the nonzero elements that are below the "
        "format's normal range at the last one. Weights are without scale; a layer's input is what its "
        "weight is multiplied by."
    )
    caption = "Weights and inputs of the layers, from the loss backwards"
    return [section("Weights and activations", explanation, table(caption, head, rows))]


def _stretch(under: Underflow) -> str:
    when = f"from {under.since:,}" if under.until is None else f"{under.since:,} to {under.until:,}"
    return f"{when} ({percent(under.share)})"


def _share(part: Optional[int], whole: Optional[int]) -> Optional[float]:
    return part / whole if part is not None and whole else None
