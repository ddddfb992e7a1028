# SPDX-License-Identifier: Apache-2.0
"""Page of one recording, and page that compares two, differences first."""

from __future__ import annotations

import math
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ..core.power_of_two import scale_text
from ..monitor import events
from ..monitor.recording import Recording
from ..monitor.rows import LayerRow
from . import pieces
from .layers import COLUMNS, all_advice, layer_tables, scale_maps, stretch, underflow_map, worst_underflow
from .pieces import Points, Timeline, percent

_MOST_ROWS = 60  # of the table of lost and repeated batches
_MOST_CHANGES = 10  # rows of the table of S0


def page_of(recording: Recording, name: str, title: Optional[str] = None) -> str:
    """Render a recorded training as one self-contained HTML page; `name`, its file's, is above the title."""
    timeline, layers = Timeline.of(recording), recording.by_layer()
    settings = _settings_of(recording)
    # Without a storage, the precision is that of the context.
    precision = settings.get("storage", "None")
    precision = settings.get("context", "") if precision == "None" else precision
    version = [f"nnabla_adaloss {settings['nnabla_adaloss']}"] if settings else []
    return pieces.document(
        title or " in ".join(filter(None, ("Training", precision))),
        [name, *_began(recording), *version],
        _headline(recording),
        all_advice(layers),
        underflow_map(layers, timeline),
        _scale_and_loss({"": recording}, timeline),
        _incidents(recording, timeline),
        *scale_maps(layers, timeline),
        *layer_tables(layers),
        pieces.section("Settings", "", pieces.definitions(settings.items(), "facts")) if settings else "",
    )


def _began(recording: Recording) -> List[str]:
    """Date on which the recorded training began or was last resumed; empty if not recorded."""
    return [f"{began.date[:10]} {began.date[11:16]}" for began in recording.of(events.TrainingBegan)][-1:]


def _settings_of(recording: Recording) -> Dict[str, str]:
    """Settings of the recorded training; empty if not recorded."""
    began = recording.of(events.TrainingBegan)
    return {"nnabla_adaloss": began[-1].version, **began[-1].settings} if began else {}


def _loss_scales(recording: Recording) -> Points:
    """Iterations and the global loss scale S0 after each, where known."""
    scales = {
        row.iteration: row.scale if isinstance(row, events.UpdateEnded) else row.after
        for row in recording.rows
        if isinstance(row, (events.UpdateEnded, events.ScaleChanged))
    }
    return list(scales.items())


def _losses(recording: Recording) -> Points:
    """Iterations and the loss in them."""
    return [(row.iteration, row.loss) for row in recording.of(events.UpdateEnded)]


def _headline(recording: Recording) -> str:
    """The layer with the worst underflow, and numbers of the whole training."""
    underflows, facts = recording.underflows(), _facts(recording)
    if underflows:
        worst, others = underflows[0], len(underflows) - 1
        lost = f"{worst.layer} lost up to {percent(worst.worst)} of its gradient to underflow"
        finding = f"{lost}, more than 1 % in {stretch(worst, ' recorded iterations')}."
        finding += f" {others} more layer{'s' * (others > 1)} lost more than 1 %." if others else ""
    elif worst_underflow(recording.of(LayerRow)) is None:
        finding = "Underflow was not counted."
    else:
        finding = "No layer lost more than 1 % of its gradient to underflow."
    shown = ("recorded iterations", "lost batches", "repeated batches")
    numbers = pieces.definitions(((name, facts[name]) for name in shown), "facts")
    return pieces.paragraph(finding, "finding") + numbers


def _incidents(recording: Recording, timeline: Timeline) -> str:
    """Section with overflows, repeats and lost batches, over the iterations and one by one."""
    kinds = (events.Overflowed, events.BatchRepeated, events.BatchThrownAway)
    happened = [[row.iteration for row in recording.rows if isinstance(row, kind)] for kind in kinds]
    names = ("gradients overflowed", "batch repeated", "batch lost")
    marks = zip(names, ("triangle", "ring", "cross"), happened)
    incidents = [row for row in recording.rows if isinstance(row, kinds[1:])]  # how overflows ended
    rows = []
    for row in incidents[-_MOST_ROWS:]:
        what, detail = "batch repeated", ""
        if isinstance(row, events.BatchThrownAway):
            what = "1 batch lost" if row.batches == 1 else f"{row.batches:,} batches lost"
            detail = row.detail
        rows.append((f"{row.iteration:,}", what, pieces.in_words(row.cause), "".join(row.layers[:1]), detail))
    caption = f"Repeated and lost batches: {len(incidents)}"
    if len(incidents) > _MOST_ROWS:
        caption += f", of which these are the last {_MOST_ROWS}"
    head = ("iteration", "what", "why", "first bad layer", "not finite in forward")
    return pieces.section(
        "Overflows, repeats, lost batches",
        "A batch whose gradients overflow runs again with a lower scale, and is lost if that does not help. "
        "The first batch runs until its gradients are measured.",
        pieces.mark_rows(marks, timeline) if any(happened) else pieces.paragraph("None."),
        pieces.table(caption, head, rows, words=True) if rows else "",
    )


