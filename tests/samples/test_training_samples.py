# SPDX-License-Identifier: Apache-2.0
"""Every sample that trains does so for a few iterations, says how it is used, and goes on bit for bit."""

from __future__ import annotations

import ast
import importlib
import os
import re
import signal
from pathlib import Path
from typing import Any, Dict, Iterator

import nnabla as nn
import numpy as np
import pytest
from common import NEEDED
from PIL import Image

from tests.mpirun import run_ranks
from tests.samples.common.files import digits, write_cifar, write_image_folder
from tests.samples.running import ROOT, run
from tests.worlds.children import end_of, in_a_child
from tools.mnist_sample import Scans, write_mnist

SAMPLES = Path(__file__).parents[2] / "samples"
# How each is made small enough for a test.
SMALL: Dict[str, str] = {
    "two_losses": "--batch-size 8",
    "lenet_mindspore": "--batch-size 8",
    "gan": "--batch-size 8",
    "transformer": "--batch-size 2 --length 8 --width 8 --heads 2 --blocks 1",
    "segmentation": "--batch-size 2",
    "detection": "--batch-size 2",
    "cifar_resnet": "--batch-size 4 --image-size 8",
    "imagenet_resnet": "--batch-size 4 --width 2",
}


def train(sample: str, *arguments: str) -> None:
    """Run a sample with parameters of its own."""
    nn.clear_parameters()
    command = [*SMALL[sample].split(), "--iterations", "6", *arguments]
    assert importlib.import_module(sample).main(command) == 0


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def killed_while_saving(sample: str, *arguments: str) -> None:
    """Run a sample in a process that gets SIGKILL when its third checkpoint is about to get its name."""
    replace, replaced = os.replace, []

    def killing(source: str, target: str) -> None:
        replaced.append(target)
        if len(replaced) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    def action() -> None:
        os.replace = killing  # type: ignore[assignment]
        train(sample, *arguments)

    assert end_of(in_a_child(action)) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("sample", SMALL)
def test_a_training_that_is_killed_goes_on_bit_for_bit(
    sample: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(sample, "--checkpoint", str(whole))
    expected = parameters(whole)
    assert len(expected) > 2
    killed_while_saving(sample, "--checkpoint", str(killed), "--checkpoint-every", "2")
    train(sample, "--checkpoint", str(killed), "--resume")
    resumed = parameters(killed)
    assert all(np.array_equal(expected[name], resumed[name], equal_nan=True) for name in expected)
    printed = capsys.readouterr().out.splitlines()
    half = len(printed) // 2
    assert printed[half - 1] == printed[-1], "what is printed at the end is the same, too"


def parameters(checkpoint: Path) -> Dict[str, Any]:
    with np.load(checkpoint) as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith("parameters/")}


@pytest.mark.parametrize("sample", SMALL)
def test_help_teaches(sample: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(sample).main(["--help"])
    assert end.value.code == 0
    assert f"python samples/{sample}.py" in capsys.readouterr().out


@pytest.mark.slow
def test_an_overflow_that_is_not_dropped_ruins_the_parameters() -> None:
    for more, finite in (((), True), (("--keep-overflow-update",), False)):
        train("lenet_mindspore", "--manager", "fixed", "--loss-scale", "16777216", *more)
        assert all(np.isfinite(p.d).all() for p in nn.get_parameters().values()) is finite


def write_both_parts(folder: Path) -> None:
    classes = np.arange(12, dtype=np.uint8) % 3
    for part, first in (("train", 0), ("val", 12)):
        write_image_folder(folder / part, Scans(digits(12, 40, first).pixels, classes))


def write_mnist_files(folder: Path) -> None:
    write_mnist(folder, "train", digits(16, 28), packed=True)
    write_mnist(folder, "t10k", digits(7, 28, first=16), packed=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "write", "arguments", "printed"),
    [
        ("lenet_mindspore", write_mnist_files, "--epochs 2", "epoch: 2 step: 2, loss is "),
        ("cifar_resnet", lambda folder: write_cifar(folder, digits(24, 32)), "", "resnet20: "),
        ("imagenet_resnet", write_both_parts, "--image-size 32", "resnet18: "),
    ],
)
def test_files_of_data_sets(
    sample: str, write: Any, arguments: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path())
    train(sample, "--data-dir", ".", *arguments.split())
    assert printed in capsys.readouterr().out
    if sample == "imagenet_resnet":
        assert nn.get_parameters()["fc/affine/W"].shape[1] == 3


