# SPDX-License-Identifier: Apache-2.0
"""Two versions side by side: what is looked at, and what the table makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
from scaling_study.experiment import read
from scaling_study.joined import (
    GRADIENTS,
    LABELS,
    PROGRAMS,
    TRAINING,
    JoinedJob,
    experiment,
    selected,
    table,
    work,
)
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


def training(label: str, seed: int, score: float, storage: str = "float16") -> Dict[str, Any]:
    job = JoinedJob(TRAINING, "gan", storage, label, seed, 9)
    told = {"score": score, "batches": 18, "repeats": 1, "lost": 0, "underflow": 0.5}
    return {**job._asdict(), **told, "error": "", "warnings": [], "checkout": label}


def look(label: str, error: float) -> Dict[str, Any]:
    leaves = {"block0/a": 0.1, "block0/b": error, "c": 0.2}
    told = {"components": 3, "kind": "hookless", "norms": leaves, "errors": leaves, "rounding_errors": leaves}
    flushed = {"flushed": {leaf: [4, 1] for leaf in leaves}, "flushed_by_depth": [[4, 1]]}
    most = {"flushed_most": ["7 Tanh", 0.25, 9], "error": "", "warnings": [], "checkout": label}
    job = JoinedJob(GRADIENTS, "siamese", "float16", label, 0, 20)
    return {**job._asdict(), **told, **flushed, **most}


def test_what_became_worse_is_marked() -> None:
    scores = {"fp32": [0.90, 0.91], "before": [0.90, 0.90], "now": [0.85, 0.84]}
    lines = [
        training(m, seed, s, "float32" if m == "fp32" else "float16")
        for m in scores
        for seed, s in enumerate(scores[m])
    ]
    told = table([*lines, look("before", 0.01), look("now", 0.03)])
    assert "Now is worse than before in 1 cells, and better in 0." in told
    (row,) = [line for line in told.splitlines() if line.startswith("| GAN")]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == [
        "0.905",
        "✓ 0.900 -0.005 (-0.010), 50 %, repeats 2",
        "✗ 0.845 -0.060 (-0.070), 50 %, repeats 2",
        "worse",
    ]
    assert "1 of 3" in told
    # The flagged leaf stands for its block, though another one has a greater error.
    (row,) = [line for line in told.splitlines() if line.startswith("| block0/")]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        *("block0/b", "0.01", "0.01", "0.03", "0.01", "0.03", "25 %", "25 %", "⚠ all, backward")
    ]


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
