# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_all.py: steps that succeeded are not repeated, and one that dies or hangs ends no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import List

import gpu_all
import pytest

ROOT = Path(__file__).parents[2]


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    monkeypatch.setattr(
        sys, "argv", ["gpu_all.py", "--context", "cpu:half", "--out", str(folder), *arguments]
    )
    return int(gpu_all.main())


def test_a_job_that_dies_or_hangs_ends_no_other_and_finished_ones_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"
    write = "import sys; open(sys.argv[2], 'w').write('[1]')"
    steps: List[object] = [
        gpu_all.Step("good", 60, ["-c", f"{count}; {write}"], True),
        gpu_all.Step("dies", 60, ["-c", "import os; print('last words', flush=True); os.abort()"]),
        gpu_all.Step("hangs", 1, ["-c", "import time; time.sleep(99)"]),
        gpu_all.Step("last", 60, ["-c", "print('here')"]),
    ]
    monkeypatch.setattr(gpu_all, "steps", lambda context, quick: steps)
    assert start(monkeypatch, tmp_path) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert [one["status"] for one in found] == ["works", "exit code -6", "ended after 1 s", "works"]
    assert found[0]["result"] == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.md", "results.json", "runs"]
    assert "last words" in (tmp_path / "index.md").read_text()

    start(monkeypatch, tmp_path, "--only", "good")
    assert "good" in capsys.readouterr().out
    assert (tmp_path / "runs").read_text() == "x"
    assert start(monkeypatch, tmp_path, "--only", "good", "--again") == 0
    assert (tmp_path / "runs").read_text() == "xx"


def test_packages_stay_where_they_were_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/only_there.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "given"))
    step = gpu_all.Step("imports", 60, ["-c", "import only_there, nnabla_adaloss as n; print(n.__file__)"])
    found = gpu_all.run(step, tmp_path, "")
    assert found["status"] == "works"
    assert found["printed"].strip() == str(ROOT / "nnabla_adaloss/__init__.py")


def test_each_step_ends_in_ten_minutes_and_can_be_chosen_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = list(gpu_all.steps("cudnn:half", False))
    assert max(step.limit for step in steps) <= 600
    names = [step.name for step in steps]
    assert len(names) == len({*names})
    assert {f"tests-float-{room}" for room in ("core", "engine", "updaters")} <= {*names}
    for name in ("kernels", "tests-float-core", "training-resnet50-64"):
        start(monkeypatch, tmp_path, "--context", "cudnn:half", "--dry-run", "--only", name)
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [name]


def test_dry_run_names_programs_that_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert start(monkeypatch, tmp_path, "--dry-run") == 0
    for step in [*gpu_all.steps("cudnn:half", False), *gpu_all.steps("cpu:half", True)]:
        program = step.arguments[0]
        assert program == "-m" or (ROOT / program).is_file()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("network", ["resnet50", "transformer"])
def test_the_training_benchmark_runs_without_a_gpu(network: str, tmp_path: Path) -> None:
    written = tmp_path / "training.json"
    command = [sys.executable, "benchmarks/gpu_training.py", "--context", "cpu:float", "--quick"]
    command += ["--network", network, "--json", str(written)]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=200)
    rows = {row["method"]: row for row in json.loads(written.read_text())["rows"]}
    assert set(rows) == {"fp32", "fixed, unchecked", "dynamic", "adaptive", "approx_range"}
    for method, row in rows.items():
        assert len(row["blocks_ms"]) == 1
        host = sum(row[phase] for phase in ("before forward", "forward", "after forward"))
        host += sum(row[phase] for phase in ("before backward", "backward", "after backward"))
        assert 0.1 < host / row["ms"] < 10.0, f"{method}: the phases are not those of an iteration"
    assert rows["adaptive"]["after forward"] > rows["dynamic"]["after forward"] >= 0.0
