# SPDX-License-Identifier: Apache-2.0
"""demo.py and compare.py: what they find, and what they say of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Tuple

import pytest
from common.digits import load
from comparison import compare_methods
from training import Settings

from tests.samples.running import run


@pytest.mark.slow
def test_quick_comparison(tmp_path: Path) -> None:
    # One test with several claims: a fixture would train once more in each of pytest's parallel processes.
    done = run("compare", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "results.json").read_text("utf-8"))
    results = {(r["network"], r["loss_weight"], r["method"]): r for r in content["results"]}
    assert len(results) == 2 * 3 * 5
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG\r\n")
    for (_, _, method), result in results.items():
        accuracy = f"{result['test_accuracy']:.1%}"
        assert any(method in line and accuracy in line for line in done.stdout.splitlines())
        assert len(result["iterations"]) == len(result["global_scale"])
        assert result["scales"].keys() == result["underflow_by_layer"].keys()
    for network in ("lenet", "mlp"):
        fp32, unscaled, dynamic, adaptive = (
            results[network, 1e-6, method] for method in ("fp32", "no scaling", "dynamic", "adaptive")
        )
        assert fp32["test_accuracy"] > 0.7
        assert unscaled["underflow"] > 0.9
        assert unscaled["test_accuracy"] < 0.3
        assert adaptive["test_accuracy"] > fp32["test_accuracy"] - 0.02
        assert adaptive["underflow"] < 0.05 < dynamic["underflow"]
        assert adaptive["skipped_updates"] == 0


@pytest.mark.slow
def test_one_seed_gives_one_comparison() -> None:
    def results(seed: int) -> List[Tuple[Any, ...]]:
        found = compare_methods("mlp", 1e-4, load(), Settings(12, seed, 2), lambda trained: None)
        return [r._replace(milliseconds=0.0, relative_time=0.0) for r in found]

    first = results(seed=3)
    assert first == results(seed=3)
    assert first != results(seed=4)


@pytest.mark.slow
def test_small_demo(tmp_path: Path) -> None:
    arguments = ("--iterations", "150", "--networks", "two_losses", "--loss-weights", "1", "1e-12")
    done = run("demo", *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {line[:15].strip(): line[15:] for line in done.stdout.split("\n\n")[0].splitlines()}
    methods = ("dynamic", "dynamic (65536)", "one measured", "adaptive")
    assert rows["loss weight"].split() == ["1:1", "1:1e-12"]
    assert rows["adaptive"].count("✓") == 2
    for method in methods[:-1]:
        assert rows[method].count("✓") == 1, method
        assert rows[method].endswith("✗"), method
    last_lines = done.stdout.split("\n\n")[2].splitlines()
    assert [line[:16].strip() for line in last_lines] == list(methods)
    assert last_lines[-1].endswith("works untouched in 2 of 2, 0 batches thrown away")
    assert f"Picture: {tmp_path / 'demo.png'}" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "option", "value", "message"),
    [
        ("compare", "--iterations", "0", "0 is not 1 or more"),
        ("demo", "--loss-weights", "inf", "inf is not positive and finite"),
    ],
)
def test_wrong_option_is_refused(sample: str, option: str, value: str, message: str) -> None:
    done = run(sample, option, value)
    assert done.returncode == 2
    assert f"{option}: {message}" in done.stderr
