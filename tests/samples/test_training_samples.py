# SPDX-License-Identifier: Apache-2.0
"""Every sample that trains does so for a few iterations, says how it is used, and goes on bit for bit."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import signal
from pathlib import Path
from typing import Any, Dict, Iterator

import nnabla as nn
import numpy as np
import pytest
from PIL import Image

from tests.mpirun import run_ranks
from tests.samples.common.files import digits, write_cifar, write_image_folder
from tests.samples.running import run
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
def test_dynamic_scaling_feeds_until_its_scale_fits(capsys: pytest.CaptureFixture[str]) -> None:
    train("lenet_mindspore", "--manager", "dynamic", "--loss-scale", "16777216")
    found = re.search(r"loss scale (\d+), (\d+) batches fed", capsys.readouterr().out)
    assert found is not None
    scale, fed = map(int, found.groups())
    assert 2 ** (fed - 6) * scale == 2**24 > scale, "each batch that was thrown away halved it"


@pytest.mark.slow
def test_an_overflow_that_is_not_dropped_ruins_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("--manager", "fixed", "--loss-scale", "16777216")
    train("lenet_mindspore", *fixed)
    assert ", 6 batches fed" in capsys.readouterr().out
    assert all(np.isfinite(p.d).all() for p in nn.get_parameters().values())
    train("lenet_mindspore", *fixed, "--keep-overflow-update")
    assert not all(np.isfinite(p.d).all() for p in nn.get_parameters().values())


@pytest.mark.slow
def test_files_of_mnist(capsys: pytest.CaptureFixture[str]) -> None:
    write_mnist(Path(), "train", digits(16, 28), packed=True)
    write_mnist(Path(), "t10k", digits(7, 28, first=16), packed=True)
    train("lenet_mindspore", "--data-dir", ".", "--epochs", "2")
    printed = capsys.readouterr().out
    assert "epoch: 2 step: 2, loss is " in printed
    assert "test accuracy" in printed


@pytest.mark.slow
def test_files_of_cifar(capsys: pytest.CaptureFixture[str]) -> None:
    write_cifar(Path(), digits(24, 32))
    train("cifar_resnet", "--data-dir", ".", "--iterations", "2")
    assert "resnet20: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_of_images_by_class(capsys: pytest.CaptureFixture[str]) -> None:
    classes = np.arange(12, dtype=np.uint8) % 3
    for part, first in (("train", 0), ("val", 12)):
        write_image_folder(Path(part), Scans(digits(12, 40, first).pixels, classes))
    train("imagenet_resnet", "--data-dir", ".", "--image-size", "32", "--iterations", "4")
    assert "resnet18: " in capsys.readouterr().out
    assert nn.get_parameters()["fc/affine/W"].shape[1] == 3


@pytest.mark.slow
def test_a_command_that_fails_ends_with_a_sentence() -> None:
    done = run("cifar_resnet", "--data-dir", "nowhere")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("nowhere/data_batch_1.bin is missing")


def test_without_a_gpu_it_is_said_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("nnabla_ext.cudnn"):
        pytest.skip("nnabla's extension for GPUs is here")
    with pytest.raises(SystemExit) as end:
        train("gan", "-c", "cudnn", "-t", "half")
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "-c cudnn -t half cannot be used here: " in told
    assert "`python -m nnabla_adaloss doctor --gpu` says what is missing" in told


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
@pytest.mark.parametrize("network", ["resnet56", "resnet110", "wide16_4"])
def test_networks_for_cifar(network: str) -> None:
    train("cifar_resnet", "--network", network, "--iterations", "1")
    layers = [name for name, p in nn.get_parameters().items() if name.endswith("conv/W")]
    assert len(layers) == {"resnet56": 55, "resnet110": 109, "wide16_4": 16}[network]


@pytest.mark.slow
def test_resnet50() -> None:
    train("imagenet_resnet", "--network", "resnet50", "--iterations", "1")
    assert sum(name.endswith("conv/W") for name in nn.get_parameters()) == 53


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
