# SPDX-License-Identifier: Apache-2.0
"""Pieces of a page: numbers, tables, pictures over iterations. Text is escaped; contents in HTML are not."""

from __future__ import annotations

import math
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..core.power_of_two import scale_text
from ..monitor.recording import Recording
from ..monitor.rows import LayerRow

Points = Sequence[Tuple[int, float]]
"""Pairs of an iteration and a value."""
Lines = Mapping[str, Points]
"""Lines of a picture, by name."""

_MOST_COLUMNS = 240  # of a picture
_MOST_TIPS = 48  # places of a picture that show their values under the mouse
_FIT_A_PHONE = 2  # columns of a table that a phone shows side by side

# Shapes distinguish the kinds of marks without colour.
_SHAPES = {
    "triangle": "M-5 5L0-5L5 5Z",
    "ring": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "cross": "M-5-5L5 5M-5 5L5-5",
}

# Viridis at 17 places (S. van der Walt and N. Smith, CC0): its lightness rises evenly, also for colour-blind
# readers and in grey print.
_VIRIDIS = bytes.fromhex(
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c "
    "1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725"
)


def extent(values: Sequence[float], written: Callable[[float], str] = scale_text) -> str:
    """Write the smallest and the largest value, once if they are equal."""
    return " to ".join(dict.fromkeys(map(written, (min(values), max(values)))))


def percent(share: Optional[float]) -> str:
    """Write a share in percent; neither a small nor an unknown one looks like zero."""
    if share is None:
        return "not counted"
    if 0.0 < share < 1e-4:
        return "< 0.01 %"
    return f"{100.0 * share:.4g} %" if share < 0.01 else f"{100.0 * share:.3g} %"


def in_words(name: str) -> str:
    """Write a cause or a reason without underscores."""
    return name.replace("_", " ").replace("nonfinite", "non-finite")


