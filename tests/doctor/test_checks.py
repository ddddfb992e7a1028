# SPDX-License-Identifier: Apache-2.0
"""What is looked at before anything is tried."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, List

import pytest

from nnabla_adaloss.doctor import Area, Finding, Status, area_works, checks, probes, silent
from nnabla_adaloss.doctor.checks import examine_cpu, examine_gpu, python_without_nnabla
from nnabla_adaloss.doctor.isolation import Outcome
from nnabla_adaloss.doctor.native_functions import Tried


@pytest.mark.parametrize("version", ["3.8.20", "3.11.2", "3.12.0rc1", "3.13.5"])
def test_a_python_without_wheels_comes_first_and_its_cure_is_another_python(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: version)
    monkeypatch.setattr(checks, "namespace_folders", lambda package: [])
    first, *others = examine_cpu()
    assert first.status is Status.MISSING
    assert version in first.subject
    assert "python3.10 -m venv" in first.cure
    assert [finding.status for finding in others] == [Status.NOT_TRIED]


@pytest.mark.parametrize(("version", "there"), [("3.9.1", False), ("3.10.14", False), ("3.12.1", True)])
def test_a_python_that_can_have_nnabla_or_has_it_is_no_finding(version: str, there: bool) -> None:
    assert python_without_nnabla(version, there) is None


ALL_WORK = [Tried("sum"), Tried("mean")]
SUM_FAILS = [Tried("sum", "RuntimeError: an illegal instruction was encountered"), Tried("mean")]
WRONG = Outcome(error="ArithmeticError: gradients differ from nnabla's by 1.0e-01 of the largest")


class Gpu:
    """What an H100 would answer, made up: machines that run these tests have none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scaling: Outcome, tried: List[Tried]) -> None:
        self.asked: List[str] = []
        self._scaling, self._tried = scaling, tried
        monkeypatch.setattr(checks, "find_extension_library", lambda folders: Path("libnnabla_cuda-120_8.so"))
        monkeypatch.setattr(checks, "call_isolated", self._call)
        monkeypatch.setattr(checks, "try_functions", self._try)

    def _call(self, probe: Any, *arguments: Any) -> Outcome:
        self.asked.append(probe.__name__)
        if probe is probes.adaptive_backward:
            return self._scaling
        if probe is probes.cuda_libraries:
            return Outcome([["libcublas.so.12", "/x", None]])
        return Outcome("serves CUDA 13.0, H100 (sm_90)" if probe is probes.driver else "version 1")

    def _try(self, extension: str, type_config: str, **_: Any) -> List[Tried]:
        self.asked.append(f"{extension}:{type_config}")
        return self._tried


def broken(findings: List[Finding]) -> List[Finding]:
    return [finding for finding in findings if finding.status is Status.BROKEN]


def test_functions_are_tried_on_a_gpu_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, Outcome("gradients agree"), ALL_WORK)
    assert all(finding.status is Status.WORKS for finding in examine_gpu())
    assert not {"cudnn:float", "cudnn:half"} & {*gpu.asked}
    found = examine_gpu(silent)
    assert all(finding.status is Status.WORKS for finding in found)
    assert {"cudnn:float", "cudnn:half"} < {*gpu.asked}
    assert [f.subject for f in found][-4:] == [
        "nnabla's functions, float",
        "nnabla's functions, half",
        "adaptive loss scaling, float",
        "adaptive loss scaling, half",
    ]


def test_a_card_on_which_nnabla_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, WRONG, SUM_FAILS)
    functions, _, scaling, _ = broken(examine_gpu(silent))
    assert functions.detail.startswith("sum: the GPU reports an illegal instruction. This is nnabla")
    assert "serves CUDA 13.0, H100 (sm_90)" in functions.detail
    assert "nnabla's own functions fail here (sum)" in scaling.detail
    assert not area_works(examine_gpu(silent), Area.GPU)


def test_a_card_on_which_this_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, WRONG, ALL_WORK)
    for scaling in broken(examine_gpu(silent)):
        assert scaling.subject.startswith("adaptive loss scaling")
        assert scaling.detail.endswith("so the fault is in this package")


def test_nothing_is_tried_on_an_extension_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, WRONG, SUM_FAILS)
    call = gpu._call

    def without_extension(probe: Any, *arguments: Any) -> Outcome:
        failed = Outcome(error="ImportError: libcudart.so.12: cannot open shared object file")
        return failed if probe is probes.cuda_extension else call(probe, *arguments)

    monkeypatch.setattr(checks, "call_isolated", without_extension)
    assert "nnabla's functions" not in str(examine_gpu(silent))
