# SPDX-License-Identifier: Apache-2.0
"""benchmarks/study.py: the command, its file of results, and what the documentation says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, NamedTuple

import pytest
from scaling_study.experiment import lines_of, read, run
from scaling_study.methods import METHOD_TITLES
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
    for method, cells in (("amax_history", 3), ("next", 3), ("grad_scaler", 3), ("dynamic", 2)):
        assert re.search(rf"^\| {method} .*\| \d of {cells} +\|", table, re.M), method
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


def test_the_documentation_says_what_the_results_say() -> None:
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
