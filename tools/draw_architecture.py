# SPDX-License-Identifier: Apache-2.0
"""Draws a package as a house: a room for each folder, and an arrow wherever one imports another."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path as Curve

from tools.house_placement import (
    ROOM_HEIGHT,
    ROOM_WIDTH,
    STAIRS,
    Plan,
    Point,
    make_plan,
)
from tools.house_rooms import Arrow, House, Room, read_house, without_implied

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
  python -m tools.draw_architecture                         the picture in docs/images
  python -m tools.draw_architecture --output house.svg      another file; the suffix decides the format
  python -m tools.draw_architecture --package other/folder  another package
"""

_LINE = 27  # letters in a line of a room
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

    def wrapped(text: str, width: int = _LINE) -> List[str]:
        return textwrap.wrap(text, width, max_lines=4, placeholder=" …", break_on_hyphens=False)

    def is_cut(text: str, width: int = _LINE) -> bool:
        return "".join(wrapped(text, width)).endswith("…")

    while is_cut(purpose) and re.search(r"[,:;] ", purpose):
        purpose = re.sub(r"[,:;] (?!.*[,:;] ).*", "", purpose)
    width = _LINE
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
