# SPDX-License-Identifier: Apache-2.0
"""A page and its pieces: heat maps, curves, marks on a time line, tables. All that is given is escaped."""

from __future__ import annotations

import math
from html import escape
from itertools import groupby
from typing import Callable, Iterable, List, Mapping, Optional, Sequence, Tuple

from .style import STYLE, strip
from .timeline import Timeline

Cells = Sequence[Optional[float]]
Points = Sequence[Tuple[int, float]]
"""Iterations with a value each."""

# Columns of a table.
_FIT_A_PHONE = 2

# Places of a picture that show their values where the mouse is.
_MOST_TIPS = 48

# So that colours do not matter.
_SHAPES = {
    "triangle": "M-5 5L0-5L5 5Z",
    "ring": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "cross": "M-5-5L5 5M-5 5L5-5",
}


def document(title: str, *contents: str) -> str:
    """A whole page, which needs nothing else."""
    name = escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{name}</h1>\n"
        f"{''.join(contents)}</main>\n"
        "<footer>Made by <code>python -m nnabla_adaloss report</code>.</footer>\n</body>\n</html>\n"
    )


def section(title: str, explanation: str, *contents: str) -> str:
    """A section with a heading."""
    return (
        f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(explanation)}</p>\n{''.join(contents)}</section>\n"
    )


def heat_map(
    rows: Iterable[Tuple[str, Cells, str]],
    place: Callable[[float], float],
    written: Callable[[float], str],
    labels: Sequence[str],
    timeline: Timeline,
) -> str:
    """A strip of colours for each row, over the iterations.

    Args:
        rows: a name, a value for each column or None where nothing was recorded, and the same in words.
        place: a value's place on the scale of colours, from 0 to 1.
        written: a value as it is shown where the mouse is.
        labels: what is written beneath that scale, evenly from its beginning to its end.
        timeline: the columns.
    """
    lines = []
    for name, cells, words in rows:
        picture = strip([None if value is None else place(value) for value in cells])
        alt = escape(f"{name}: {words}")
        tips = _tips({"": cells}, written, timeline)
        lines.append(_line(name, f'<img class="strip" src="{picture}" alt="{alt}">{tips}'))
    scale = strip([i / 63 for i in range(64)])
    beneath = "".join(f"<span>{escape(label)}</span>" for label in labels)
    key = (
        f'<div class="key"><img class="strip" src="{scale}" alt="colours, from dark to light:">'
        f'<div class="ticks">{beneath}</div></div>'
    )
    return f"{_plot(*lines, timeline=timeline)}{key}\n"


def curve(
    lines: Mapping[str, Points],
    timeline: Timeline,
    written: Callable[[float], str],
    *,
    logarithmic: bool,
    steps: bool,
) -> str:
    """Lines over the iterations, all on one scale; if there are several, with their names.

    Args:
        lines: of each line, its name and its points.
        timeline: the columns of the page.
        written: how a value is written beside the picture, and in words.
        logarithmic: whether distances are ratios; values are positive then.
        steps: whether a value holds until the next one.
    """
    shown = {name: [(i, v) for i, v in points if math.isfinite(v)] for name, points in lines.items()}
    values = [value for points in shown.values() for _, value in points]
    if not values:
        return "<p>No finite value was recorded.</p>\n"
    low, high = min(values), max(values)
    spread = (math.log2(high / low) if logarithmic else high - low) or 1.0

    def place(iteration: int, value: float) -> Tuple[float, float]:
        above = math.log2(value / low) if logarithmic else value - low
        return 1000.0 * timeline.place(iteration), 100.0 - 100.0 * above / spread if high > low else 50.0

    paths = "".join(
        f'<path d="{_path([place(*point) for point in points], steps=steps)}" '
        'vector-effect="non-scaling-stroke"/>'
        for points in shown.values()
    )
    words = "; ".join(
        f"{name}: {written(points[0][1])} at first, {written(points[-1][1])} at the end"
        for name, points in lines.items()
        if points
    )
    words += f"; from {written(low)} to {written(high)}"
    labels = "".join(f"<span>{escape(written(value))}</span>" for value in sorted({low, high}, reverse=True))
    picture = (
        f'<svg class="curve" viewBox="0 -4 1000 108" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(words)}">{paths}</svg>'
    )
    cells = {name if len(lines) > 1 else "": timeline.cells(points) for name, points in shown.items()}
    picture += _tips(cells, written, timeline)
    line = f'<div class="line"><div class="name heights">{labels}</div><div>{picture}</div></div>\n'
    return f"{_names(lines) if len(lines) > 1 else ''}{_plot(line, timeline=timeline)}"


