# SPDX-License-Identifier: Apache-2.0
"""A page and its pieces: heat maps, curves, marks on a time line, tables. All that is given is escaped."""

from __future__ import annotations

import math
from html import escape
from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from .style import STYLE, strip
from .timeline import Timeline

Cells = Sequence[Optional[float]]


class HeatRow(NamedTuple):
    """A row of a heat map.

    Attributes:
        name: what it is about.
        cells: a value per column; None where nothing was recorded.
        alt_text: the same in words, for screen readers.
    """

    name: str
    cells: Cells
    alt_text: str


class Legend(NamedTuple):
    """How values become colours.

    Attributes:
        place: a value's place on the scale of colours, from 0 to 1.
        labels: what is written beneath that scale, evenly from its beginning to its end.
    """

    place: Callable[[float], float]
    labels: Sequence[str]


class Marks(NamedTuple):
    """Marks of one kind on a time line.

    Attributes:
        name: what they stand for.
        shape: `triangle`, `ring` or `cross`, so that colours do not matter.
        iterations: where they are.
    """

    name: str
    shape: str
    iterations: Sequence[int]


# Columns of a table.
_FIT_A_PHONE = 2

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


def heat_map(rows: Sequence[HeatRow], legend: Legend, timeline: Timeline) -> str:
    """A strip of colours for each row, over the iterations."""
    lines = [
        _line(row.name, f'<img class="strip" src="{_strip(row, legend)}" alt="{escape(row.alt_text)}">')
        for row in rows
    ]
    scale = strip([i / 63 for i in range(64)])
    labels = "".join(f"<span>{escape(label)}</span>" for label in legend.labels)
    key = (
        f'<div class="key"><img class="strip" src="{scale}" alt="colours, from dark to light:">'
        f'<div class="ticks">{labels}</div></div>'
    )
    return f'<div class="plot">\n{"".join(lines)}{_ticks(timeline)}</div>\n{key}\n'


def _strip(row: HeatRow, legend: Legend) -> str:
    return strip([None if value is None else legend.place(value) for value in row.cells])


def curve(
    lines: Sequence[Sequence[Tuple[int, float]]],
    timeline: Timeline,
    written: Callable[[float], str],
    alt_text: str,
    *,
    logarithmic: bool,
    steps: bool,
) -> str:
    """Lines over the iterations, all on one scale.

    Args:
        lines: of each line, iterations with a value each.
        timeline: the columns of the page.
        written: how a value is written beside the picture.
        alt_text: the same in words.
        logarithmic: whether distances are ratios.
        steps: whether a value holds until the next one.
    """
    shown = [
        [(i, value) for i, value in points if math.isfinite(value) and (value > 0.0 or not logarithmic)]
        for points in lines
    ]
    values = [value for points in shown for _, value in points]
    if not values:
        return "<p>No finite value was recorded.</p>\n"
    low, high = min(values), max(values)
    spread = (math.log2(high / low) if logarithmic else high - low) or 1.0

    def place(iteration: int, value: float) -> Tuple[float, float]:
        above = math.log2(value / low) if logarithmic else value - low
        return 1000.0 * timeline.place(iteration), 100.0 - 100.0 * above / spread if high > low else 50.0

    paths = "".join(
        f'<path d="{"".join(_path(_thinned([place(*point) for point in points]), steps=steps))}" '
        'vector-effect="non-scaling-stroke"/>'
        for points in shown
        if points
    )
    ends = [high, low] if high > low else [low]
    labels = "".join(f"<span>{escape(written(value))}</span>" for value in ends)
    picture = (
        f'<svg class="curve" viewBox="0 -4 1000 108" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(alt_text)}">{paths}</svg>'
    )
    label = f'<div class="name heights">{labels}</div>'
    return (
        f'<div class="plot">\n<div class="line">{label}<div>{picture}</div></div>\n{_ticks(timeline)}</div>\n'
    )


def spans_decades(values: Iterable[float]) -> bool:
    """Whether a curve of these values is better drawn with ratios as distances."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0.0 and max(finite) > 20.0 * min(finite)


def line_names(names: Sequence[str]) -> str:
    """Which line of a curve is whose: beside each name a piece of its line."""
    picture = '<svg class="sample" viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28"/></svg>'
    items = "".join(f"<li>{picture} {escape(name)}</li>" for name in names)
    return f'<ul class="lines">{items}</ul>\n'


def _thinned(places: Sequence[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """No more than some points for each column of pixels: the first, the highest, the lowest and the last."""
    columns: List[List[Tuple[float, float]]] = []
    for place in places:
        if not columns or int(columns[-1][0][0]) != int(place[0]):
            columns.append([])
        columns[-1].append(place)
    found: List[Tuple[float, float]] = []
    for column in columns:
        heights = [y for _, y in column]
        kept = {0, heights.index(min(heights)), heights.index(max(heights)), len(column) - 1}
        found += [column[index] for index in sorted(kept)]
    return found


def _path(places: Sequence[Tuple[float, float]], *, steps: bool) -> List[str]:
    (x, y), *rest = places
    found = [f"M{x:.1f} {y:.1f}"]
    for x, y in rest:
        found.append(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}")
    # A value that holds is seen to hold; a single point is seen at all.
    return [*found, "H1000"] if steps or not rest else found


def time_line(kinds: Sequence[Marks], timeline: Timeline) -> str:
    """A row for each kind of marks, over the iterations; marks that would cover each other are one."""
    lines = []
    for name, shape, iterations in kinds:
        columns = {timeline.column(i): timeline.place(i) for i in iterations}
        marks = "".join(
            f'<svg x="{100 * place:.2f}%" y="50%" overflow="visible"><path d="{_SHAPES[shape]}"/></svg>'
            for place in columns.values()
        )
        alt_text = f"{name}: {len(iterations)}" + (f", the first in {iterations[0]}" if iterations else "")
        picture = f'<svg class="marks {shape}" role="img" aria-label="{escape(alt_text)}">{marks}</svg>'
        lines.append(_line(f"{name} ({len(iterations)})", picture))
    return f'<div class="plot">\n{"".join(lines)}{_ticks(timeline)}</div>\n'


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


def _ticks(timeline: Timeline) -> str:
    ticks = "".join(f"<span>{tick:,}</span>" for tick in timeline.ticks())
    return f'<div class="line axis"><div class="name">iteration</div><div class="ticks">{ticks}</div></div>\n'