def _scale_and_loss(runs: Mapping[str, Recording], timeline: Timeline) -> str:
    """Sections with the loss scale and the loss, of one run or of two by their names."""
    scales = {name or "S0": _loss_scales(run) for name, run in runs.items()}
    losses = {name or "loss": _losses(run) for name, run in runs.items()}
    sections = ""
    if any(scales.values()):
        sections += pieces.section(
            "Loss scale S0",
            "The scale with which the gradient leaves the loss. Heights are powers of two.",
            pieces.curve(scales, timeline, scale_text, logarithmic=True, steps=True),
            _changes(*scales.values()) if len(runs) == 1 else "",
        )
    if any(losses.values()):
        values = [value for line in losses.values() for _, value in line if math.isfinite(value)]
        decades = bool(values) and min(values) > 0.0 and max(values) > 20.0 * min(values)
        sections += pieces.section(
            "Loss",
            "The loss of each iteration's last batch, as stored."
            + " Equal heights are equal ratios." * decades,
            pieces.curve(losses, timeline, "{:.3g}".format, logarithmic=decades, steps=False),
        )
    return sections


def _changes(scales: Points) -> str:
    """Table of the iterations in which S0 changed, folded; empty if it never did."""
    changes = [scales[0], *(b for a, b in zip(scales, scales[1:]) if a[1] != b[1])]
    if len(changes) == 1:
        return ""
    caption = f"Where S0 changed: {len(changes) - 1:,} time{'s' * (len(changes) > 2)} after the first"
    if len(changes) > _MOST_CHANGES:
        caption += f"; these are the last {_MOST_CHANGES}"
    rows = [(f"{iteration:,}", scale_text(value)) for iteration, value in changes[-_MOST_CHANGES:]]
    return pieces.folded(caption, pieces.table("S0 from these iterations on", ("iteration", "S0"), rows))


def comparison_of(runs: Dict[str, Recording], title: str) -> str:
    """Render two recorded trainings side by side, by their names, as one HTML page."""
    timeline = Timeline.of(Recording(row for recording in runs.values() for row in recording.rows))
    rows = {name: recording.by_layer() for name, recording in runs.items()}
    layers = _by_difference(*rows.values())
    beside = {f"{layer}, {run}": of[layer] for layer in layers for run, of in rows.items() if layer in of}
    alike = _whole_runs(runs, same=True)
    return pieces.document(
        title,
        [": ".join([name, *_began(run)]) for name, run in runs.items()],
        pieces.section("Differences", "– is not recorded, or not in use.", *_whole_runs(runs, same=False)),
        pieces.folded("Equal in both", *alike) if alike else "",
        _scale_and_loss(runs, timeline),
        _layers(layers, rows) if layers else "",
        underflow_map(beside, timeline) if layers else "",
        *scale_maps(beside, timeline),
    )


def _whole_runs(runs: Dict[str, Recording], *, same: bool) -> List[str]:
    """Tables of settings and results that are the same, or that differ."""
    tables = []
    for what, of in (("Setting", _settings_of), ("Result", _facts)):
        one, two = map(of, runs.values())
        pairs = {name: (one.get(name, "–"), two.get(name, "–")) for name in {**one, **two}}
        rows = [(name, *pair) for name, pair in pairs.items() if (pair[0] == pair[1]) == same]
        if rows:
            caption = f"{what}s that {'are the same' if same else 'differ'}"
            tables.append(pieces.table(caption, (what.lower(), *runs), rows, words=True))
    return tables


def _facts(recording: Recording) -> Dict[str, str]:
    """Facts about a run as a whole."""
    iterations = [row.iteration for row in recording.rows]
    loss, scales = _losses(recording), [scale for _, scale in _loss_scales(recording)]
    lost, underflows = recording.lost_batches(), recording.underflows()
    causes = ", ".join(f"{number} {pieces.in_words(cause)}" for cause, number in lost.items())
    counted = [(row.underflow, row.layer) for row in recording.of(LayerRow) if row.underflow is not None]
    worst, layer = max(counted, default=(None, ""))
    return {
        "recorded iterations": f"{min(iterations):,} to {max(iterations):,}",
        "loss at the end": f"{loss[-1][1]:.4g}" if loss else "–",
        "lost batches": f"{sum(lost.values()):,}" + (f" ({causes})" if lost else ""),
        "repeated batches": f"{len(recording.of(events.BatchRepeated)):,}",
        "loss scale S0 at the end": scale_text(scales[-1]) if scales else "–",
        "S0, range": pieces.extent(scales) if scales else "–",
        "layers recorded": f"{len(recording.layers):,}",
        "layers that lost more than 1 % to underflow": f"{len(underflows):,}" if counted else percent(None),
        "worst underflow": f"{percent(worst)}, {layer}" if counted else percent(None),
    }


def _by_difference(first: Dict[str, List[LayerRow]], second: Dict[str, List[LayerRow]]) -> List[str]:
    """Layers of both runs: those of one run alone, then by difference in underflow, then in alpha."""

    def difference(name: str) -> Tuple[bool, float, float]:
        if name not in first or name not in second:
            return True, 0.0, 0.0
        a, b = first[name], second[name]
        underflow = abs((worst_underflow(a) or 0.0) - (worst_underflow(b) or 0.0))
        return False, underflow, abs(math.log2(a[-1].alpha) - math.log2(b[-1].alpha))

    return sorted(dict.fromkeys([*first, *second]), key=difference, reverse=True)


def _layers(names: Sequence[str], rows: Dict[str, Dict[str, List[LayerRow]]]) -> str:
    """Section with the layers of both runs side by side."""
    columns = ("alpha", "S", "worst underflow")
    body = [
        (name, *(COLUMNS[what](of[name]) if name in of else "–" for what in columns for of in rows.values()))
        for name in names
    ]
    return pieces.section(
        "Layers",
        "Scales at the last iteration that was recorded. First come layers that only one run has, then those "
        "whose underflow differs most, then those whose alpha does.",
        pieces.table("The layers", ("layer", *(f"{what}, {run}" for what in columns for run in rows)), body),
    )
