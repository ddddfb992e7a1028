# SPDX-License-Identifier: Apache-2.0
"""Imports run one way: down the floors that pyproject.toml gives to the folders, and never in a circle.

Imports for type checkers and imports inside functions count as any other. The checks are tried on small
packages that break the rules.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Callable, Dict, List, Mapping

import grimp
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
LINT_IMPORTS = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]

CirclesOf = Callable[[Dict[str, str]], List[str]]

WAYS_TO_IMPORT = {
    "at the top": "from {} import name",
    "as a module": "import {}",
    "for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {} import name",
    "inside a function": "def function():\n    from {} import name",
}


def upward_imports(folder: Path) -> str:
    """What import-linter says of the `nnabla_adaloss` in a folder, by our contract; empty if it is kept."""
    process = subprocess.run(
        [*LINT_IMPORTS, "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=folder,
        env={**os.environ, "COLUMNS": "250"},  # or long lines are broken
        capture_output=True,
        text=True,
    )
    return "" if process.returncode == 0 else process.stdout + process.stderr


def circles(package: str) -> List[str]:
    """One text for each circle of imports between the modules of a package, an import per line.

    There may be more circles than these: an import is taken out of each that is found, until none is left.
    """
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: sorted(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    found: List[str] = []
    while True:
        try:
            TopologicalSorter(dict(sorted(imports.items()))).prepare()
            return found
        except CycleError as error:
            circle: List[str] = error.args[1]  # each is imported by the next
        found.append("".join(_where(graph, *pair) for pair in zip(circle[1:], circle)))
        imports[circle[1]].remove(circle[0])


def _where(graph: grimp.ImportGraph, importer: str, imported: str) -> str:
    lines = sorted(i["line_number"] for i in graph.get_import_details(importer=importer, imported=imported))
    return f"{importer}, line {', '.join(map(str, lines))}, imports {imported}\n"


def test_imports_run_downwards() -> None:
    broken = upward_imports(ROOT)
    if broken:
        pytest.fail(broken, pytrace=False)


def test_no_imports_run_in_a_circle() -> None:
    found = circles("nnabla_adaloss")
    if found:
        pytest.fail("imports run in a circle:\n" + "\n".join(found), pytrace=False)


# The checks themselves, on packages with a room of each name.


def layers() -> List[str]:
    """The floors from the top, as pyproject.toml has them: `core | state` is one on which two rooms stand."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (found,) = (contract["layers"] for contract in contracts if contract["id"] == "floors")
    return list(found)


def rooms(layer: str) -> List[str]:
    return re.split(r" [|:] ", layer)


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A `nnabla_adaloss` whose rooms are empty but for a door in each: `graph/door.py`."""
    names = [name for layer in layers() for name in rooms(layer)]
    files = {f"nnabla_adaloss/{name}/{file}.py": "" for name in names for file in ("__init__", "door")}
    write(tmp_path, {"nnabla_adaloss/__init__.py": "", **files})
    return tmp_path


def test_a_house_without_imports_is_in_order(house: Path) -> None:
    assert upward_imports(house) == ""


def test_every_room_may_use_every_floor_below(house: Path) -> None:
    below: List[str] = []
    for layer in reversed(layers()):
        doors = "".join(f"from ..{name} import door\n" for name in below)
        for name in rooms(layer):
            write(house, {f"nnabla_adaloss/{name}/door.py": doors})
        below += rooms(layer)
    assert upward_imports(house) == ""


@pytest.mark.parametrize("way", WAYS_TO_IMPORT)
def test_an_upward_import_is_named(house: Path, way: str) -> None:
    text = f"x = 1\n{WAYS_TO_IMPORT[way]}\n".format("nnabla_adaloss.updaters.door")
    write(house, {"nnabla_adaloss/kernels/door.py": text})
    line = len(text.splitlines())
    assert f"nnabla_adaloss.kernels.door -> nnabla_adaloss.updaters.door (l.{line})" in upward_imports(house)


@pytest.mark.parametrize("layer", [layer for layer in layers() if "|" in layer])
def test_rooms_on_one_floor_do_not_import_each_other(house: Path, layer: str) -> None:
    first, *_, last = rooms(layer)
    write(house, {f"nnabla_adaloss/{first}/door.py": f"from ..{last} import door\n"})
    broken = upward_imports(house)
    assert f"nnabla_adaloss.{first}.door -> nnabla_adaloss.{last}.door (l.1)" in broken


def test_an_import_of_the_face_is_one_of_what_the_face_imports(house: Path) -> None:
    write(house, {"nnabla_adaloss/__init__.py": "from .engine.door import name\n"})
    write(house, {"nnabla_adaloss/doctor/door.py": "from nnabla_adaloss import name\n"})
    assert upward_imports(house) == ""
    write(house, {"nnabla_adaloss/graph/door.py": "from nnabla_adaloss import name\n"})
    broken = upward_imports(house)
    assert "nnabla_adaloss.graph.door -> nnabla_adaloss (l.1)" in broken
    assert "nnabla_adaloss.doctor" not in broken


def test_a_new_folder_must_be_given_a_floor(house: Path) -> None:
    write(house, {"nnabla_adaloss/cellar/__init__.py": ""})
    assert "nnabla_adaloss.cellar" in upward_imports(house)


@pytest.fixture
def circles_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CirclesOf:
    """`circles_of({"a": "from . import b"})` makes a package `house` of modules and looks for its circles."""

    def look(modules: Dict[str, str]) -> List[str]:
        files = {f"house/{name.replace('.', '/')}.py": text + "\n" for name, text in modules.items()}
        write(tmp_path, {"house/__init__.py": "", **files})
        monkeypatch.syspath_prepend(tmp_path)
        return circles("house")

    return look


def test_two_ways_to_one_module_are_no_circle(circles_of: CirclesOf) -> None:
    both = "from . import low"
    found = circles_of({"top": "from . import left, right", "left": both, "right": both, "low": ""})
    assert found == []


@pytest.mark.parametrize("way", WAYS_TO_IMPORT)
def test_a_circle_is_named(circles_of: CirclesOf, way: str) -> None:
    back = f"x = 1\n{WAYS_TO_IMPORT[way]}".format("house.engine")
    (circle,) = circles_of({"engine": "from .plan import y", "plan": "\nfrom . import leaf", "leaf": back})
    assert sorted(circle.splitlines()) == [
        "house.engine, line 1, imports house.plan",
        f"house.leaf, line {len(back.splitlines())}, imports house.engine",
        "house.plan, line 2, imports house.leaf",
    ]


def test_a_folder_and_its_own_module_can_make_a_circle(circles_of: CirclesOf) -> None:
    found = circles_of({"rooms.__init__": "from .door import name", "rooms.door": "from . import key"})
    assert len(found) == 1


def test_each_of_several_circles_is_named(circles_of: CirclesOf) -> None:
    pairs = {"a": "b", "b": "a", "c": "d", "d": "c"}
    found = circles_of({importer: f"from . import {imported}" for importer, imported in pairs.items()})
    assert [sorted(set(re.findall(r"house\.(\w)", circle))) for circle in found] == [["a", "b"], ["c", "d"]]
