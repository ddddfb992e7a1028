# SPDX-License-Identifier: Apache-2.0
"""`python -m nnabla_adaloss analyse`, called in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nnabla as nn
import pytest

from nnabla_adaloss.__main__ import main

FILE = """
from tests.diagnosis.healthy import mlp as sound
from tests.diagnosis.troubles_of_layers import dead_first_layer, tiny_loss_weight
def tiny():
    return tiny_loss_weight.build(False)
def dead():
    return dead_first_layer.build(False)
def several_elements():
    return sound()[0].parent.inputs[0]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "networks_of_a_test.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def analyse(name: str, *options: str) -> int:
    nn.clear_parameters()
    return main(["analyse", f"networks_of_a_test.py:{name}", *options])


def test_a_sound_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse("sound") == 0
    assert "float16 needs no scaling here." in capsys.readouterr().out


def test_json_and_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse("tiny", "--json", "--batches", "2", "--storage", "bf16", "-o", "page.html") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batches"], found["storage"]) == (2, "bfloat16")
    assert found["verdict"] in (folder / "page.html").read_text("utf-8")


def test_what_no_scale_helps_is_another_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse("dead") == 1
    assert "No loss scale helps: fc1/affine: its ReLU is dead" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "error: networks_of_a_test.py has no function 'nosuch'"),
        (["several_elements"], "networks_of_a_test.py:several_elements: loss has shape (32, 1), not one"),
        (["sound", "--batches", "0"], "batches=0 must be 1 or more"),
        (["sound", "-o", "no/such/folder.html"], "there is no folder no/such to write folder.html to"),
    ],
)
def test_what_cannot_be_examined(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyse(*arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_format_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        analyse("sound", "--storage", "float17")
    assert exit_code.value.code == 2
    assert "fp8_hybrid" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["analyse", "--help"])
    text = capsys.readouterr().out
    assert "exit codes:" in text
    assert "return loss, feed" in text
