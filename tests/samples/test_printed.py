# SPDX-License-Identifier: Apache-2.0
"""The quick samples print what their heads say that they print."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from typing import List

import nnabla as nn
import pytest

SAMPLES = Path(__file__).parents[2] / "samples"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
# Of percentages, and of images: about five of the 360 test images.
SOME_IMAGES = 1.5
_LEAST_SCALE = 4096.0


def claimed(sample: str, arguments: str) -> List[str]:
    """The indented lines in the head of a sample, or what follows these arguments in them."""
    head = (SAMPLES / f"{sample}.py").read_text("utf-8").split('"""')[1]
    lines = [line.strip() for line in head.splitlines() if line.startswith("  ")]
    own = [
        line[len(arguments) :].strip() for line in lines if arguments and line.startswith(f"{arguments}  ")
    ]
    return own or lines


def check_claim(printed: str, lines: List[str]) -> None:
    """Fail unless the first line with the printed words has its numbers, but for a few images and digits.

    A loss scale may be the next power of two on another processor.
    """
    words = NUMBER.sub("0", printed)
    claim = next((line for line in lines if NUMBER.sub("0", line) == words), None)
    assert claim is not None, printed
    for a, b in zip(NUMBER.findall(printed), NUMBER.findall(claim)):
        is_scale = float(b) >= _LEAST_SCALE and 0.49 < float(a) / float(b) < 2.01
        assert is_scale or float(a) == pytest.approx(float(b), rel=1e-3, abs=SOME_IMAGES), (printed, claim)


@pytest.mark.slow
def test_minimal(capsys: pytest.CaptureFixture[str]) -> None:
    nn.clear_parameters()
    runpy.run_path(str(SAMPLES / "minimal.py"))
    check_claim(capsys.readouterr().out.splitlines()[-1], claimed("minimal", ""))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "arguments"),
    [
        *(("three_lines", f"--method {method}") for method in ("baseline", "fixed", "adaptive")),
        *(("two_losses", f"--method {method}") for method in ("dynamic", "one", "adaptive")),
        *(("lenet_mindspore", f"--manager {m}") for m in ("adaptive", "dynamic --loss-scale 16777216")),
    ],
)
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_head(sample: str, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    nn.clear_parameters()
    assert importlib.import_module(sample).main(arguments.split()) == 0
    check_claim(capsys.readouterr().out.splitlines()[-1], claimed(sample, arguments))
