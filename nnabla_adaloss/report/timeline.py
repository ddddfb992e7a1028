# SPDX-License-Identifier: Apache-2.0
"""Iterations as columns of pictures."""

from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

from ..monitor import LayerRow, Recording

_MOST_COLUMNS = 240


class Timeline(NamedTuple):
    """The columns that all pictures of a page share: how many, and their first and last iteration."""

    first: int
    last: int
    columns: int

    @classmethod
    def of(cls, recording: Recording) -> Timeline:
        """The columns for a recording: one for each recorded iteration, if these are not too many."""
        iterations = [row.iteration for row in recording.rows]
        first, last = min(iterations), max(iterations)
        looked_at = sorted({row.iteration for row in recording.of(LayerRow)})
        step = min((b - a for a, b in zip(looked_at, looked_at[1:])), default=1)
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
        """Where an iteration lies, from 0 (the first) to 1 (the last)."""
        return (iteration - self.first) / max(self.last - self.first, 1)

    def cells(self, points: Iterable[Tuple[int, float]]) -> List[Optional[float]]:
        """The largest value in each column; None where there is none."""
        found: Dict[int, float] = {}
        for iteration, value in points:
            column = self.column(iteration)
            found[column] = max(found.get(column, value), value)
        return [found.get(column) for column in range(self.columns)]

    def ticks(self) -> List[int]:
        """Iterations to write beneath a picture, evenly from the first to the last."""
        steps = min(4, self.last - self.first) or 1
        return [self.first + (self.last - self.first) * i // steps for i in range(steps + 1)]
