# SPDX-License-Identifier: Apache-2.0
"""benchmarks/study.py: the command, its file of results, what the documentation says of them, which cells
pass, and single jobs of two of its experiments.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from statistics import stdev
from typing import Any, Dict, NamedTuple, Optional, Tuple

import nnabla as nn
import numpy as np
import pytest
from common.digits import load
from scaling_study.experiment import lines_of, read, run
from scaling_study.joined import GRADIENTS, LABELS, PROGRAMS, TRAINING, JoinedJob, experiment, selected
from scaling_study.joined import work as work_joined
from scaling_study.methods import METHOD_TITLES, REFERENCE
from scaling_study.nets import NETS
from scaling_study.reach import FORMATS, WAYS, ReachJob, combined, of_small_loss
from scaling_study.reach import work as work_reach
from scaling_study.several_losses import PAIRS, terms
from scaling_study.training import Result, Run
from scaling_study.verdict import Key, Results, cells, references
from study import experiments, main

ROOT = Path(__file__).parents[2]


class Double(NamedTuple):
    net: str
    number: float


def double(job: Double) -> Dict[str, Any]:
    return {"twice": 2.0 * job.number}


JOBS = [Double("a", 0.5), Double("b", 1e-9), Double("b", 2.0)]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 2, 30])
def test_a_study_that_was_killed_is_resumed(
    tmp_path: Path, cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made" / "results.jsonl"
    whole = "".join(json.dumps({**job._asdict(), **double(job)}) + "\n" for job in JOBS[:2])
    path.parent.mkdir()
    path.write_text(whole[: len(whole) - cut], "utf-8")
    run(JOBS, double, path, 1)
    # Without its line end, a line is whole all the same.
    assert f"{2 - (cut > 1)} of 3 were there, {1 + (cut > 1)} were done now" in capsys.readouterr().out
    found = lines_of(JOBS, read(path))
    assert {job: line["twice"] for job, line in found.items()} == {job: 2.0 * job.number for job in JOBS}
    assert list(found) == JOBS


@pytest.mark.parametrize("name", experiments())
def test_trainings_are_there_once_with_a_reference_each(name: str) -> None:
    for quick in (True, False):
        jobs = experiments()[name](quick).jobs
        assert len(set(jobs)) == len(jobs)
        if name in ("apart", "advice"):
            assert {job.net for job in jobs} == {job.net for job in jobs if job.method == "fp32"}
        if name == "weights":
            references = {job._replace(method="") for job in jobs if job.method == "fp32"}
            assert {job._replace(method="") for job in jobs} == references


@pytest.mark.parametrize("name", experiments())
def test_the_table_is_that_of_the_results(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    if not results.exists():
        pytest.skip("source distributions hold no lines of results")
    (tmp_path / results.name).write_bytes(results.read_bytes())
    assert main([name, "--report", f"--results={tmp_path / results.name}"]) == 0
    assert (tmp_path / f"{name}.md").read_text("utf-8") == results.with_suffix(".md").read_text("utf-8")
    assert (tmp_path / "reach.png").exists() == (name == "reach")


@pytest.mark.slow
def test_a_quick_training_fills_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["net=mlp8", "method=advised"]
    assert main(["advice", "--quick", "--jobs=1", f"--results={tmp_path / 'q.jsonl'}", "--only", *only]) == 0
    assert [line["method"] for line in read(tmp_path / "q.jsonl")] == ["fp32", "advised"] * 2
    assert "| tanh MLP, 8 layers | 4 float16, 5 fp8_hybrid |" in (tmp_path / "q.md").read_text("utf-8")


@pytest.mark.slow
def test_weights_that_change_are_trained_with_every_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["weights", "--quick", "--jobs=1", f"--results={tmp_path / 'q.jsonl'}"]
    assert main([*command, "--only", "net=late_1e-9_from_1,annealed"]) == 0
    lines = read(tmp_path / "q.jsonl")
    assert {line["error"] for line in lines} == {""}
    assert {(line["batches"], len(line["scores"])) for line in lines} == {(48, 2)}
    table = (tmp_path / "q.md").read_text("utf-8")
    for method, count in (("amax_history", 3), ("next", 3), ("grad_scaler", 3), ("dynamic", 2)):
        assert re.search(rf"^\| {method} .*\| \d of {count} +\|", table, re.M), method
    for row in ("second loss of 1e-9 from batch 1 on; adam", "second loss times 0.9 in each batch; sgd"):
        assert re.search(rf"^\| {row} +\| [\d. ]+\| [✓✗] ", table, re.M), row


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("advice", "--only", "net=lenet,nothing"), "'nothing' is unknown; choose of lenet,"),
        (("apart", "--only", "nets=lenet"), "choose of net, storage, weight,"),
        (("reach", "--jobs", "0"), "--jobs 0 must be 1 or more"),
        (("joined", "--label", "later"), "choose of before, now"),
        (("weights", "--gradients"), "--label and --gradients are of joined alone"),
    ],
)
def test_a_wrong_option_is_told(options: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_the_documentation_agrees_with_the_results() -> None:
    table = (ROOT / "benchmarks/results/apart.md").read_text("utf-8")
    page = (ROOT / "docs/choosing.md").read_text("utf-8")
    names = {
        "dynamic_65536": "dynamic from 65536",
        "one_scale": "one measured scale",
        "approx_range": '`"approx_range"`',
        "amax_history": '`"amax_history"`',
    }
    for method, name in names.items():
        line = rf"^\| {re.escape(METHOD_TITLES[method])} .*\| (\d+) of \d+ +\| (\d+) +\| (\d+) +\|[^|]*\|$"
        passed, lost, repeated = re.findall(line, table, re.M)[0]
        assert re.search(rf"^\| {name} .*\| {passed}(?: of \d+)? \| {lost} \| {repeated} \|$", page, re.M), (
            method
        )


Scores = Tuple[Optional[float], ...]
KEY = Key("lenet", "float16", "none")
USUAL = (0.94, 0.95, 0.96)


def result(score: Optional[float], error: str = "") -> Result:
    return Result(score, 100, 4, 2, 3, 0.25, 1.0, error)


def study_of(*scores: Optional[float], reference: Scores = USUAL) -> Results:
    known = {Run("lenet", "float32", 1.0, REFERENCE, i, 100): result(s) for i, s in enumerate(reference)}
    for seed, score in enumerate(scores):
        known[Run("lenet", "float16", 1.0, "none", seed, 100)] = result(score, "" if score else "no good")
    return known


@pytest.mark.parametrize(
    ("scores", "reference", "passes"),
    [
        ((0.9301, 0.9301), USUAL, True),
        ((0.9299, 0.9299), USUAL, False),
        # It is the mean that counts.
        ((0.92, 0.95), USUAL, True),
        ((0.90, 0.95), USUAL, False),
        ((0.95, None), USUAL, False),
        # What is below the resolution, which is 0.01, means nothing.
        ((0.9401,), (0.95, 0.95), True),
        ((0.9399,), (0.95, 0.95), False),
    ],
)
def test_a_cell_passes_within_two_standard_deviations(
    scores: Scores, reference: Scores, *, passes: bool
) -> None:
    assert stdev(USUAL) == pytest.approx(0.01)
    assert cells(study_of(*scores, reference=reference), NETS)[KEY].passes is passes


def test_a_reference_without_a_spread_gives_no_verdict() -> None:
    alone = study_of(0.95, reference=(0.95,))
    assert (references(alone, NETS), cells(alone, NETS)) == ({}, {})


def test_each_version_does_its_own_jobs() -> None:
    jobs = experiment(False).jobs
    for label in LABELS:
        trainings = selected(jobs, label, gradients=False)
        assert {job.part for job in trainings} == {TRAINING}
        assert {job.method for job in trainings} == {"fp32", label}
        assert {job.net for job in trainings} == set(PROGRAMS)
        looks = selected(jobs, label, gradients=True)
        assert {(job.part, job.method) for job in looks} == {(GRADIENTS, label)}


@pytest.mark.parametrize("storage", ["float16", "float8_e5m2", "fp8_hybrid"])
def test_gradients_of_one_batch_are_near_those_of_fp32(storage: str) -> None:
    line = work_joined(JoinedJob(GRADIENTS, "autoencoder", storage, "now", 0, 12))
    assert line["error"] == ""
    assert line["kind"] != "measuring"
    largest = {"float16": 0.01, "float8_e5m2": 0.6, "fp8_hybrid": 0.3}[storage]
    for field in ("errors", "rounding_errors"):
        assert 0.0 < max(line[field].values()) < largest, field
    assert set(line["errors"]) == {"weight0", "weight1", "x"} | {
        f"{half}coder{index}" for half in ("en", "de") for index in (0, 1)
    }
    # An eighth of the functions has gradients of thousands of elements.
    assert all(nonzero > 0 for nonzero, _ in line["flushed_by_depth"])


@pytest.mark.slow
def test_two_versions_fill_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "q.jsonl"
    for label in LABELS:
        for more in ([], ["--gradients"]):
            command = ["joined", "--quick", "--jobs=1", f"--results={results}", f"--label={label}", *more]
            assert main([*command, "--only", "net=siamese"]) == 0
    lines = read(results)
    assert [line["error"] for line in lines] == [""] * 5
    assert [line["method"] for line in lines] == ["fp32", "before", "before", "now", "now"]
    assert "Now is worse than before in 0 cells" in results.with_suffix(".md").read_text("utf-8")


def test_the_reference_is_the_gradient_of_the_sum() -> None:
    with nn.parameter_scope("", OrderedDict()):
        losses = terms(PAIRS["heads"], load(), 0)
        parameters = nn.get_parameters()
        losses.feed()
        found = combined(losses, parameters, 0.25)
        for parameter in parameters.values():
            parameter.grad.zero()
        loss = losses.large + 0.25 * losses.small
        loss.forward()
        loss.backward()
        for name, parameter in parameters.items():
            assert np.linalg.norm(parameter.g - found[name]) < 1e-6 * np.linalg.norm(found[name]), name


def test_components_reach_where_one_scale_does_not() -> None:
    errors = {m: of_small_loss(work_reach(ReachJob("heads", "float16", m, 1e-12))) for m in WAYS}
    reached = {method for method, error in errors.items() if error < 2e-3}
    assert reached == {"amax_history", "approx_range"}
    assert min(error for method, error in errors.items() if method not in reached) > 0.5


@pytest.mark.parametrize("storage", FORMATS)
def test_every_format_has_its_own_error_at_a_ratio_of_1(storage: str) -> None:
    found = work_reach(ReachJob("heads", storage, "amax_history", 1.0))
    largest = {"float16": 2e-3, "bfloat16": 2e-2}.get(storage, 0.5)
    assert 0.0 < of_small_loss(found) < largest
    assert set(found["errors"]) == {
        *("trunk0", "trunk1", "trunk2"),
        *(f"{loss}/{layer}" for loss in ("large", "small") for layer in ("hidden", "out")),
    }
