# SPDX-License-Identifier: Apache-2.0
"""The rooms of a package, the floors they stand on, and which imports which, as read from the code."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Collection, Dict, Iterable, List, Mapping, NamedTuple, Sequence, Set, Tuple

import grimp

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