class Timeline(NamedTuple):
    """Common columns of all pictures of a page: their number, and the first and last iteration."""

    first: int
    last: int
    columns: int

    @classmethod
    def of(cls, recording: Recording) -> Timeline:
        """Make the columns of a recording: one per recorded iteration, if these are not too many."""
        iterations = [row.iteration for row in recording.rows]
        first, last = min(iterations), max(iterations)
        of_layers = sorted({row.iteration for row in recording.of(LayerRow)})
        step = min((b - a for a, b in zip(of_layers, of_layers[1:])), default=1)
        return cls(first, last, min(_MOST_COLUMNS, (last - first) // step + 1))

    def column(self, iteration: int) -> int:
        """The column of an iteration."""
        return (iteration - self.first) * self.columns // (self.last - self.first + 1)

    def span(self, start: int, end: int) -> Tuple[int, int]:
        """The first and the last iteration of the columns from `start` up to `end`."""
        iterations = self.last - self.first + 1
        first, behind = (self.first - (-column * iterations // self.columns) for column in (start, end))
        return first, behind - 1

    def place(self, iteration: int) -> float:
        """Position of an iteration, from 0 (the first) to 1 (the last)."""
        return (iteration - self.first) / max(self.last - self.first, 1)

    def cells(self, points: Iterable[Tuple[int, float]]) -> List[Optional[float]]:
        """The largest value in each column; None for an empty column."""
        largest: Dict[int, float] = {}
        for iteration, value in points:
            column = self.column(iteration)
            largest[column] = max(largest.get(column, value), value)
        return [largest.get(column) for column in range(self.columns)]

    def ticks(self) -> List[int]:
        """Iterations to write beneath a picture, evenly from the first to the last."""
        steps = min(4, self.last - self.first) or 1
        return [self.first + (self.last - self.first) * i // steps for i in range(steps + 1)]


def document(title: str, about: Sequence[str], *contents: str) -> str:
    """Self-contained page; `about` (names, dates, versions) stands above its title."""
    page = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in about)
    return page.substitute(title=escape(title), about=facts, contents="".join(contents))


def section(title: str, explanation: str, *contents: str) -> str:
    """A section with a heading."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{paragraph(explanation)}{''.join(contents)}</section>\n"


def paragraph(text: str, kind: str = "told") -> str:
    """A paragraph; nothing for an empty text."""
    return f'<p class="{kind}">{escape(text)}</p>\n' if text else ""


def bullets(texts: Iterable[str]) -> str:
    """A list of sentences; nothing for no sentence."""
    items = "".join(f"<li>{escape(text)}</li>\n" for text in texts)
    return f"<ul>\n{items}</ul>\n" if items else ""


def definitions(pairs: Iterable[Tuple[str, str]], kind: str = "words") -> str:
    """Names with their definitions, one below the other; `facts`: in as many columns as fit."""
    rows = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>\n" for name, text in pairs)
    return f'<dl class="{kind}">\n{"".join(rows)}</dl>\n'


def folded(summary: str, *contents: str) -> str:
    """Contents that a click shows."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n{''.join(contents)}</details>\n"


def viridis(value: Optional[float]) -> str:
    """The colour of a value between 0 (dark) and 1 (light); None is clear."""
    if value is None:
        return "#0000"
    parts = (np.interp(16.0 * value, range(17), list(_VIRIDIS[part::3])) for part in range(3))
    return "#" + "".join(f"{round(float(part)):02x}" for part in parts)


def strip(values: Sequence[Optional[float]]) -> str:
    """Colours side by side, one for each value, as a CSS image."""
    stops, end = [], 0.0
    for colour, run in groupby(map(viridis, values)):
        start, end = end, end + 100.0 * len(list(run)) / len(values)
        stops.append(f"{colour} {start:.4g}%,{colour} {end:.4g}%")
    return f"linear-gradient(90deg,{','.join(stops)})"


def heat_map(
    lines: Lines,
    timeline: Timeline,
    written: Callable[[float], str],
    ends: Tuple[float, float],
    labels: Sequence[str],
) -> str:
    """Strips of colours, one per line, by logarithms of values between `ends`; `labels` are the key's."""
    low, high = map(math.log, ends)
    strips = []
    for name, points in lines.items():
        cells, values = timeline.cells(points), [value for _, value in points]
        places = [v if v is None else (math.log(max(v, ends[0])) - low) / (high - low) for v in cells]
        words = f"{name}: {written(values[-1])} at the end, from {extent(values, written)}"
        strips.append(_line(name, _strip(places, words) + _tips({"": points}, written, timeline)))
    scale = _strip([i / 63 for i in range(64)], "colours, from dark to light:")
    key = f'<div class="key">{scale}{_spans("ticks", labels)}</div>'
    return f"{_plot(*strips, timeline=timeline)}{key}\n"


def _strip(places: Sequence[Optional[float]], words: str) -> str:
    """Strip of colours; a screen reader reads the words instead."""
    style = f"--colours:{strip(places)}"
    return f'<div class="strip" style="{style}" role="img" aria-label="{escape(words)}"></div>'


def curve(
    lines: Lines, timeline: Timeline, written: Callable[[float], str], *, logarithmic: bool, steps: bool
) -> str:
    """Curves on one scale, `logarithmic` in height or not; in `steps`, a value holds until the next one."""
    shown = {name: [(i, v) for i, v in points if math.isfinite(v)] for name, points in lines.items()}
    values = [value for points in shown.values() for _, value in points]
    if not values:
        return "<p>No finite value was recorded.</p>\n"
    height = math.log2 if logarithmic else float
    low, high = _axis(height(min(values)), height(max(values)), whole=steps)

    def place(iteration: int, value: float) -> Tuple[float, float]:
        above = (height(value) - low) / (high - low)
        return 1000.0 * timeline.place(iteration), 100.0 - 100.0 * above

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
    words += f"; from {extent(values, written)}"
    marks = [high, (low + high) / 2.0, low]
    if logarithmic:  # ends rounded outwards may be beyond the powers of two that a float can be
        marks = [2.0 ** max(-1074.0, min(mark, 1023.0)) for mark in marks]
    heights = map(written, marks)
    names = ""
    if len(lines) > 1:
        sample = '<svg class="sample" viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28"/></svg>'
        items = "".join(f"<li>{sample} {escape(name)}</li>" for name in lines)
        names = f'<ul class="lines">{items}</ul>\n'
    tips = _tips({name if names else "": points for name, points in shown.items()}, written, timeline)
    line = (
        f'<div class="line">{_spans("name heights", heights)}<div>'
        '<svg class="curve" viewBox="0 -4 1000 108" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(words)}">{paths}</svg>{tips}</div></div>\n'
    )
    return names + _plot(line, timeline=timeline)


def _axis(low: float, high: float, *, whole: bool) -> Tuple[float, float]:
    """Distinct ends of an axis of heights; with `whole`, they and their middle are integers."""
    if whole:
        low, high = math.floor(low), math.ceil(high)
        high += (high - low) % 2
    margin = 1.0 if whole else abs(low) / 10.0 or 1.0
    return (low, high) if low < high else (low - margin, high + margin)


def _tips(lines: Lines, written: Callable[[float], str], timeline: Timeline) -> str:
    """Values that a picture shows under the mouse; equal neighbours are merged."""
    width = -(-timeline.columns // _MOST_TIPS)
    words_at: List[List[str]] = [[] for _ in range(0, timeline.columns, width)]
    for name, points in lines.items():
        for place, group in groupby(points, key=lambda point: timeline.column(point[0]) // width):
            values = [value for _, value in group]
            words_at[place].append(f"{name}: " * bool(name) + extent(values, written))
    places, end = [], 0
    for words, run in groupby(words_at):
        start, end = end, min(end + width * len(list(run)), timeline.columns)
        first, last = timeline.span(start, end)
        when = f"iteration {first:,}" if first == last else f"iterations {first:,} to {last:,}"
        title = escape(f"{when}: {'; '.join(words) or 'not recorded'}")
        places.append(f'<rect x="{start}" width="{end - start}" height="1"><title>{title}</title></rect>')
    return (
        f'<svg class="tips" viewBox="0 0 {timeline.columns} 1" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(places)}</svg>'
    )


def _path(places: Iterable[Tuple[float, float]], *, steps: bool) -> str:
    """SVG path through places that are sorted from left to right."""
    commands: List[str] = []
    # The picture is 1000 wide; a few points per unit are enough.
    for _, group in groupby(places, key=lambda place: int(place[0])):
        column = list(group)
        heights = [y for _, y in column]
        extremes = {0, heights.index(min(heights)), heights.index(max(heights)), len(column) - 1}
        for x, y in (column[index] for index in sorted(extremes)):
            line = f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}"
            commands.append(line if commands else f"M{x:.1f} {y:.1f}")
    # Extend the last step, or a lone point, which would be invisible, to the right edge.
    return "".join([*commands, "H1000"] if commands and (steps or len(commands) == 1) else commands)


def mark_rows(kinds: Iterable[Tuple[str, str, Sequence[int]]], timeline: Timeline) -> str:
    """A row for each kind of marks: its name, shape and iterations. Marks in one column are one."""
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


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """A table; the first cell of each row is its heading, the others are numbers, or text with `words`."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    kinds = ["words"] * words + ["many"] * (len(head) > _FIT_A_PHONE)
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    body = ""
    for row in rows:
        # On a phone the cells of a row stand one below the other, each with the head of its column.
        first, *rest = (
            f'data-head="{escape(name)}">{escape(cell)}' if cell else ">" for name, cell in zip(head, row)
        )
        cells = "".join(f"<td {cell}</td>" for cell in rest)
        body += f'<tr><th scope="row" {first}</th>{cells}</tr>\n'
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption)}">\n<table{kind}>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n"
        "</table>\n</div>\n"
    )


def _line(name: str, picture: str) -> str:
    """A picture with its name on the left."""
    return f'<div class="line"><div class="name">{escape(name)}</div><div>{picture}</div></div>\n'


def _plot(*lines: str, timeline: Timeline) -> str:
    """Pictures one below the other, above a common axis of iterations."""
    ticks = _spans("ticks", [f"{tick:,}" for tick in timeline.ticks()])
    axis = f'<div class="line axis"><div class="name">iteration</div>{ticks}</div>'
    return f'<div class="plot">\n{"".join(lines)}{axis}\n</div>\n'


def _spans(kind: str, words: Iterable[str]) -> str:
    return f'<div class="{kind}">{"".join(f"<span>{escape(word)}</span>" for word in words)}</div>'
