# SPDX-License-Identifier: Apache-2.0
"""The quick samples print what their heads say that they print."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
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
@pytest.mark.parametrize(
    ("sample", "arguments"),
    [("minimal", ""), *(("three_lines", f"--method {m}") for m in ("baseline", "fixed", "adaptive"))],
)
def test_a_copy_runs_alone_without_a_display(sample: str, arguments: str, tmp_path: Path) -> None:
    shutil.copy(SAMPLES / f"{sample}.py", tmp_path)
    package = tmp_path / "site"
    package.mkdir()
    (package / "nnabla_adaloss").symlink_to(SAMPLES.parent / "nnabla_adaloss")
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    environment["PYTHONPATH"] = str(package)
    command = [sys.executable, f"{sample}.py", *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    check_claim(done.stdout.splitlines()[-1], claimed(sample, ""))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{sample}.py", "site"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "arguments"),
    [
        *(("two_losses", f"--method {method}") for method in ("dynamic", "one", "adaptive")),
        *(("lenet_mindspore", f"--manager {m}") for m in ("adaptive", "dynamic --loss-scale 16777216")),
    ],
)
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_head(sample: str, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    nn.clear_parameters()
    assert importlib.import_module(sample).main(arguments.split()) == 0
    check_claim(capsys.readouterr().out.splitlines()[-1], claimed(sample, arguments))
