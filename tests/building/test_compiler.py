# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict

import pytest

from building.compiler import compiler, packaged_compiler, system_compiler


@pytest.fixture
def empty_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_cc_comes_first_then_any_of_the_usual_compilers(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("clang", "cc"):
        path = empty_path / name
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        assert compiler() == [str(path)]
    monkeypatch.setenv("CC", "ccache 'my gcc' -m64")
    assert compiler() == ["ccache", "my gcc", "-m64"]


def test_a_package_brings_a_compiler_where_there_is_none(
    empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert system_compiler() is None
    package = tmp_path / "packages" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    assert compiler()[:4] == [sys.executable, "-m", "ziglang", "cc"]
    assert packaged_compiler.startswith("ziglang")


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is not None, reason="ziglang is installed")
def test_the_command_without_arguments_names_the_next_step(empty_path: Path) -> None:
    assert shutil.which("cc") is None
    with pytest.raises(SystemExit, match="no C compiler: install gcc or clang, or `pip install ziglang`"):
        compiler()


ASK = """
import runpy, setuptools
setuptools.setup = lambda **given: print(given["setup_requires"])
runpy.run_path("setup.py")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("more", "needed"), [({"CC": "gcc"}, "[]"), ({}, "['ziglang>=0.13']")])
def test_setup_asks_for_a_compiler_only_where_there_is_none(
    more: Dict[str, str], needed: str, tmp_path: Path
) -> None:
    command, root = [sys.executable, "-W", "ignore", "-c", ASK], Path(__file__).parents[2]
    told = subprocess.check_output(command, cwd=root, env={"PATH": str(tmp_path), **more}, text=True)
    assert told.strip() == needed
