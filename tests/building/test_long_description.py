# SPDX-License-Identifier: Apache-2.0
"""The README as a package index gets it and shows it."""

from __future__ import annotations

import doctest
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import building.long_description
from building.long_description import declared_source, long_description

ROOT = Path(__file__).parents[2]


def test_its_examples() -> None:
    assert doctest.testmod(building.long_description) == (0, 2)


def test_links_and_programs_stay() -> None:
    text = (
        "[N](https://nnabla.org) [m](mailto:a@b.c) [here](#here)\n\n```python\nf[0](x) ![](y)\n```\n\nend\n"
    )
    assert long_description(text, "https://a.org") == text


def test_location_of_the_source() -> None:
    urls = (
        '[project]\nname = "a"\n\n[project.urls]\nHomepage = "https://a"\nSource = "https://b/c/"\n\n[tool]\n'
    )
    assert declared_source(urls) == "https://b/c"
    for other in (urls.replace("Source", "Other"), urls.replace("[project.urls]", "[tool.urls]")):
        with pytest.raises(ValueError, match=r"no Source in \[project.urls\]"):
            declared_source(other)


def wheel_of_a_copy(folder: Path) -> Path:
    """A wheel of what makes one, copied: building leaves files behind in the source tree."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "building", "nnabla_adaloss"):
        source, target = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", f"{folder}/made"]
    subprocess.run([*command, str(folder / "source")], check=True)
    (wheel,) = (folder / "made").glob("*.whl")
    return wheel


def shown(described: Message) -> str:
    """The page that an index makes of a description."""
    renderer = pytest.importorskip("readme_renderer.markdown")
    assert described["Description-Content-Type"] == "text/markdown"
    page = renderer.render(described.get_payload())
    assert page is not None, "an index would refuse it"
    return str(page)


@pytest.mark.slow
def test_an_index_shows_links_and_pictures_that_lead_to_the_source(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_of_a_copy(tmp_path)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = shown(message_from_string(archive.read(name).decode()))
    # But for those to headings of the page.
    addresses = re.findall(r'(?:href|src)="([^#"][^"]*)"', page)
    source = declared_source((ROOT / "pyproject.toml").read_text("utf-8"))
    assert f"{source}/blob/HEAD/docs/recipes.md" in addresses
    assert f"{source}/raw/HEAD/docs/images/demo.png" in addresses
    assert [to for to in addresses if not to.startswith("https://")] == []
    assert "<table>" in page
