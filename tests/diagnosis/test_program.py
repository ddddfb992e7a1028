# SPDX-License-Identifier: Apache-2.0
"""`FILE.py:function`: what is wrong with either is said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Iterator

import nnabla as nn
import pytest

from nnabla_adaloss.diagnosis.program import ProgramError, load_program

FILE = """
import nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
from neighbour import SIZE

def build():
    x = nn.Variable((2, SIZE))
    return F.mean(PF.affine(x, 3) ** 2), lambda: None

def loss_only():
    return build()[0]

def of_size(size):
    return build()

def fails():
    return {}["data"]

def nothing():
    build()

def three():
    return 1, 2, 3

def no_feeder():
    return build()[0], 3

SIZE_OF_BATCH = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(FILE)
    (tmp_path / "neighbour.py").write_text("SIZE = 4")
    (tmp_path / "broken.py").write_text("import nnabla\n\nimport no_such_package\n")
    (tmp_path / "notes.txt").write_text("loss")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_loss_and_its_feeder() -> None:
    loss, feeder = load_program("train.py:build")
    assert isinstance(loss, nn.Variable)
    assert feeder is not None
    assert load_program("train.py:loss_only")[1] is None


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("train.py", r"'train\.py' does not say which function: write FILE\.py:function"),
        ("train.py:", "does not say which function"),
        ("trian.py:build", r"there is no file trian\.py; did you mean train\.py\?"),
        ("elsewhere/train.py:build", r"there is no file elsewhere/train\.py$"),
        ("train.py:biuld", r"train\.py has no function 'biuld'; did you mean build\?"),
        ("train.py:xyz", "has no function 'xyz'; it has build, loss_only"),
        ("train.py:SIZE_OF_BATCH", "has no function 'SIZE_OF_BATCH'"),
        ("neighbour.py:build", "has no function 'build'; it has none"),
        ("notes.txt:build", r"notes\.txt is no file of Python"),
        (
            "broken.py:build",
            r"broken\.py cannot be imported: ModuleNotFoundError: .*no_such_package.* \(line 3\)",
        ),
        ("train.py:of_size", r"train\.py:of_size needs arguments \(size\): write a function without"),
        ("train.py:fails", r"train\.py:fails raised KeyError: 'data' \(line 16\)"),
        ("train.py:nothing", r"returned nothing \(a return is missing\?\): return the loss"),
        ("train.py:three", "returned a tuple of 3"),
        ("train.py:no_feeder", "returned a feeder that is a int"),
    ],
)
def test_what_is_wrong_is_said(place: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        load_program(place)
