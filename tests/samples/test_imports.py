# SPDX-License-Identifier: Apache-2.0
"""Samples and documentation import nothing deeper than `nnabla_adaloss`, and no name but the public ones."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import dedent, indent
from typing import List

import pytest

import nnabla_adaloss

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "samples").rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def too_deep(program: str) -> List[str]:
    """What a program imports of the package, wherever the statement stands, that is no public name of it."""
    found: List[str] = []
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}:{alias.name}" for alias in node.names]
    public = {"nnabla_adaloss", *(f"nnabla_adaloss:{name}" for name in nnabla_adaloss.__all__)}
    return [name for name in found if re.match(r"nnabla_adaloss\b", name) and name not in public]


def programs_in(document: str) -> List[str]:
    """The code between ```python and ```, also that of a list's item."""
    return [dedent(code) for _, code in re.findall(r"^( *)```python\n(.*?)^\1```", document, re.M | re.S)]


@pytest.mark.parametrize("path", [*SAMPLES, *DOCUMENTS], ids=lambda path: path.name)
def test_public_names_alone_are_imported(path: Path) -> None:
    text = path.read_text("utf-8")
    programs = [text] if path.suffix == ".py" else programs_in(text)
    assert [name for program in programs for name in too_deep(program)] == []


def test_programs_are_found_in_documents() -> None:
    for document in ("README.md", "docs/functions.md", "docs/recipes.md", "docs/installing.md"):
        text = (ROOT / document).read_text("utf-8")
        assert len(programs_in(text)) == text.count("```python"), document


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import nnabla_adaloss", []),
        ("from nnabla_adaloss import (\n    AdaLoss,\n    branch,\n)", []),
        ("import os, nnabla_adaloss.core", ["nnabla_adaloss.core"]),
        ("from nnabla_adaloss.core import AdaLoss", ["nnabla_adaloss.core:AdaLoss"]),
        ("from nnabla_adaloss import *", ["nnabla_adaloss:*"]),
    ],
)
def test_what_is_too_deep(line: str, found: List[str]) -> None:
    assert too_deep(f"def late():\n{indent(line, '    ')}") == found
