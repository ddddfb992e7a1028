# SPDX-License-Identifier: Apache-2.0
"""nnabla's functions, tried where some of them are broken on purpose."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Callable, List

import pytest

from nnabla_adaloss.doctor import trials
from nnabla_adaloss.doctor.findings import Area, Finding, Status
from nnabla_adaloss.doctor.isolation import Outcome
from nnabla_adaloss.doctor.trials import TRIALS, findings_of, try_function, try_functions

NAMES = ("exp", "tanh", "affine", "mean")
WORKS = Outcome([])
WRONG = Outcome(error="ArithmeticError: wrong numbers: its output differs by 1.0e-01 of the largest")

Break = Callable[[str], None]


@pytest.fixture
def break_nnabla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Code that Python runs when it starts, and that knows nnabla's functions as F."""

    def run_at_start(code: str) -> None:
        head = "import os, signal, nnabla as nn, nnabla.functions as F\n"
        (tmp_path / "sitecustomize.py").write_text(head + code)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    return run_at_start


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TRIALS", {name: TRIALS[name] for name in NAMES})


def errors_of(type_config: str = "float", processes: int = 1) -> List[str]:
    tried = try_functions("cpu", type_config, processes)
    assert tuple(tried) == NAMES
    return [outcome.error for outcome in tried.values()]


@pytest.mark.slow
def test_all_work() -> None:
    assert errors_of("half", processes=3) == [""] * 4  # one has two of them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("F.tanh = lambda x: os.kill(os.getpid(), signal.SIGSEGV)", "Crash: the process ended by SIGSEGV"),
        (
            "_tanh = F.tanh\nF.tanh = lambda x: _tanh(x) * 1.1",
            "ArithmeticError: wrong numbers: its output differs by 1.0e-01 of the largest",
        ),
    ],
)
def test_the_function_that_fails_is_named_and_the_others_are_tried(
    code: str, error: str, break_nnabla: Break
) -> None:
    break_nnabla(code)
    first, found, *others = errors_of()
    assert found.startswith(error)
    assert {first, *others} == {""}


def test_nan_is_no_right_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trials.TRIALS, "nan", (lambda n, x: n.F.log(-n.F.exp(x)), [(4, 4)]))
    with pytest.raises(ArithmeticError, match="its output differs by nan"):
        try_function("cpu", "float", "nan")


@pytest.mark.slow
def test_wrong_gradients_in_half_are_found_by_float(break_nnabla: Break) -> None:
    break_nnabla(
        "_tanh = F.tanh\n"
        "def tanh(x):\n"
        "  y = _tanh(x)\n"
        "  half = nn.get_current_context().backend[0].endswith('half')\n"
        "  return y + x - x.get_unlinked_variable(need_grad=False) if half else y\n"
        "F.tanh = tanh"
    )
    assert errors_of("float") == [""] * 4
    assert errors_of("half")[1].startswith("ArithmeticError: wrong numbers: a gradient differs by ")


def test_functions_that_fail_alike_are_one_finding_with_versions_and_a_remedy() -> None:
    illegal = (
        "RuntimeError: target_specific error in forward_impl\n/x/sum.cu:{}\n(cudaGetLastError()) failed "
        'with "an illegal instruction was encountered" (cudaErrorIllegalInstruction).'
    )
    tried = {
        "sum": Outcome(error=illegal.format(7)),
        "relu": WORKS,
        "mean": Outcome(error=illegal.format(9)),
        "exp": WRONG,
        "global_average_pooling": Outcome(["GlobalAveragePooling"]),
    }
    works, reported, wrong = findings_of(Area.GPU, "half", tried, "Big (sm_90)")
    assert works == Finding(
        Area.GPU,
        Status.WORKS,
        "nnabla's functions, half",
        "2 of 5 give the right numbers; on the host, for lack of a CUDA implementation: GlobalAveragePooling",
    )
    assert reported.status is Status.BROKEN
    assert reported.detail == (
        "sum, mean: the GPU reports an illegal instruction. This is nnabla without this package (Big (sm_90))"
    )
    assert "nvidia-cublas-cu12>=12.1,<13'; until then avoid these functions" in reported.cure
    assert wrong.detail.startswith("exp: wrong numbers. This is nnabla")
    assert wrong.cure == "avoid these functions, or report this to nnabla"


def test_where_nothing_works_nothing_is_said_to() -> None:
    for error in ("Crash: the process ended by SIGSEGV", "KeyError: 'who knows'"):
        (found,) = findings_of(Area.CPU, "float", {"sum": Outcome(error=error)}, "nnabla 1.39.0")
        assert found.status is Status.BROKEN
        assert "fresh virtual environment" in found.cure
