# SPDX-License-Identifier: Apache-2.0
"""The guide: it is built with warnings as errors, and holds every public name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nnabla_adaloss
from tools.guide import beside, contents, on_page_content, rooms

ROOT = Path(__file__).parents[2]
MKDOCS = pytest.mark.skipif(sys.version_info < (3, 10), reason="the guide is built with Python 3.10")


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(source), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)


@MKDOCS
@pytest.mark.slow
def test_the_guide_is_built_without_a_warning(tmp_path: Path) -> None:
    process = build(ROOT, tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    pages = "".join(path.read_text("utf-8") for path in (tmp_path / "api").glob("*.html"))
    for name in set(nnabla_adaloss.__all__) - {"__version__", "DynamicLossScalingUpdater"}:
        assert f'id="nnabla_adaloss.{name}"' in pages, name
    assert pages.count(">Examples:</span>") > 30
    assert "<blockquote>" not in pages  # as which >>> is read outside of a program
    start = (tmp_path / "index.html").read_text("utf-8")
    assert "<h1" in start
    # The search works on a page that is opened as a file, and nothing is fetched from elsewhere.
    assert '<script src="iframe-worker.js">' in start
    assert (tmp_path / "search" / "search_index.js").exists()
    assert not re.search(r'<(script|img|link)[^>]*(src|href)="https?:', start + pages)


@MKDOCS
@pytest.mark.slow
def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "results", "tests", "*.pyc", ".*_cache")
    shutil.copytree(ROOT, source, ignore=ignored)
    broken = "# Page\n\n[a](nowhere.md), [b](#nobody), ![c](nothing.png)\n"
    (source / "docs" / "limitations.md").write_text(broken, "utf-8")
    process = build(source, tmp_path / "built")
    assert process.returncode != 0
    for link in ("'nowhere.md'", "'#nobody'", "'nothing.png'"):
        assert link in process.stdout + process.stderr


def test_every_public_name_has_its_place() -> None:
    by_room = rooms()
    names = {name for room in by_room.values() for name in room}
    assert names | {"__version__"} == set(nnabla_adaloss.__all__)
    page = contents(by_room)
    assert "[`AdaLoss`](functions.md#nnabla_adaloss.AdaLoss)" in page
    assert "[`DynamicLossScalingUpdater`](updaters.md#dynamiclossscalingupdater)" in page


@pytest.mark.parametrize(
    ("written", "shown", "folder"),
    [
        ("[a](docs/gpu.md#what)", "[a](gpu.md#what)", ""),
        ("![a](docs/images/demo.png)", "![a](images/demo.png)", ""),
        ("[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)", ""),
        ("[![a](https://b.org/c.svg)](https://b.org) ![d](https://b.org/e.svg) f", "f", ""),
        ("[a](#below)", "[a](#below)", ""),
        ("[a](benchmarks/results/README.md)", "a", ""),
        ("[a](../docs/gpu.md) [b](../README.md) [c](gan.py)", "[a](gpu.md) [b](index.md) c", "samples"),
    ],
)
def test_links_from_beside(written: str, shown: str, folder: str) -> None:
    assert beside(written, folder) == shown


def test_cells_of_wide_tables_know_their_columns_and_pictures_open() -> None:
    wide = (
        "<table><thead><tr><th>a</th><th><code>b</code></th><th></th></tr></thead><tbody>{}</tbody></table>"
    )
    row = "<tr><td>1</td><td>2</td><td>3</td></tr>"
    made = on_page_content(wide.format(row * 2))
    assert made.startswith('<table data-stacks="">')
    assert re.findall(r'<td data-column="(.*?)">(.)', made) == [("a", "1"), ("b", "2"), ("", "3")] * 2
    narrow = "<table><thead><tr><th>a</th><th>b</th></tr></thead><tr><td>1</td><td>2</td></tr></table>"
    assert on_page_content(narrow) == narrow
    for first, second in ((40, 1), (21, 20)):
        long = narrow.replace("1", first * "<code>x</code>").replace("2", second * "y")
        assert re.findall(r'<td data-column="(.)"', on_page_content(long)) == ["a", "b"]
    # Pictures open by themselves, unless they lead elsewhere.
    linked = '<a href="a.png"><img src="a.png"></a>'
    assert on_page_content('<img src="a.png">') == on_page_content(linked) == linked