def _tips(lines: Mapping[str, Cells], written: Callable[[float], str], timeline: Timeline) -> str:
    """What a picture shows where the mouse is: the values there, once for neighbours that are the same."""

    def told(columns: Sequence[int]) -> str:
        found = []
        for name, cells in lines.items():
            values = [value for value in (cells[column] for column in columns) if value is not None]
            ends = dict.fromkeys(written(value) for value in (min(values), max(values))) if values else ()
            found += [f"{name}: " * bool(name) + " to ".join(ends)] if ends else []
        return "; ".join(found)

    columns = range(timeline.columns)
    runs = [list(run) for _, run in groupby(columns, key=lambda column: told([column]))]
    if len(runs) > _MOST_TIPS:
        width = -(-len(columns) // _MOST_TIPS)
        runs = [list(columns[i : i + width]) for i in range(0, len(columns), width)]
    places = []
    for run in runs:
        first, last = timeline.span(run)
        when = f"iteration {first:,}" if first == last else f"iterations {first:,} to {last:,}"
        title = escape(f"{when}: {told(run) or 'not recorded'}")
        places.append(f'<rect x="{run[0]}" width="{len(run)}" height="1"><title>{title}</title></rect>')
    box = f'viewBox="0 0 {len(columns)} 1" preserveAspectRatio="none"'
    return f'<svg class="tips" {box} aria-hidden="true">{"".join(places)}</svg>'


def _names(names: Iterable[str]) -> str:
    """Which line of a curve is whose: beside each name a piece of its line."""
    picture = '<svg class="sample" viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28"/></svg>'
    items = "".join(f"<li>{picture} {escape(name)}</li>" for name in names)
    return f'<ul class="lines">{items}</ul>\n'


def _path(places: Sequence[Tuple[float, float]], *, steps: bool) -> str:
    if not places:
        return ""
    (x, y), *rest = _thinned(places)
    found = [f"M{x:.1f} {y:.1f}"]
    for x, y in rest:
        found.append(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}")
    # A value that holds is seen to hold; a single point is seen at all.
    return "".join([*found, "H1000"] if steps or not rest else found)


def _thinned(places: Iterable[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """No more than some points for each column of pixels: the first, the highest, the lowest and the last."""
    found: List[Tuple[float, float]] = []
    for _, group in groupby(places, key=lambda place: int(place[0])):
        column = list(group)
        heights = [y for _, y in column]
        kept = {0, heights.index(min(heights)), heights.index(max(heights)), len(column) - 1}
        found += [column[index] for index in sorted(kept)]
    return found


def time_line(kinds: Iterable[Tuple[str, str, Sequence[int]]], timeline: Timeline) -> str:
    """A row for each kind of marks: a name, a shape, and the iterations where they are.

    Marks that would cover each other are one.
    """
    lines = []
    for name, shape, iterations in kinds:
        columns = {timeline.column(i): timeline.place(i) for i in iterations}
        marks = "".join(
            f'<svg x="{100 * place:.2f}%" y="50%" overflow="visible"><path d="{_SHAPES[shape]}"/></svg>'
            for place in columns.values()
        )
        words = f"{name}: {len(iterations)}" + (f", the first in {iterations[0]}" if iterations else "")
        picture = f'<svg class="marks {shape}" role="img" aria-label="{escape(words)}">{marks}</svg>'
        lines.append(_line(f"{name} ({len(iterations)})", picture))
    return _plot(*lines, timeline=timeline)


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> str:
    """A table; the first cell of each row is its heading, the others are words or numbers."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    kinds = ["words"] * words + ["many"] * (len(head) > _FIT_A_PHONE)
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    body = "".join(f"<tr>{_cells(row, head)}</tr>\n" for row in rows)
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption)}">\n<table{kind}>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n"
        "</table>\n</div>\n"
    )


def _cells(row: Sequence[str], head: Sequence[str]) -> str:
    # On a phone the cells of a row stand one below the other, each with the head of its column.
    first, *rest = (
        f'data-head="{escape(name)}">{escape(cell)}' if cell else ">" for name, cell in zip(head, row)
    )
    return f'<th scope="row" {first}</th>' + "".join(f"<td {cell}</td>" for cell in rest)


def _line(name: str, picture: str) -> str:
    return f'<div class="line"><div class="name">{escape(name)}</div><div>{picture}</div></div>\n'


def _plot(*lines: str, timeline: Timeline) -> str:
    ticks = "".join(f"<span>{tick:,}</span>" for tick in timeline.ticks())
    axis = f'<div class="line axis"><div class="name">iteration</div><div class="ticks">{ticks}</div></div>'
    return f'<div class="plot">\n{"".join(lines)}{axis}\n</div>\n'
