# SPDX-License-Identifier: Apache-2.0
"""benchmarks/published_shapes.py: each model trains, static and rebuilt, and a line tells of it."""

from __future__ import annotations

import math
from itertools import product

import pytest
from published_shapes import GRAPHS, MODELS, STORAGES, Training, kinds, line, main, measure, summary

SLOW = ("lstm", "hourglass", "wavenet-wn", "darts")
_AGAIN = 8  # from then on, batches are those from the beginning


# Both kinds of graphs and both storages for each model; for one of them, in all combinations.
CASES = [
    pytest.param(name, graph, storage, marks=[pytest.mark.slow] * (name in SLOW))
    for name in MODELS
    for graph, storage in (product if name == "rnn" else zip)(GRAPHS, STORAGES)
]


@pytest.mark.filterwarnings("ignore:nothing is stored in half precision")
@pytest.mark.parametrize(("name", "graph", "storage"), CASES)
def test_every_model_trains(name: str, graph: str, storage: str) -> None:
    training = Training(MODELS[name], "adaptive", graph, storage)
    losses = []
    for _ in range(_AGAIN + 1):
        results = training.update()
        assert all(result.updated for result in results)
        losses.append(training.losses)
    assert all(math.isfinite(loss) for found in losses for loss in found)
    # Of two players, the one's gain is the other's loss.
    if len(training.updaters) == 1:
        assert losses[_AGAIN] < losses[0]


@pytest.mark.parametrize("graph", GRAPHS)
def test_both_updaters_train_alike(graph: str) -> None:
    ways = [Training(MODELS["rnn"], method, graph, "float16") for method in ("dynamic", "adaptive")]
    for _ in range(3):
        for training in ways:
            training.update()
        assert ways[0].losses == pytest.approx(ways[1].losses, rel=1e-2)
    # From its first batch the adaptive one learns its scales.
    assert [training.repeats for training in ways] == [[], [1]]
    assert ways[0].functions == ways[1].functions > 16


@pytest.mark.slow
def test_a_line_tells_of_a_model() -> None:
    model = MODELS["unet"]
    row = measure(model, "static", ["float16"], 1)
    assert row.ms["float16"] > 0.0  # how long on a busy machine is chance
    assert 0.2 < row.ratios["float16"] < 10.0
    assert row.repeats == {"dynamic float16": 0, "adaptive float16": 0}
    assert line(model, "static", row).split()[:3] == ["U-Net,", "16x16", "static"]
    assert "ran again" not in line(model, "static", row)
    assert "2 batches of a ran again" in line(model, "static", row._replace(repeats={"a": 2, "b": 0}))


def test_median_and_worst_are_those_of_each_column() -> None:
    empty = measure(MODELS["unet"], "static", [], 1)
    rows = {(name, "static"): empty._replace(ratios={"none": x}) for name, x in zip("abc", (1.0, 1.5, 1.1))}
    assert [text.split()[2] for text in summary(rows).splitlines()] == ["1.100", "1.500"]


def test_kinds_are_counted() -> None:
    found, repeats = kinds(MODELS["autoencoder"], "static", "float16", 16)
    assert sum(found.values()) == 16
    assert found["measuring"] >= 1
    assert repeats == 0


def test_a_wrong_option_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["lenet"], "unknown model: lenet"),
        (["--blocks", "0"], "--blocks must be 1"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
