# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest

ROOT = Path(__file__).parents[2]
Results = Dict[Tuple[str, float, str], Dict[str, Any]]


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(ROOT / "samples" / "compare.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def read(folder: Path) -> Results:
    content = json.loads((folder / "results.json").read_text())
    return {(r["network"], r["loss_weight"], r["method"]): r for r in content["results"]}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Tuple[str, Path, Results]:
    folder = tmp_path_factory.mktemp("compare")
    done = compare("--quick", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout, folder, read(folder)


@pytest.mark.slow
def test_every_training_is_in_the_table_and_the_file(quick: Tuple[str, Path, Results]) -> None:
    printed, _, results = quick
    assert len(results) == 2 * 3 * 5
    for (_, _, method), result in results.items():
        row = f"{result['test_accuracy']:.1%}"
        assert any(method in line and row in line for line in printed.splitlines())
        assert 0.0 <= result["underflow"] <= 1.0
        assert len(result["iterations"]) == len(result["global_scale"])
        assert result["scales"].keys() == result["underflow_by_layer"].keys()


@pytest.mark.slow
def test_the_picture_is_a_png(quick: Tuple[str, Path, Results]) -> None:
    _, folder, _ = quick
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("network", ["lenet", "mlp"])
def test_the_smallest_loss_weight(quick: Tuple[str, Path, Results], network: str) -> None:
    _, _, results = quick
    fp32 = results[network, 1e-6, "fp32"]
    unscaled = results[network, 1e-6, "no scaling"]
    dynamic = results[network, 1e-6, "dynamic"]
    adaptive = results[network, 1e-6, "adaptive"]
    assert fp32["test_accuracy"] > 0.8
    assert unscaled["underflow"] > 0.9
    assert unscaled["test_accuracy"] < 0.3
    assert adaptive["test_accuracy"] > fp32["test_accuracy"] - 0.02
    assert adaptive["underflow"] < 0.05 < dynamic["underflow"]


@pytest.mark.slow
def test_fp32_learns_the_same_with_every_loss_weight(quick: Tuple[str, Path, Results]) -> None:
    _, _, results = quick
    for network in ("lenet", "mlp"):
        losses = [results[network, weight, "fp32"]["final_loss"] for weight in (1.0, 1e-4, 1e-6)]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-2)


@pytest.mark.slow
def test_one_seed_gives_one_result(tmp_path: Path) -> None:
    runs = []
    for name in ("first", "second"):
        folder = tmp_path / name
        assert compare("--iterations", "6", "--seed", "3", "--out", str(folder)).returncode == 0
        runs.append(read(folder))
    for key, first in runs[0].items():
        second = runs[1][key]
        for timing in ("milliseconds", "relative_time"):
            first.pop(timing), second.pop(timing)
        assert first == second, key


def test_help_says_what_is_compared_and_how() -> None:
    printed = compare("--help").stdout
    for word in (
        "--quick",
        "--out",
        "--seed",
        "learning rate is divided by the weight",
        "Underflow",
        "results.json",
    ):
        assert word in printed


def test_wrong_option_is_refused() -> None:
    done = compare("--iterations", "0")
    assert done.returncode == 2
    assert "--iterations: 0 is not 1 or more" in done.stderr
