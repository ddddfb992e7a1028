# SPDX-License-Identifier: Apache-2.0
"""Map a package: a table of its files, and a picture of its folders with the imports between them."""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path
from typing import List, Optional, Sequence

import grimp

ROOT = Path(__file__).resolve().parent.parent

DESCRIPTION = """\
Writes the table of the files of a package into a page, by folder, each with the first line of its docstring.
Then draws the folders, and the modules beside them, each with the first line of its docstring and its size.
An arrow goes to a folder that is imported; arrows that follow from others are left out. Imports for type
checkers and inside functions are included.
"""

EPILOG = """\
The picture needs Graphviz (Debian: apt install graphviz).

examples:
  python -m tools.draw_architecture                         docs/architecture.md and its picture
  python -m tools.draw_architecture --output picture.svg    another file; the suffix decides the format
  python -m tools.draw_architecture --package other/folder  another package
"""

_STYLE = """\
  graph [fontname="DejaVu Sans", nodesep=0.25, ranksep=0.45, dpi=110]
  node [fontname="DejaVu Sans", shape=box, style="rounded,filled", fillcolor="#e8f0f8", color="#8b98a5"]
  edge [color="#27333f", arrowsize=0.8]
"""


_BEGIN, _END = "<!-- files -->\n", "<!-- end of files -->\n"


def with_files(page: str, package: Path) -> str:
    """Insert the table of a package's files into a page, between its two marks."""
    if page.count(_BEGIN) != 1 or page.count(_END) != 1:
        raise ValueError(f"the page must have the lines {_BEGIN.strip()} and {_END.strip()}")
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{files_of(package)}\n{_END}{rest.partition(_END)[2]}"


def files_of(package: Path) -> str:
    """Table in Markdown of a package's files, by folder, each with the first line of its docstring."""
    lines = ["| file | |", "|---|---|"]
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        name = folder.relative_to(package.parent).as_posix()
        lines.append(f"| **`{name}/`** | **{_purpose(folder / '__init__.py')}** |")
        others = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        lines += [f"| `{path.name}` | {_purpose(path)} |" for path in others]
    return "\n".join(lines) + "\n"


def _purpose(path: Path) -> str:
    """The first line of the docstring of a module."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".").replace("|", r"\|")


def graph_of(package: Path) -> str:
    """Describe the folders of a package and their imports in Graphviz' language."""
    if not (package / "__init__.py").is_file():
        raise ValueError(f"package={str(package)!r} has no __init__.py: give the folder of a Python package")
    package = package.resolve()
    sys.path.insert(0, str(package.parent))
    try:
        graph = grimp.build_graph(package.name, cache_dir=None)
    finally:
        sys.path.remove(str(package.parent))
    parts = sorted(graph.find_children(package.name))
    for part in parts:
        graph.squash_module(part)
    parts.append(package.name)
    lines = [f'  "{part}" [label=<{_label(package, part)}>]' for part in parts]
    lines += [
        f'  "{part}" -> "{other}"'
        for part in parts
        for other in sorted(graph.find_modules_directly_imported_by(part) - {part})
    ]
    return f"digraph {{\n{_STYLE}" + "\n".join(lines) + "\n}\n"


def _label(package: Path, part: str) -> str:
    """A part's name, purpose and size."""
    name = part.rpartition(".")[2]
    folder = package / name
    head = folder / "__init__.py" if folder.is_dir() else package / f"{name}.py"
    if part == package.name:
        head = package / "__init__.py"
    files = [head]
    if folder.is_dir() and part != package.name:
        files = [path for path in folder.rglob("*") if path.suffix in {".py", ".cu", ".cuh", ".c", ".h"}]
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in files)
    size = f"{len(files)} file{'s' * (len(files) > 1)}, {lines:,} lines"
    lines_of_purpose = textwrap.wrap(_purpose(head).replace("`", ""), 30)
    purpose = "<br/>".join(map(escape, lines_of_purpose))
    return f'<b><font point-size="17">{name}</font></b><br/>{purpose}<br/><font color="#6b7885">{size}</font>'


def draw(graph: str, path: Path) -> None:
    """Draw a graph into a file, without arrows that follow from others."""
    reduced = subprocess.run(["tred"], input=graph, capture_output=True, text=True, check=True).stdout
    command = ["dot", f"-T{path.suffix.lstrip('.')}", "-o", str(path)]
    subprocess.run(command, input=reduced, text=True, check=True)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
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
    page = ROOT / "docs" / "architecture.md"
    parser.add_argument("--page", type=Path, default=page, help="docs/architecture.md if not given")
    options = parser.parse_args(arguments)
    try:
        options.page.write_text(with_files(options.page.read_text("utf-8"), options.package), "utf-8")
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {options.page}")
    missing: List[str] = [name for name in ("tred", "dot") if not shutil.which(name)]
    if missing:
        parser.error(f"{missing[0]} is not installed: it comes with Graphviz (Debian: apt install graphviz)")
    try:
        graph = graph_of(options.package)
    except ValueError as error:
        parser.error(str(error))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(graph, options.output)
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
