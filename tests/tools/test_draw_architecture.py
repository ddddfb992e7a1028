# SPDX-License-Identifier: Apache-2.0
"""The picture of the house: what stands on which floor, and what is drawn."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from tools.draw_architecture import draw, main
from tools.house_placement import ROOM_WIDTH, Gap, make_plan
from tools.house_rooms import floors_of, read_house, without_implied

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nnabla_adaloss"


def write(folder: Path, files: Dict[str, str]) -> Path:
    """Make a package `house` in a folder."""
    for name, text in files.items():
        path = folder / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder / "house"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Three floors and the face of the package on top."""
    return write(
        tmp_path,
        {
            "__init__.py": '"""A house."""\nfrom .roof import tile\nfrom .ground import stone\n',
            "roof/__init__.py": '"""Keeps the `rain` out.\n\nAnd more.\n"""\n',
            "roof/tile.py": "def lay():\n    from ..walls import brick\n    from ..walls.brick import size\n",
            "walls/__init__.py": "",
            "walls/brick.py": "import typing\nif typing.TYPE_CHECKING:\n    from ..ground import stone\n",
            "walls/mortar.cu": "one\ntwo\n",
            "ground.py": '"""Carries the rest."""\nstone = 1\n',
            "shed.py": "",
        },
    )


def test_floors_and_imports_of_a_package(house: Path) -> None:
    found = read_house(house)
    assert found.floors == {"house": 3, "roof": 2, "walls": 1, "ground": 0, "shed": 0}
    assert found.imports == {
        ("house", "ground"): 1,
        ("house", "roof"): 1,
        ("roof", "walls"): 2,
        ("walls", "ground"): 1,
    }
    assert found.upward == []


def test_purpose_and_size_of_a_room(house: Path) -> None:
    rooms = read_house(house).rooms
    assert rooms["roof"] == ("Keeps the rain out", 2, 7)
    assert rooms["walls"] == ("", 3, 5)
    assert rooms["ground"] == ("Carries the rest", 1, 2)
    assert rooms["house"].purpose == "A house"


def test_the_weakest_import_of_a_circle_runs_upwards(house: Path) -> None:
    write(house.parent, {"walls/door.py": "from ..roof import tile"})
    found = read_house(house)
    assert found.upward == [("walls", "roof")]
    assert found.floors["roof"] > found.floors["walls"]


def test_as_few_imports_as_can_be_run_upwards() -> None:
    imports = {("a", "b"): 2, ("b", "a"): 1, ("b", "c"): 5, ("c", "a"): 4, ("c", "d"): 1, ("d", "c"): 3}
    floors, upward = floors_of("abcd", imports)
    assert floors == {"b": 2, "d": 2, "c": 1, "a": 0}
    assert upward == [("a", "b"), ("c", "d")]


def test_what_follows_from_other_arrows_is_left_out() -> None:
    needed = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "e")]
    assert without_implied([*needed, ("a", "c"), ("a", "d"), ("b", "d")]) == needed


def test_nothing_overlaps_and_long_arrows_pass_in_gaps() -> None:
    floors = {"top": 2, "left": 1, "right": 1, "ground": 0, "cellar": 0}
    arrows = [("top", "left"), ("top", "right"), ("top", "cellar"), ("left", "ground"), ("right", "ground")]
    plan = make_plan(floors, arrows)
    gap = Gap(("top", "cellar"), 1)
    assert plan.routes["top", "cellar"] == ["top", gap, "cellar"]
    places = [(floor, plan.x[room], ROOM_WIDTH / 2) for room, floor in floors.items()]
    for (floor, x, half), (other_floor, other_x, other_half) in combinations(
        [*places, (1, plan.x[gap], 0)], 2
    ):
        assert floor != other_floor or abs(x - other_x) > half + other_half
    # No arrows cross: the long one passes on the side of the cellar.
    pairs: List[Tuple[Any, str]] = [(gap, "left"), (gap, "right"), ("cellar", "ground")]
    assert len({plan.x[place] < plan.x[other] for place, other in pairs}) == 1


@pytest.mark.parametrize("upward", [False, True])
def test_upward_imports_are_drawn_in_red(house: Path, tmp_path: Path, upward: bool) -> None:
    if upward:
        write(house.parent, {"walls/door.py": "from ..roof import tile"})
    picture = tmp_path / "new" / "house.svg"
    assert main(["--package", str(house), "--output", str(picture)]) == 0
    drawn = picture.read_text("utf-8")  # letters are curves, but each text is there as a comment
    texts = re.findall("<!-- (.*) -->", drawn)
    assert {"The house of house", "roof", "2 files, 7 lines", "1 file, 0 lines"} <= set(texts)
    assert ("Upwards: walls → roof" in texts) == upward
    assert ("All imports run downwards." in texts) != upward
    assert ("stroke: #d0312d" in drawn) == upward


def test_a_package_of_one_room(tmp_path: Path) -> None:
    package = write(tmp_path, {"__init__.py": ""})
    draw(read_house(package), tmp_path / "house.png")
    assert (tmp_path / "house.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_picture_of_this_package(tmp_path: Path) -> None:
    picture = tmp_path / "architecture.png"
    command = [sys.executable, "-m", "tools.draw_architecture", "--output", str(picture)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"{picture}: ")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_folder_of_this_package_says_what_it_is_for() -> None:
    house = read_house(PACKAGE)
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} <= set(house.rooms)
    assert [name for name, room in house.rooms.items() if not room.purpose] == []


def test_what_is_no_package_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--package", str(tmp_path / "nowhere")])
    assert f"package='{tmp_path / 'nowhere'}' has no __init__.py: give the folder" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("Floors.", "Arrows.", "Red arrows.", "examples:", "--output"))
