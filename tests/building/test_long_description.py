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
SOURCE = "https://example.org/us/it"


def test_links_become_names_of_files() -> None:
    text = long_description("[a](docs/a.md) and [`b`](../b.txt#part), ![what it shows](c.png)")
    assert text.startswith("a (`docs/a.md`) and `b` (`../b.txt`), *what it shows (`c.png`)*\n")
    assert text.endswith("such as `docs/a.md`, are in the source distribution.*\n")


def test_links_become_absolute_where_the_source_is_known() -> None:
    text = long_description("[a](docs/a.md#part) ![c](c.png)\n", SOURCE)
    assert text == f"[a]({SOURCE}/blob/HEAD/docs/a.md#part) ![c]({SOURCE}/raw/HEAD/c.png)\n"


@pytest.mark.parametrize("source", [None, SOURCE])
def test_what_leads_somewhere_and_programs_stay(source: str) -> None:
    text = (
        "[N](https://nnabla.org) [m](mailto:a@b.c) [here](#here)\n\n```python\nf[0](x) ![](y)\n```\n\nend\n"
    )
    assert long_description(text, source) == text


def test_where_the_source_is() -> None:
    urls = (
        '[project]\nname = "a"\n\n[project.urls]\nHomepage = "https://a"\nSource = "https://b/c/"\n\n[tool]\n'
    )
    assert declared_source(urls) == "https://b/c"
    assert declared_source(urls.replace("Source", "Other")) is None
    assert declared_source(urls.replace("[project.urls]", "[tool.urls]")) is None


def test_its_examples() -> None:
    assert doctest.testmod(building.long_description) == (0, 3)


def metadata(folder: Path, project_urls: str) -> Message:
    """What a wheel says of itself, which is built from a copy of what it is made of."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "building", "nnabla_adaloss"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    with (folder / "pyproject.toml").open("a") as pyproject:
        pyproject.write(project_urls)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", f"{folder}/made"]
    subprocess.run([*command, str(folder)], check=True)
    (wheel,) = (folder / "made").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def shown(described: Message) -> str:
    """The page that an index makes of a description."""
    renderer = pytest.importorskip("readme_renderer.markdown")
    assert described["Description-Content-Type"] == "text/markdown"
    page = renderer.render(described.get_payload())
    assert page is not None, "an index would refuse it"
    return str(page)


@pytest.mark.slow
@pytest.mark.parametrize("declared", [False, True])
def test_an_index_shows_no_link_that_leads_nowhere(tmp_path: Path, *, declared: bool) -> None:
    urls = f'\n[project.urls]\nSource = "{SOURCE}"\n' if declared else ""
    page = shown(metadata(tmp_path, urls))
    # But for those to headings of the page.
    addresses = re.findall(r'(?:href|src)="([^#"][^"]*)"', page)
    assert addresses
    assert [to for to in addresses if not to.startswith("https://")] == []
    assert "<table>" in page
    assert "](" not in re.sub(r"<pre.*?</pre>", "", page, flags=re.S)
    assert ("<img" in page) == declared
    assert (f"{SOURCE}/blob/HEAD/docs/recipes.md" in addresses) == declared
    assert (f"{SOURCE}/raw/HEAD/docs/images/demo.png" in addresses) == declared
