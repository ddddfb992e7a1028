# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

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
    content = json.loads((folder / "results.json").read_text("utf-8"))
    return {(r["network"], r["loss_weight"], r["method"]): r for r in content["results"]}


@pytest.mark.slow
def test_quick_comparison(tmp_path: Path) -> None:
    # One test with several claims: a fixture would train once more in each of pytest's parallel processes.
    done = compare("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = read(tmp_path)
    assert len(results) == 2 * 3 * 5
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG\r\n")
    check_table(done.stdout, results)
    for network in ("lenet", "mlp"):
        check_loss_weights(network, results)
        check_smallest_loss_weight(network, results)


def check_table(printed: str, results: Results) -> None:
    for (_, _, method), result in results.items():
        row = f"{result['test_accuracy']:.1%}"
        assert any(method in line and row in line for line in printed.splitlines())
        assert 0.0 <= result["underflow"] <= 1.0
        assert len(result["iterations"]) == len(result["global_scale"])
        assert result["scales"].keys() == result["underflow_by_layer"].keys()


def check_smallest_loss_weight(network: str, results: Results) -> None:
    fp32 = results[network, 1e-6, "fp32"]
    unscaled = results[network, 1e-6, "no scaling"]
    dynamic = results[network, 1e-6, "dynamic"]
    adaptive = results[network, 1e-6, "adaptive"]
    assert fp32["test_accuracy"] > 0.7
    assert unscaled["underflow"] > 0.9
    assert unscaled["test_accuracy"] < 0.3
    assert adaptive["test_accuracy"] > fp32["test_accuracy"] - 0.02
    assert adaptive["underflow"] < 0.05 < dynamic["underflow"]
    assert adaptive["skipped_updates"] == 0


def check_loss_weights(network: str, results: Results) -> None:
    # fp32 learns the same with each.
    losses = [results[network, weight, "fp32"]["final_loss"] for weight in (1.0, 1e-4, 1e-6)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-2)


@pytest.mark.slow
def test_one_seed_gives_one_result() -> None:
    from common.digits import load
    from comparison import compare_methods
    from training import Settings

    def results(seed: int) -> List[Tuple[Any, ...]]:
        found = compare_methods("mlp", 1e-4, load(), Settings(12, seed, 2), lambda trained: None)
        return [r._replace(milliseconds=0.0, relative_time=0.0) for r in found]

    first = results(seed=3)
    assert first == results(seed=3)
    assert first != results(seed=4)


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
