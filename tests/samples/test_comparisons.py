# SPDX-License-Identifier: Apache-2.0
"""demo.py and compare.py: what they find and count, which methods work, and what they say of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Tuple

import pytest
from common.digits import load
from comparison import compare_methods
from report import percent, weight_label
from training import Settings
from underflow import UnderflowProbe
from verdicts import Score, Verdicts

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from tests.samples.running import run
from tests.worlds.networks import two_layers
from tests.worlds.values import data


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


def verdicts(**accuracies: float) -> Verdicts:
    """One case for each method; "no_scaling" threw two batches away."""
    scores = [
        Score("mlp", 1e-3, name.replace("_", " "), accuracy, 2 * (name == "no_scaling"))
        for name, accuracy in accuracies.items()
    ]
    return Verdicts(scores)


@pytest.mark.parametrize(("accuracy", "works"), [(0.99, True), (0.92, True), (0.919, False)])
def test_three_points_below_fp32_are_the_same(accuracy: float, works: bool) -> None:
    found = verdicts(fp32=0.95, adaptive=accuracy)
    assert found.works("adaptive", ("mlp", 1e-3)) is works
    assert found.count("adaptive") == int(works)


def test_the_table_has_a_row_a_rule_and_a_last_line_for_each_method() -> None:
    found = verdicts(fp32=0.95, no_scaling=0.081, adaptive=0.947)
    assert found.table("ascii").isascii()
    lines = found.table().splitlines()
    assert [line.split() for line in lines[2:6]] == [
        ["loss", "weight", "1e-3"],
        ["fp32", "95.0%"],
        ["no", "scaling", "8.1%", "✗"],
        ["adaptive", "94.7%", "✓"],
    ]
    assert "at most 3 points below fp32" in lines[7]
    assert lines[-2:] == [
        "no scaling       works untouched in 0 of 1, 2 batches thrown away",
        "adaptive         works untouched in 1 of 1, 0 batches thrown away",
    ]


def test_a_cell_in_which_fp32_has_not_learned_does_not_count() -> None:
    lines = verdicts(fp32=0.081, no_scaling=0.081, adaptive=0.081).table().splitlines()
    assert [line.split()[-1] for line in lines[3:6]] == ["8.1%"] * 3
    assert "fp32 has not learned" in lines[8]
    assert "0 of 0" in lines[-1]


def test_numbers_are_written_as_people_write_them() -> None:
    shares = [percent(share) for share in (0.0, 1e-9, 4.9e-5, 5.1e-5, 1.0)]
    assert shares == ["0.00%", "< 0.01%", "< 0.01%", "0.01%", "100.00%"]
    weights = [weight_label(weight) for weight in (1.0, 1e-4, 0.25, 100.0, 1e4)]
    assert weights == ["1", "1e-4", "2.5e-1", "100", "1e4"]


def test_layers_and_elements_are_those_of_the_network() -> None:
    loss = two_layers(data(4, 3))
    probe = UnderflowProbe(loss)
    assert list(probe.outputs) == ["a", "b"]
    counts = probe.measure(FormatEmulation(loss), 1024.0)
    # Affine and tanh outputs, weight and bias; the square behind the last layer belongs to the loss.
    assert counts["a"] == (2 * 4 * 5 + 3 * 5 + 5, 0)
    assert counts["b"] == (4 * 2 + 5 * 2 + 2, 0)
    # Behind a layer that is all zero no rounding has anything left to flush.
    counts = probe.measure(FormatEmulation(loss), 2.0**-40)
    assert [c.share for c in counts.values()] == [1.0, 1.0]


def test_adaptive_scaling_is_probed_through_its_own_backward_and_learns_nothing() -> None:
    loss = two_layers(data(4, 3))
    scaling = AdaptiveLossScaling(FormatEmulation(loss))
    scaling.forward()
    scaling.backward()
    scaling.after_update()
    before = scaling.state_dict()
    counts = UnderflowProbe(loss).measure(scaling, 8.0)
    assert [c.lost for c in counts.values()] == [0, 0]
    assert set(scaling.layer_scales) == {"b/affine"}
    assert scaling.state_dict() == before
