# SPDX-License-Identifier: Apache-2.0
"""`python -m nnabla_adaloss analyse FILE.py:function`, called in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Iterator

import nnabla as nn
import pytest

from nnabla_adaloss.__main__ import main
from nnabla_adaloss.diagnosis.program import ProgramError, load_program

FILE = """
import nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
from neighbour import SIZE
from tests.diagnosis.healthy import mlp
from tests.diagnosis.nets import tiny_loss_weight
from tests.diagnosis.troubles import dead_branch, dead_relu, never_fed

def build():
    x = nn.Variable((2, SIZE))
    x.d = 1.0
    return F.mean(PF.affine(x, 3) ** 2), lambda: None

def fails():
    return {}["data"]

def loss_only():
    return build()[0]

def of_size(size):
    return build()

def nothing():
    build()

def three():
    return 1, 2, 3

def no_feeder():
    return build()[0], 3

def number():
    return 3

def sound():
    print("words of the program")
    return mlp()

def tiny():
    return tiny_loss_weight()

def dead():
    return dead_relu.build(False)

def branch():
    return dead_branch.build(False)

def unfed():
    return never_fed.build(False)

def several_elements():
    return mlp()[0].parent.inputs[0]

def starving():
    return build()[0], lambda: {}["batch"]

def ends():
    raise SystemExit(3)

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


def test_a_parser_of_the_files_own_finds_its_defaults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the file is imported, and when its function is called."""
    file = "import argparse, nnabla as nn\nparse = argparse.ArgumentParser().parse_args\nparse()\n"
    (folder / "parses.py").write_text(file + "def build():\n    parse()\n    return nn.Variable((1,))\n")
    words = ["nnabla-adaloss", "analyse", "parses.py:build"]
    monkeypatch.setattr(sys, "argv", words)
    assert load_program("parses.py:build")[0].shape == (1,)
    assert sys.argv is words


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("train.py", r"'train\.py' does not say which function: write FILE\.py:function"),
        ("train.py:", "does not say which function"),
        ("trian.py:build", r"the file trian\.py is missing; did you mean train\.py\?"),
        ("trian.py", r"the file trian\.py is missing"),
        ("elsewhere/train.py:build", r"the file elsewhere/train\.py is missing$"),
        ("train.py:xyz", "has no function 'xyz'; it has build, fails, loss_only"),
        ("train.py:SIZE_OF_BATCH", "has no function 'SIZE_OF_BATCH'"),
        ("neighbour.py:build", "has no function 'build'; it has none"),
        ("notes.txt:build", r"notes\.txt must be a Python file"),
        (
            "broken.py:build",
            r"broken\.py cannot be imported: ModuleNotFoundError: .*no_such_package.* \(line 3\)",
        ),
        ("train.py:of_size", r"train\.py:of_size needs arguments \(size\): write a function without"),
        ("train.py:fails", r"train\.py:fails raised KeyError: 'data' \(line 14\)"),
        ("train.py:nothing", r"returned nothing \(a return is missing\?\): return the loss"),
        ("train.py:three", "returned a tuple of 3"),
        ("train.py:no_feeder", "returned a feeder of type int, not a function"),
        ("train.py:number", "returned a value of type int: return the loss"),
    ],
)
def test_errors_name_the_fault(place: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        load_program(place)


def analyse(name: str, *options: str) -> int:
    nn.clear_parameters()
    return main(["analyze" if "--json" in options else "analyse", f"train.py:{name}", *options])


def test_json_alone_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse("sound", "--json", "--batches", "1") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["needs"] == "none"
    assert "words of the program" in printed.err


def test_json_and_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse("tiny", "--json", "--batches", "2", "--storage", "bf16", "-o", "page.html") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batches"], found["storage"]) == (2, "bfloat16")
    assert found["verdict"] in (folder / "page.html").read_text("utf-8")


UNFED = "fc1/affine: it reads the input of shape (32, 16), which nobody has filled"


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("sound", 0, "float16 needs no scaling here."),
        ("loss_only", 0, "No feeder was given"),
        ("dead", 1, "No loss scale helps. fc2/affine/ReLU: it is dead"),
        ("branch", 1, "float16 needs no scaling here. But branch/affine/ReLU: it is dead"),
        ("unfed", 1, f"Nothing can be said. {UNFED}"),
    ],
)
def test_findings_and_the_exit_code(
    name: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyse(name) == code
    assert told in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "error: train.py has no function 'nosuch'; it has build, fails, loss_only"),
        (["several_elements"], "train.py:several_elements: loss has shape (32, 1), not one"),
        (["sound", "--batches", "0"], "batches=0 must be 1 or more"),
        (["sound", "-o", "no/such/folder.html"], "there is no folder no/such to write folder.html to"),
        (["sound", "-o", "../{folder}/train.py"], "train.py is not an HTML page and is not replaced"),
        (["starving"], "error: train.py:starving: KeyError: 'batch' (line "),
        (["ends"], "error: train.py:ends raised SystemExit: 3 (line "),
    ],
)
def test_networks_that_cannot_be_examined(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyse(*(argument.format(folder=folder.name) for argument in arguments)) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert (folder / "train.py").read_text() == FILE


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["analyse", "--help"])
    text = capsys.readouterr().out
    assert "exit codes:" in text
    assert "return loss, feed" in text
