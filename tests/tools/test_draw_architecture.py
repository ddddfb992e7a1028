# SPDX-License-Identifier: Apache-2.0
"""The picture of the package: its folders, their imports, what each is for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.draw_architecture import ROOT, files_of, graph_of, main, with_files

FILES = {
    "__init__.py": '"""A house."""\nfrom .roof import tile\nfrom .ground import stone\n',
    "roof/__init__.py": '"""Keeps the `rain` & snow out.\n\nAnd more.\n"""\n',
    "roof/tile.py": "def lay():\n    from ..walls import brick\n",
    "walls/__init__.py": "",
    "walls/brick.py": "import typing\nif typing.TYPE_CHECKING:\n    from ..ground import stone\n",
    "walls/mortar.cu": "one\ntwo\n",
    "ground.py": '"""Carries the rest."""\nstone = 1\n',
}


def test_folders_have_a_purpose_and_imports(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / "house" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "house" / name).write_text(text, "utf-8")
    graph = graph_of(tmp_path / "house")
    arrows = [("house", "ground"), ("house", "roof"), ("house.roof", "walls"), ("house.walls", "ground")]
    assert sorted(re.findall(r'^  "(.*)" -> "house\.(.*)"$', graph, re.M)) == arrows
    for name, purpose, size in (
        ("house", "A house", "1 file, 3 lines"),
        ("roof", "Keeps the rain &amp; snow out", "2 files, 6 lines"),
        ("walls", "", "3 files, 5 lines"),
        ("ground", "Carries the rest", "1 file, 2 lines"),
    ):
        assert f">{name}</font></b><br/>{purpose}<br/><font color=" in graph
        assert f">{size}</font>" in graph
    if shutil.which("dot"):
        picture, page = tmp_path / "new" / "house.svg", tmp_path / "page.md"
        page.write_text("# House\n<!-- files -->\nold\n<!-- end of files -->\nEnd\n", "utf-8")
        paths = ["--output", str(picture), "--page", str(page)]
        assert main(["--package", str(tmp_path / "house"), *paths]) == 0
        assert page.read_text("utf-8") == (
            f"# House\n<!-- files -->\n\n{files_of(tmp_path / 'house')}\n<!-- end of files -->\nEnd\n"
        )
        drawn = picture.read_text("utf-8")
        assert drawn.count('class="node"') == 4
        assert drawn.count('class="edge"') == 3  # not that from house to ground, which follows from others


def test_every_folder_of_this_package_states_its_purpose() -> None:
    assert "<br/><br/>" not in graph_of(ROOT / "nnabla_adaloss")
    with pytest.raises(ValueError, match="tests' has no __init__.py: give the folder"):
        graph_of(ROOT / "tests")


def test_files_are_in_a_table_by_folder(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / "house" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "house" / name).write_text(text, "utf-8")
    assert files_of(tmp_path / "house").splitlines()[2:6] == [
        "| **`house/`** | **A house** |",
        "| `ground.py` | Carries the rest |",
        "| **`house/roof/`** | **Keeps the `rain` & snow out** |",
        "| `tile.py` |  |",
    ]
    with pytest.raises(ValueError, match=r"^the page must have the lines <!-- files --> and <!-- end"):
        with_files("# No table", tmp_path / "house")


def test_the_page_of_this_package_has_every_file_with_its_sentence() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    # If not: python -m tools.draw_architecture
    assert with_files(page, ROOT / "nnabla_adaloss") == page
