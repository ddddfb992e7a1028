# SPDX-License-Identifier: Apache-2.0
"""Where the rooms of a house stand in the picture, so that few arrows cross and most run straight."""

from __future__ import annotations

import itertools
import math
import random
import sys
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import lsq_linear

from tools.house_rooms import Arrow

# Where everything stands, in inches. An arrow over several floors passes those between in gaps of its own.

Point = Tuple[float, float]

ROOM_WIDTH, ROOM_HEIGHT = 2.8, 1.75
GAP_WIDTH = 0.32
SPACE, STAIRS = 0.28, 0.6  # between rooms of a floor, and between floors


class Gap(NamedTuple):
    """Where an arrow passes a floor."""

    arrow: Arrow
    floor: int


Step = Tuple[Any, Any]  # of an arrow: from a room or gap to one on the floor below


class Plan(NamedTuple):
    """Where everything stands, from left to right, and by what way the arrows go."""

    x: Mapping[Any, float]  # middle of each room and each gap
    routes: Mapping[Arrow, Sequence[Any]]  # the room above, gaps, the room below


def make_plan(floors: Mapping[str, int], arrows: Collection[Arrow]) -> Plan:
    """Find places where few arrows cross and most run straight.

    Args:
        floors: floor of each room.
        arrows: what is drawn, upward arrows included.
    """
    routes: Dict[Arrow, List[Any]] = {}
    for arrow in arrows:
        above, below = sorted(arrow, key=lambda room: -floors[room])
        gaps = [Gap(arrow, floor) for floor in range(floors[above] - 1, floors[below], -1)]
        routes[arrow] = [above, *gaps, below]
    steps = [step for route in routes.values() for step in zip(route, route[1:])]
    rows: List[List[Any]] = [[] for _ in range(max(floors.values()) + 1)]
    for room, floor in floors.items():
        rows[floor].append(room)
    for gap in {place for route in routes.values() for place in route if isinstance(place, Gap)}:
        rows[gap.floor].append(gap)
    return Plan(_placed([sorted(row, key=str) for row in rows], steps), routes)


def _placed(rows: Sequence[Sequence[Any]], steps: Sequence[Step]) -> Dict[Any, float]:
    """Positions with few crossings: neighbours change places while that helps, from several beginnings."""
    chance = random.Random(0)
    best: Tuple[int, float, Dict[Any, float]] = (sys.maxsize, math.inf, {})
    for _ in range(40):
        order = [chance.sample(row, len(row)) for row in rows]
        cost = _cost(order, steps)
        while True:
            before = cost
            for row in order:
                for i in range(len(row) - 1):
                    row[i], row[i + 1] = row[i + 1], row[i]
                    changed = _cost(order, steps)
                    if changed < cost:
                        cost = changed
                    else:
                        row[i], row[i + 1] = row[i + 1], row[i]
            if cost == before:
                break
        best = min(best, (cost[0], *_positions(order, steps)), key=lambda found: found[:2])
    return best[2]


def _cost(rows: Sequence[Sequence[Any]], steps: Sequence[Step]) -> Tuple[int, float]:
    """How many steps cross, and how far they go sideways (squared) if every row is centred."""
    at: Dict[Any, Tuple[int, float]] = {}
    for floor, row in enumerate(rows):
        x = -sum(map(_width, row)) / 2
        for place in row:
            at[place] = floor, x + _width(place) / 2
            x += _width(place)
    crossings = sum(
        at[a][0] == at[c][0] and (at[a][1] - at[c][1]) * (at[b][1] - at[d][1]) < 0
        for (a, b), (c, d) in itertools.combinations(steps, 2)
    )
    return crossings, round(sum((at[a][1] - at[b][1]) ** 2 for a, b in steps), 6)


def _width(place: Any) -> float:
    return GAP_WIDTH if isinstance(place, Gap) else ROOM_WIDTH + SPACE


def _positions(rows: Sequence[Sequence[Any]], steps: Sequence[Step]) -> Tuple[float, Dict[Any, float]]:
    """Positions in the given order with the least way sideways (squared); arrows stay straight between gaps.

    Returns:
        What is left of the way sideways, and the positions.
    """
    # Every position is a sum: where its row begins, and the distances from one place to the next.
    size = sum(map(len, rows))
    sums: Dict[Any, npt.NDArray[np.float64]] = {}
    least: List[float] = []
    for row in rows:
        for i, place in enumerate(row):
            sums[place] = sums[row[i - 1]].copy() if i else np.zeros(size)
            sums[place][len(least)] = 1.0
            least.append((_width(row[i - 1]) + _width(place)) / 2 if i else -math.inf)
    weights = [30.0 if isinstance(a, Gap) and isinstance(b, Gap) else 1.0 for a, b in steps]
    pulls = [weight * (sums[a] - sums[b]) for weight, (a, b) in zip(weights, steps)]
    pulls += [0.02 * position for position in sums.values()]  # to the middle
    found = lsq_linear(np.array(pulls), np.zeros(len(pulls)), bounds=(least, math.inf))
    return round(found.cost, 6), {place: float(position @ found.x) for place, position in sums.items()}
