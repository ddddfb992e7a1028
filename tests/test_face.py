# SPDX-License-Identifier: Apache-2.0
"""What `import nnabla_adaloss` offers."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Dict

import pytest

import nnabla_adaloss

PACKAGE = Path(nnabla_adaloss.__file__).parent


def for_type_checkers() -> Dict[str, str]:
    """Where the imports under TYPE_CHECKING say that each name lives."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert [alias.name for alias in node.names] == [alias.asname for alias in node.names]
        found.update({alias.name: node.module or "" for alias in node.names})
    return found


def test_type_checkers_see_what_runs() -> None:
    assert for_type_checkers() == nnabla_adaloss._HOMES
    assert list(nnabla_adaloss._HOMES) == sorted(nnabla_adaloss._HOMES)


@pytest.mark.parametrize("name", sorted(nnabla_adaloss._HOMES))
def test_a_public_name_is_public_where_it_lives(name: str) -> None:
    home = importlib.import_module(f"nnabla_adaloss.{nnabla_adaloss._HOMES[name]}")
    assert getattr(nnabla_adaloss, name) is getattr(home, name)
    if hasattr(home, "__path__"):
        assert name in home.__all__


def test_every_folder_says_what_is_public() -> None:
    folders = [path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    for folder in folders:
        module = importlib.import_module(".".join(("nnabla_adaloss", *folder.relative_to(PACKAGE).parts)))
        assert all(hasattr(module, name) for name in module.__all__), module


def test_the_version_is_the_one_that_is_installed() -> None:
    from importlib.metadata import version

    assert nnabla_adaloss.__version__ == version("nnabla-adaloss")


def test_dir_and_all() -> None:
    assert set(nnabla_adaloss.__all__) <= set(dir(nnabla_adaloss))
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        nnabla_adaloss.nosuch  # noqa: B018
