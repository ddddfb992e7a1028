# SPDX-License-Identifier: Apache-2.0
"""Draws a package as a house: a room for each folder, and an arrow wherever one imports another."""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import random
import re
import sys
import textwrap
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import grimp
import matplotlib
import numpy as np
import numpy.typing as npt
from scipy.optimize import lsq_linear

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path as Curve

ROOT = Path(__file__).resolve().parent.parent

DESCRIPTION = """\
Draws a package as a house, from the imports as they are. A room is a folder of the package, or a module
beside the folders; the package's own __init__.py is a room, too. Each room says how large it is and, with the
first line of its docstring, what it is for.
"""

EPILOG = """\
Floors. A room stands on the ground if it imports no other, and else one floor above the highest that it
imports. Imports for type checkers and imports inside functions count as any other.

Arrows. From a room to one that it imports. What follows from other arrows is left out: where updaters import
engine and engine imports graph, there is no arrow from updaters to graph, whether they import it or not.

Red arrows. If rooms import each other in a circle, one of them imports upwards: the one with the fewest
imports is taken for it. tests/test_architecture.py fails then, and names the module and the line.

examples:
  python tools/draw_architecture.py                         the picture in docs/images
  python tools/draw_architecture.py --output house.svg      another file; the suffix decides the format
  python tools/draw_architecture.py --package other/folder  another package
"""

Arrow = Tuple[str, str]  # a room, and another that it imports


class Room(NamedTuple):
    """A folder of a package, or a module beside the folders."""

    purpose: str  # first line of its docstring
    files: int
    lines: int


class House(NamedTuple):
    """What is drawn: rooms by name, on floors counted from the ground."""

    name: str
    rooms: Mapping[str, Room]
    floors: Mapping[str, int]
    imports: Mapping[Arrow, int]  # how many imports of modules each arrow stands for
    upward: Collection[Arrow]


def read_house(package: Path) -> House:
    """The house that a package is.

    Args:
        package: folder of the package.

    Raises:
        ValueError: `package` is no package.
    """
    if not (package / "__init__.py").is_file():
        raise ValueError(f"package={str(package)!r} has no __init__.py: give the folder of a Python package")
    package = package.resolve()
    rooms = _rooms(package)
    imports = _imports(package)
    floors, upward = floors_of(rooms, imports)
    return House(package.name, rooms, floors, imports, upward)


def _rooms(package: Path) -> Dict[str, Room]:
    files: Dict[str, List[Path]] = defaultdict(list)
    for path in sorted(package.rglob("*")):
        if path.suffix in {".py", ".cu", ".cuh"}:
            files[_room_of(package.name, path.relative_to(package).with_suffix("").parts)].append(path)
    return {
        name: Room(
            _purpose(package, name),
            len(paths),
            sum(len(path.read_text("utf-8").splitlines()) for path in paths),
        )
        for name, paths in files.items()
    }


def _room_of(package: str, parts: Sequence[str]) -> str:
    return parts[0] if parts and parts[0] != "__init__" else package


def _purpose(package: Path, room: str) -> str:
    face = package / "__init__.py"
    modules = [face] if room == package.name else [package / room / "__init__.py", package / f"{room}.py"]
    text = "".join(module.read_text("utf-8") for module in modules if module.is_file())
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return re.sub(r"\.$", "", docstring.partition("\n")[0].replace("`", ""))


def _imports(package: Path) -> Dict[Arrow, int]:
    sys.path.insert(0, str(package.parent))
    try:
        graph = grimp.build_graph(package.name, cache_dir=None)
    finally:
        sys.path.remove(str(package.parent))
    counts: Dict[Arrow, int] = defaultdict(int)
    for importer, imported in itertools.product(sorted(graph.modules), repeat=2):
        above, below = (_room_of(package.name, name.split(".")[1:]) for name in (importer, imported))
        if above != below:
            counts[above, below] += len(graph.get_import_details(importer=importer, imported=imported))
    return {arrow: count for arrow, count in counts.items() if count}


def floors_of(rooms: Iterable[str], imports: Mapping[Arrow, int]) -> Tuple[Dict[str, int], List[Arrow]]:
    """The floor of each room, and the imports that run upwards.

    Args:
        rooms: names of the rooms.
        imports: rooms that import another, and how many imports these are.

    Example:
        >>> floors_of("abc", {("a", "b"): 5, ("b", "c"): 7, ("c", "a"): 1})
        ({'c': 0, 'b': 1, 'a': 2}, [('c', 'a')])
    """
    below: Dict[str, Set[str]] = {room: set() for room in sorted(rooms)}
    upward: List[Arrow] = []
    for importer, imported in sorted(imports, key=lambda arrow: (-imports[arrow], arrow)):
        if importer in _reached(imported, below):
            upward.append((importer, imported))
        else:
            below[importer].add(imported)
    floors: Dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():
        floors[room] = max((floors[other] + 1 for other in below[room]), default=0)
    return floors, sorted(upward)


