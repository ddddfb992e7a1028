# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels compile without a warning, and a compiler that fails is told of."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from building.compiler import system_compiler
from building.native import LEVELS, LIBRARY, SOURCES, WARNINGS, build_library
from nnabla_adaloss.kernels.cpu_library import levels, opened

needs_a_compiler = pytest.mark.skipif(system_compiler() is None, reason="needs a C compiler")


@pytest.mark.slow
@needs_a_compiler
def test_the_library_compiles_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("building.native.WARNINGS", [*WARNINGS, "-Werror"])
    library = tmp_path / "new" / LIBRARY.name
    build_library(library)
    assert [path.name for path in library.parent.iterdir()] == [LIBRARY.name]
    assert opened(library).adaloss_sources() == SOURCES["digest"]().encode()


def test_it_knows_nothing_of_python() -> None:
    with pytest.raises(AttributeError):
        ctypes.CDLL(str(LIBRARY)).PyInit_libadaloss_cpu  # noqa: B018


def test_levels_have_the_names_that_they_are_compiled_for() -> None:
    assert set(levels()) <= set(LEVELS)
    assert levels()[-1] == "baseline"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("false", "could not be compiled with false: set CC to another"),
        ("no-such-cc", "no-such-cc cannot be run"),
    ],
)
def test_a_compiler_that_fails_is_told_of_and_leaves_the_library_as_it_was(
    command: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / LIBRARY.name
    library.write_text("the one before")
    monkeypatch.setenv("CC", command)
    with pytest.raises(SystemExit, match=told):
        build_library(library)
    assert library.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [library]
