# SPDX-License-Identifier: Apache-2.0
"""The picture of the package: its folders, their imports, what each is for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import List, Tuple

import pytest

from tools.draw_architecture import graph_of, main

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nnabla_adaloss"
FILES = {
    "__init__.py": '"""A house."""\nfrom .roof import tile\nfrom .ground import stone\n',
    "roof/__init__.py": '"""Keeps the `rain` & snow out.\n\nAnd more.\n"""\n',
    "roof/tile.py": "from . import nail\ndef lay():\n    from ..walls import brick\n",
    "roof/nail.py": "",
    "walls/__init__.py": "",
    "walls/brick.py": "import typing\nif typing.TYPE_CHECKING:\n    from ..ground import stone\n",
    "walls/mortar.cu": "one\ntwo\n",
    "ground.py": '"""Carries the rest."""\nstone = 1\n',
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A package of two folders and a module."""
    for name, text in FILES.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return tmp_path / "house"


def arrows(graph: str) -> List[Tuple[str, ...]]:
    return re.findall('^  "(.*)" -> "(.*)"$', graph, re.M)


def test_folders_and_their_imports(house: Path) -> None:
    assert sorted(arrows(graph_of(house))) == [
        ("house", "house.ground"),
        ("house", "house.roof"),
        ("house.roof", "house.walls"),
        ("house.walls", "house.ground"),
    ]


def test_purpose_and_size(house: Path) -> None:
    graph = graph_of(house)
    for name, purpose, size in (
        ("house", "A house", "1 file, 3 lines"),
        ("roof", "Keeps the rain &amp; snow out", "3 files, 7 lines"),
        ("walls", "", "3 files, 5 lines"),
        ("ground", "Carries the rest", "1 file, 2 lines"),
    ):
        assert f">{name}</font></b><br/>{purpose}<br/><font color=" in graph
        assert f">{size}</font>" in graph


@pytest.mark.skipif(not shutil.which("dot"), reason="needs Graphviz")
def test_what_follows_from_other_arrows_is_left_out(house: Path, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "house.svg"
    assert main(["--package", str(house), "--output", str(picture)]) == 0
    drawn = picture.read_text("utf-8")
    assert drawn.count('class="node"') == 4
    assert drawn.count('class="edge"') == 3  # not that from house to ground


def test_every_folder_of_this_package_says_what_it_is_for() -> None:
    graph = graph_of(PACKAGE)
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert folders <= set(re.findall(r'"nnabla_adaloss\.(\w+)" \[', graph))
    assert "<br/><br/>" not in graph


def test_what_is_no_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere' has no __init__.py: give the folder"):
        graph_of(tmp_path / "nowhere")
