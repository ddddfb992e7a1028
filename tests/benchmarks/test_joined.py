# SPDX-License-Identifier: Apache-2.0
"""Two versions side by side: what is looked at. What the table makes of it is tested in test_study.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from scaling_study.experiment import read
from scaling_study.joined import GRADIENTS, LABELS, PROGRAMS, TRAINING, JoinedJob, experiment, selected, work
from study import main


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
    line = work(JoinedJob(GRADIENTS, "autoencoder", storage, "now", 0, 12))
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