def without_implied(arrows: Collection[Arrow]) -> List[Arrow]:
    """The arrows that do not follow from others; `arrows` make no circle.

    Example:
        >>> without_implied([("a", "b"), ("b", "c"), ("a", "c")])
        [('a', 'b'), ('b', 'c')]
    """
    heads: Dict[str, Set[str]] = defaultdict(set)
    for tail, head in arrows:
        heads[tail].add(head)
    return [
        (tail, head) for tail, head in arrows if not any(head in _reached(via, heads) for via in heads[tail])
    ]


def _reached(start: str, heads: Mapping[str, Set[str]]) -> Set[str]:
    return set().union(*({head} | _reached(head, heads) for head in heads.get(start, ())))


# Where everything stands, in inches. An arrow over several floors passes those between in gaps of its own.

Point = Tuple[float, float]

ROOM_WIDTH, ROOM_HEIGHT = 2.8, 1.75
GAP_WIDTH = 0.32
SPACE, STAIRS = 0.28, 0.6  # between rooms of a floor, and between floors
LINE = 27  # letters in a line of a room


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


_INK, _FAINT, _UPWARD, _DOWNWARD = "#27333f", "#6b7885", "#d0312d", "#1a8a5f"
_FLOORS = ("#e3edf7", "#e2f2ea", "#fbf1d9", "#f9e5dc", "#efe4f4", "#e1eff2", "#f3efe4", "#eceef1")
_STYLE = {"font.family": "DejaVu Sans", "text.color": _INK}


def draw(house: House, path: Path) -> None:
    """Draw a house into a file.

    Args:
        house: what is drawn.
        path: where the picture goes; its suffix decides the format.
    """
    downward = [arrow for arrow in house.imports if arrow not in house.upward]
    needed = without_implied(downward)
    plan = make_plan(house.floors, [*needed, *house.upward])
    highest = max(house.floors.values())
    left, right = min(plan.x.values()) - ROOM_WIDTH / 2 - 0.75, max(plan.x.values()) + ROOM_WIDTH / 2 + 0.35
    bottom, top = -0.3, _ceiling(highest) + 1.85
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(right - left, top - bottom))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(bottom, top))
        axes.set_axis_off()
        for floor in range(highest + 1):
            _draw_floor(axes, floor, left, right)
        for arrow, points in _ways(plan, house.floors).items():
            if arrow in house.upward:
                _draw_arrow(axes, points[::-1], color=_UPWARD, linewidth=2.4, zorder=4)
            else:
                _draw_arrow(axes, points, color=_INK, linewidth=1.5, zorder=2)
        for name, room in house.rooms.items():
            _draw_room(axes, name, room, plan.x[name], house.floors[name])
        _draw_title(axes, house, left + 0.3, top)
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)


def _ground(floor: int) -> float:
    return floor * (ROOM_HEIGHT + STAIRS)


def _ceiling(floor: int) -> float:
    return _ground(floor) + ROOM_HEIGHT


def _ways(plan: Plan, floors: Mapping[str, int]) -> Dict[Arrow, List[Point]]:
    """The points between which each arrow runs, from the room above to the one below, in and out of each gap.

    Arrows at one side of a room stand beside each other, in the order of where they come from or go to.
    """
    sides: Dict[Tuple[str, int], List[Tuple[float, Arrow]]] = defaultdict(list)
    for arrow, route in plan.routes.items():
        sides[route[0], 0].append((plan.x[route[1]], arrow))
        sides[route[-1], -1].append((plan.x[route[-2]], arrow))
    ends: Dict[Tuple[Arrow, int], float] = {}
    for (room, end), arrows in sides.items():
        step = min(0.45, (ROOM_WIDTH - 0.6) / len(arrows))
        for place, (_, arrow) in enumerate(sorted(arrows)):
            ends[arrow, end] = plan.x[room] + (place - (len(arrows) - 1) / 2) * step
    ways = {}
    for arrow, (above, *gaps, below) in plan.routes.items():
        ways[arrow] = [(ends[arrow, 0], _ground(floors[above]))]
        for gap in gaps:
            ways[arrow] += [(plan.x[gap], _ceiling(gap.floor)), (plan.x[gap], _ground(gap.floor))]
        ways[arrow] += [(ends[arrow, -1], _ceiling(floors[below]))]
    return ways


