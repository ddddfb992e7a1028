# SPDX-License-Identifier: Apache-2.0
"""Every training with gradients far apart runs, and what it loses is counted by layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, List

import nnabla as nn
import numpy as np
import pytest
from scaling_study.apart import ApartJob, experiment, work
from scaling_study.apart_cells import CELLS, IN_EIGHT_BITS
from scaling_study.apart_table import markdown
from scaling_study.layer_underflow import LayerUnderflow
from scaling_study.methods import METHOD_TITLES, METHODS, REFERENCE, STORAGES
from scaling_study.plan import REFERENCE_SEEDS, SEEDS
from scaling_study.records import read
from scaling_study.solvers import GroupRates
from scaling_study.task import Net
from scaling_study.training import Run, Trainee, train

SLOW = ("residual", "coefficient", "auxiliary", "one_loss_gan")


def shortened(monkeypatch: pytest.MonkeyPatch, net: str, iterations: int) -> None:
    monkeypatch.setitem(CELLS, net, CELLS[net]._replace(iterations=iterations))


@pytest.mark.parametrize("net", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CELLS])
def test_every_cell_trains(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shortened(monkeypatch, net, 3)
    fp32, adaptive = (
        work(ApartJob(net, storage, method, 0))
        for storage, method in (("float32", REFERENCE), ("float16", "amax_history"))
    )
    assert not fp32["error"] + adaptive["error"]
    assert adaptive["score"] == pytest.approx(fp32["score"], abs=0.1)
    assert adaptive["lost"] == 0


def test_one_scale_is_measured_and_leaves_every_layer_at_1() -> None:
    scales: List[float] = []

    def watch(trainee: Trainee) -> None:
        scaling = trainee.loop.scaling
        assert scaling is not None
        assert set(scaling.layer_scales.values()) == {1.0}
        scales.append(trainee.loop.updater.scale)

    for weight in (1.0, 2.0**-20):
        result = train(Run("mlp8", "float16", weight, "one_scale", 0, 3), watch=watch)
        assert result.error == ""
    # The first batch may have begun with another margin.
    assert 2.0**17 < scales[5] / scales[2] < 2.0**22


@pytest.mark.parametrize("net", ["heads", "towers"])
def test_one_scale_is_one_for_both_losses(net: str) -> None:
    from scaling_study.reach import ReachJob
    from scaling_study.reach import work as reach
    from scaling_study.reach_ways import of_small_loss

    # float16 keeps nothing that is 1e-14 of what has its scale.
    assert of_small_loss(reach(ReachJob(net, "float16", "one_scale", 1e-14))) == 1.0


def test_lost_gradients_are_counted_by_layer() -> None:
    net: Net = CELLS["heads_1e-8"]._replace(iterations=20)
    lost = LayerUnderflow()
    train(Run("heads", "float16", 1.0, "none", 0, 20), watch=lost, nets={"heads": net})
    shares = lost.shares()
    assert shares["small/out/affine"] == shares["small/hidden/affine"] == 1.0
    assert shares["large/out/affine"] < 0.01
    assert next(iter(shares)).startswith(("large/out", "small/out"))


def test_groups_have_their_own_learning_rates() -> None:
    parameters = {name: nn.Variable.from_numpy_array(np.ones(1, np.float32)) for name in ("small/W", "W")}
    solver = GroupRates(0.5, group="small", factor=8.0)
    solver.set_parameters(parameters)
    solver.set_learning_rate(0.25)
    for parameter in parameters.values():
        parameter.need_grad = True
        parameter.g = 1.0
    solver.scale_grad(0.5)
    assert not solver.check_inf_or_nan_grad()
    solver.update()
    assert {name: float(p.d[0]) for name, p in parameters.items()} == {"small/W": 0.0, "W": 0.875}
    assert solver.get_parameters().keys() == parameters.keys()
    parameters["small/W"].g = np.inf
    assert solver.check_inf_or_nan_grad()


def test_every_cell_has_all_methods_and_seeds() -> None:
    jobs = list(experiment(None).jobs)
    cells = len(CELLS) + sum(map(len, IN_EIGHT_BITS.values()))
    assert len(set(jobs)) == len(jobs) == cells * len(METHODS) * SEEDS + len(CELLS) * REFERENCE_SEEDS
    assert {job.storage for job in jobs} <= {*STORAGES, "float32"}


def line(**values: Any) -> Any:
    job = {"net": "towers", "storage": "float16", "method": "none", "seed": 0, "score": 0.9, "error": ""}
    counts = {"lost": 0, "repeats": 0, "layers": {"a": 0.0, "b": 0.25}}
    return {**job, **counts, **values}


def test_a_cell_passes_within_twice_the_spread_of_fp32() -> None:
    reference = [line(storage="float32", method=REFERENCE, seed=i, score=s) for i, s in enumerate((0.8, 1.0))]
    # Mean 0.9, deviation 0.141.
    good, bad = line(score=0.62), line(method="fixed_128", score=0.61, lost=3)
    none = line(method="dynamic_8", score=None, error="RuntimeError: enough")
    text = markdown("", [*reference, good, bad, none])
    assert "✓ 0.620" in text
    assert "✗ 0.610, 3 lost" in text
    assert "✗ error" in text
    assert "25.00 % b" in text
    assert text.endswith("- towers, float16, dynamic_8: RuntimeError: enough\n")


def test_the_documentation_tells_what_the_results_do() -> None:
    root = Path(__file__).parents[2]
    table = markdown("", read(root / "benchmarks/results/apart.jsonl"))
    assert (root / "benchmarks/results/apart.md").read_text("utf-8") == table
    page = (root / "docs/choosing.md").read_text("utf-8")
    names = {
        "dynamic_65536": "dynamic from 65536",
        "one_scale": "one measured scale",
        "approx_range": '`"approx_range"`',
        "amax_history": '`"amax_history"`',
    }
    for method, name in names.items():
        line = rf"^\| {re.escape(METHOD_TITLES[method])} +\| (\d+) of \d+ +\| (\d+) "
        passed, lost = re.findall(line, table, re.M)[0]
        assert re.search(rf"^\| {name} .*\| {passed}(?: of \d+)? \| {lost} \|$", page, re.M), method
