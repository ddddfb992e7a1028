# SPDX-License-Identifier: Apache-2.0
"""What `import nnabla_adaloss` offers."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import nnabla_adaloss
from tools.guide import rooms


def test_the_version_is_the_one_that_is_installed() -> None:
    assert nnabla_adaloss.__version__ == version("nnabla-adaloss")


def test_dir_and_all() -> None:
    everything = {"__version__", *(name for names in rooms().values() for name in names)}
    assert set(nnabla_adaloss.__all__) == everything
    assert set(dir(nnabla_adaloss)) == everything
    with pytest.raises(AttributeError, match="nosuch"):
        nnabla_adaloss.nosuch  # type: ignore[attr-defined]  # noqa: B018


def test_names_are_imported_when_they_are_used() -> None:
    code = """
import sys, nnabla_adaloss
assert not any(name.startswith(("nnabla.", "numpy", "nnabla_adaloss.core")) for name in sys.modules)
nnabla_adaloss.AdaLossConfig()
assert "nnabla" not in sys.modules
from nnabla_adaloss import *
print(GradScaler.__name__, __version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["GradScaler", nnabla_adaloss.__version__]