def _draw_arrow(axes: Any, points: Sequence[Point], **style: Any) -> None:
    vertices, codes = [points[0]], [Curve.MOVETO]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        middle = (y0 + y1) / 2
        vertices += [(x0, middle), (x1, middle), (x1, y1)]
        codes += [Curve.CURVE4] * 3
    head = "-|>,head_length=0.45,head_width=0.2"
    axes.add_patch(FancyArrowPatch(path=Curve(vertices, codes), arrowstyle=head, mutation_scale=16, **style))


def _draw_floor(axes: Any, floor: int, left: float, right: float) -> None:
    corner, height = (left + 0.15, _ground(floor) - 0.12), ROOM_HEIGHT + 0.24
    axes.add_patch(Rectangle(corner, right - left - 0.3, height, fc="#f7f8f9", zorder=0))
    middle = _ground(floor) + ROOM_HEIGHT / 2
    axes.text(left + 0.42, middle, str(floor), fontsize=20, color="#a9b3bd", ha="center", va="center")


def _draw_room(axes: Any, name: str, room: Room, x: float, floor: int) -> None:
    pad = 0.08
    corner = x - ROOM_WIDTH / 2 + pad, _ground(floor) + pad
    walls = FancyBboxPatch(corner, ROOM_WIDTH - 2 * pad, ROOM_HEIGHT - 2 * pad, f"round,pad={pad}", zorder=3)
    walls.set(facecolor=_FLOORS[floor % len(_FLOORS)], edgecolor="#8b98a5")
    axes.add_patch(walls)
    files = "1 file" if room.files == 1 else f"{room.files} files"
    size = f"{files}, {room.lines:,} lines"
    centred = {"ha": "center", "va": "center", "zorder": 5}
    axes.text(x, _ceiling(floor) - 0.27, name, fontsize=18, fontweight="bold", **centred)
    axes.text(x, _ground(floor) + 0.89, _in_lines(room.purpose), fontsize=13, linespacing=1.15, **centred)
    axes.text(x, _ground(floor) + 0.18, size, fontsize=11.5, color=_FAINT, **centred)


def _in_lines(purpose: str) -> str:
    """A purpose in lines of about one length; if it is too long for a room, without its last clauses."""

    def wrapped(text: str, width: int = LINE) -> List[str]:
        return textwrap.wrap(text, width, max_lines=4, placeholder=" …", break_on_hyphens=False)

    def is_cut(text: str, width: int = LINE) -> bool:
        return "".join(wrapped(text, width)).endswith("…")

    while is_cut(purpose) and re.search(r"[,:;] ", purpose):
        purpose = re.sub(r"[,:;] (?!.*[,:;] ).*", "", purpose)
    width = LINE
    while (
        width > 10
        and not is_cut(purpose, width - 1)
        and len(wrapped(purpose, width - 1)) == len(wrapped(purpose))
    ):
        width -= 1
    return "\n".join(wrapped(purpose, width))


def _draw_title(axes: Any, house: House, left: float, top: float) -> None:
    files = sum(room.files for room in house.rooms.values())
    lines = sum(room.lines for room in house.rooms.values())
    size = f"{files} files, {lines:,} lines."
    legend = "An arrow goes to what a room imports; what follows from others is left out."
    axes.text(left, top - 0.3, f"The house of {house.name}", fontsize=26, fontweight="bold", va="top")
    axes.text(left, top - 0.9, f"{size} {legend}", fontsize=15, color=_FAINT, va="top")
    text, color = "All imports run downwards.", _DOWNWARD
    if house.upward:
        text = "Upwards: " + ", ".join(f"{importer} → {imported}" for importer, imported in house.upward)
        color = _UPWARD
    axes.text(left, top - 1.25, text, fontsize=15, fontweight="bold", color=color, va="top")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command.

    Args:
        arguments: what follows the program's name; default: `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--package", type=Path, default=ROOT / "nnabla_adaloss", help="nnabla_adaloss if not given"
    )
    picture = ROOT / "docs" / "images" / "architecture.png"
    parser.add_argument(
        "--output", type=Path, default=picture, help="docs/images/architecture.png if not given"
    )
    options = parser.parse_args(arguments)
    try:
        house = read_house(options.package)
    except ValueError as error:
        parser.error(str(error))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(house, options.output)
    print(f"{options.output}: {len(house.rooms)} rooms on {max(house.floors.values()) + 1} floors")
    for importer, imported in house.upward:
        print(f"  {importer} imports {imported}: upwards")
    return 0


if __name__ == "__main__":
    sys.exit(main())