@pytest.mark.slow
def test_a_command_that_fails_ends_with_a_sentence() -> None:
    done = run("cifar_resnet", "--data-dir", "nowhere")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("nowhere/data_batch_1.bin is missing")


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["gan", "segmentation", "detection"])
def test_pictures_of_predictions(sample: str, tmp_path: Path) -> None:
    train(sample)
    assert list(tmp_path.iterdir()) == [], "nothing is drawn unasked"
    train(sample, "--picture", "drawn.png")
    pixels = np.asarray(Image.open("drawn.png").convert("RGB"))
    assert min(pixels.shape[:2]) > 300
    assert pixels.std() > 10.0


@pytest.mark.parametrize(("file", "message"), [("a.bmp", "does not end in"), ("nowhere/a.png", "no folder")])
def test_a_picture_that_cannot_be_written_is_refused_before_the_training(
    file: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train("gan", "--picture", file)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "network", "layers"),
    [
        ("cifar_resnet", "resnet56", 55),
        ("cifar_resnet", "resnet110", 109),
        ("cifar_resnet", "wide16_4", 16),
        ("imagenet_resnet", "resnet50", 53),
    ],
)
def test_other_networks(sample: str, network: str, layers: int) -> None:
    train(sample, "--network", network, "--iterations", "1")
    assert sum(name.endswith("conv/W") for name in nn.get_parameters()) == layers


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("sample", ["transformer", "cifar_resnet", "imagenet_resnet"])
def test_two_ranks(sample: str) -> None:
    arguments = [*SMALL[sample].split(), "--iterations", "2", "--distributed"]
    done = run_ranks(SAMPLES / f"{sample}.py", 2, *arguments, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss scale") == 1, "one of them prints"


def test_minimal_has_25_lines_of_code() -> None:
    text = (SAMPLES / "minimal.py").read_text("utf-8")
    head = ast.parse(text).body[0].end_lineno
    lines = text.splitlines()[head:]
    assert sum(bool(line.strip()) for line in lines) <= 25


def test_readme_lists_every_sample() -> None:
    readme = (SAMPLES / "README.md").read_text("utf-8")
    for sample in ("minimal", "three_lines", "distributed", *SMALL):
        assert f"[{sample}.py]({sample}.py)" in readme


@pytest.fixture
def default_context() -> Iterator[None]:
    before = nn.get_current_context()
    yield
    nn.set_default_context(before)


@pytest.mark.slow
@pytest.mark.usefixtures("default_context")
@pytest.mark.parametrize("sample", ["gan", "transformer"])
def test_samples_run_in_native_half_precision(sample: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(sample, "-c", "cpu", "-t", "half")
    assert nn.get_current_context().backend[0] == "cpu:half"
    printed = capsys.readouterr().out
    assert printed
    assert not re.search(r"\b(inf|nan)\b", printed), printed


# Python imports `sitecustomize` before it runs anything.
ABSENT = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == "sklearn" else find(name, *rest))
"""


def test_requirements_of_samples_are_the_extra_of_the_package() -> None:
    (extra,) = re.findall(r"^samples = \[(.*)\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert sorted(NEEDED.values()) == sorted(re.findall(r'"([\w-]+)', extra))


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["gan", "demo", "compare", "distributed"])
def test_a_sample_names_the_package_to_install(sample: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    done = run(sample, path=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "The samples need scikit-learn: python -m pip install scikit-learn"
    assert "Traceback" not in done.stderr
