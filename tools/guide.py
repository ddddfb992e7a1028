# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: add the API reference and documents outside `docs/`, and fit tables and pictures to
phones.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nnabla_adaloss"
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "samples/README.md": "samples.md",
}

_BADGE = re.compile(r"\[?!\[[^\]]*\]\(https:[^)]*\)(?:\]\([^)]*\))? ?")

# Letters of two columns, of the longest word of each, that fit the width of a phone.
_PHONE = 40


def rooms() -> Dict[str, List[str]]:
    """Public names by the folder or module that defines them, both in alphabetical order."""
    homes: Dict[str, List[str]] = defaultdict(list)
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            homes[(node.module or "").partition(".")[0]] += [alias.name for alias in node.names]
    return {room: sorted(names) for room, names in sorted(homes.items())}


def purpose(room: str) -> str:
    """The first line of the docstring of a folder or module of the package."""
    path = PACKAGE / room / "__init__.py"
    source = path if path.exists() else PACKAGE / f"{room}.py"
    return (ast.get_docstring(ast.parse(source.read_text("utf-8"))) or "").splitlines()[0]


def page(room: str, names: List[str]) -> str:
    """Reference of one folder, in Markdown."""
    return f"# {room}\n\n{purpose(room)}\n\n" + "\n".join(_entry(name) for name in names)


def _entry(name: str) -> str:
    import nnabla_adaloss

    module = getattr(nnabla_adaloss, name).__module__
    if module.startswith("nnabla."):
        return f"## {name}\n\nThat of nnabla itself: `{module}.{name}`.\n"
    return f"::: nnabla_adaloss.{name}\n"


def contents(by_room: Dict[str, List[str]]) -> str:
    """First page of the reference: all names, each with a link."""
    lines = ["# API reference", "", "Everything public is imported from `nnabla_adaloss`.", ""]
    for room, names in by_room.items():
        anchors = (f"[`{name}`]({room}.md#{_anchor(name)})" for name in names)
        lines += [f"**{room}**: {purpose(room)}", "", ", ".join(anchors), ""]
    return "\n".join(lines)


def _anchor(name: str) -> str:
    return name.lower() if _entry(name).startswith("##") else f"nnabla_adaloss.{name}"


def beside(text: str, folder: str = "") -> str:
    """Adapt a document from outside `docs/`: links lead to pages of the guide or are removed, badges are
    removed, as the guide loads nothing from elsewhere.
    """
    return re.sub(r"(!?)\[([^\]]*)\]\(([^)]*)\)", lambda found: _link(found, folder), _BADGE.sub("", text))


def _link(found: re.Match[str], folder: str) -> str:
    picture, text, target = found.groups()
    path, mark, anchor = target.partition("#")
    if path and not path.startswith("https://"):
        path = posixpath.normpath(posixpath.join(folder, path))
    if path.startswith("docs/"):
        path = path[len("docs/") :]
    elif path in BESIDE:
        path = BESIDE[path]
    elif path and not path.startswith("https://"):
        return text
    return f"{picture}[{text}]({path}{mark}{anchor})"


def _page_from(source: str) -> str:
    return beside((ROOT / source).read_text("utf-8"), posixpath.dirname(source))


def on_config(config: Any) -> Any:
    """Fill in the pages of the reference."""
    for entry in config.nav:
        if "API reference" in entry:
            entry["API reference"] = ["api/index.md", *({room: f"api/{room}.md"} for room in rooms())]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files in `docs/`."""
    from mkdocs.structure.files import File

    by_room = rooms()
    pages = {"api/index.md": contents(by_room)}
    pages.update({f"api/{room}.md": page(room, names) for room, names in by_room.items()})
    pages.update({name: _page_from(source) for source, name in BESIDE.items()})
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Redirect links to documents outside `docs/` to their pages."""
    for source, name in BESIDE.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Make wide tables and pictures readable on a phone."""
    tables = re.sub(r"<table>.*?</table>", lambda found: _labelled(found[0]), html, flags=re.S)
    return re.sub(r"(?<!\">)(<img [^>]*?src=\"([^\"]*)\"[^>]*>)", r'<a href="\2">\1</a>', tables)


def _labelled(table: str) -> str:
    """Label each cell of a wide table with its column, for `guide.css`."""
    heads, cells = (
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", table, re.S)]
        for tag in ("th", "td")
    )
    columns = (" ".join([head, *cells[i :: len(heads)]]).split() for i, head in enumerate(heads))
    width = sum(max(map(len, words), default=0) for words in columns)
    if len(heads) < 3 and width <= _PHONE:
        return table
    head_of = cycle(heads)
    labelled = re.sub(r"<td\b", lambda _: f'<td data-column="{next(head_of)}"', table)
    return labelled.replace("<table>", '<table data-stacks="">', 1)
