# SPDX-License-Identifier: Apache-2.0
"""nnabla's functions, tried where some of them are broken on purpose."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import List

import nnabla.functions as F
import pytest

from nnabla_adaloss.doctor import trials
from nnabla_adaloss.doctor.findings import Finding
from nnabla_adaloss.doctor.trials import TRIALS, findings_of, try_function, try_functions

NAMES = ("exp", "tanh", "affine", "mean")
WORKS = ([], "")
WRONG = (None, "ArithmeticError: wrong numbers: its output differs by 1.0e-01 of the largest")


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TRIALS", {name: TRIALS[name] for name in NAMES})


def errors_of(type_config: str, processes: int = 1) -> List[str]:
    tried = try_functions("cpu", type_config, processes)
    assert tuple(tried) == NAMES
    return [error for _, error in tried.values()]


@pytest.mark.slow
def test_all_work() -> None:
    assert errors_of("half", processes=3) == [""] * 4  # one has two of them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tanh", "error"),
    [
        ("return os.kill(os.getpid(), signal.SIGSEGV)", "Crash: the process ended by SIGSEGV"),
        ("return _tanh(x) * 1.1", "ArithmeticError: wrong numbers: its output differs by 1.0e-01"),
        ("return F.log(-F.exp(x))", "ArithmeticError: wrong numbers: its output differs by nan"),
        (
            "return _tanh(x) + x - x.get_unlinked_variable(need_grad=False)",
            "ArithmeticError: wrong numbers: a gradient differs by ",
        ),
    ],
)
def test_the_function_that_fails_in_half_is_named_and_the_others_are_tried(
    tanh: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Python runs when it starts.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, nnabla as nn, nnabla.functions as F\n"
        "_tanh = F.tanh\n"
        "def tanh(x):\n"
        "  if nn.get_current_context().backend[0] == 'cpu:float': return _tanh(x)\n"
        f"  {tanh}\n"
        "F.tanh = tanh"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    assert errors_of("float") == [""] * 4
    first, found, *others = errors_of("half")
    assert found.startswith(error)
    assert {first, *others} == {""}


def test_errors_in_float_as_well_are_found_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "tanh", F.exp)
    with pytest.raises(ArithmeticError, match="its output differs by"):
        try_function("cpu", "float", "tanh")


def test_functions_that_fail_alike_are_one_finding_with_versions_and_a_remedy() -> None:
    illegal = (
        "RuntimeError: target_specific error in forward_impl\n/x/sum.cu:{}\n(cudaGetLastError()) failed "
        'with "an illegal instruction was encountered" (cudaErrorIllegalInstruction).'
    )
    tried = {
        "sum": (None, illegal.format(7)),
        "relu": WORKS,
        "mean": (None, illegal.format(9)),
        "exp": WRONG,
        "global_average_pooling": (["GlobalAveragePooling"], ""),
    }
    works, reported, wrong = findings_of("GPU", "half", tried, "Big (sm_90)")
    assert works == Finding(
        "GPU",
        "works",
        "nnabla's functions, half",
        "2 of 5 give the right numbers; on the host, for lack of a CUDA implementation: GlobalAveragePooling",
    )
    assert reported.status == "broken"
    assert reported.detail == (
        "sum, mean: the GPU reports an illegal instruction. This is nnabla without this package (Big (sm_90))"
    )
    assert "or by F.average_pooling; until then avoid these functions" in reported.cure
    assert wrong.detail.startswith("exp: wrong numbers. This is nnabla")
    assert wrong.cure == "report this to nnabla; until then avoid these functions"


def test_no_scaling_is_recommended_if_none_works() -> None:
    for error in ("Crash: the process ended by SIGSEGV", "KeyError: 'who knows'"):
        (found,) = findings_of("CPU", "float", {"sum": (None, error)}, "nnabla 1.39.0")
        assert found.status == "broken"
        assert "fresh virtual environment" in found.cure
