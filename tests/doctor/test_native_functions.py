# SPDX-License-Identifier: Apache-2.0
"""nnabla's functions, tried where some of them are broken on purpose."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, List, Sequence

import pytest

from nnabla_adaloss.doctor import native_functions
from nnabla_adaloss.doctor.findings import Area, Finding, Status
from nnabla_adaloss.doctor.isolation import Outcome
from nnabla_adaloss.doctor.native_functions import Tried, blamed, findings_of, try_functions, versions_of

NAMES = ("exp", "tanh", "affine", "mean")
MACHINE = "Big (sm_90), nvidia-cublas-cu12 12.0.2.224"

Break = Callable[[str], None]


@pytest.fixture
def break_nnabla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Code that Python runs when it starts, and that knows nnabla's functions as F."""

    def run_at_start(code: str) -> None:
        head = "import os, signal, time, nnabla as nn, nnabla.functions as F\n"
        (tmp_path / "sitecustomize.py").write_text(head + code)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    return run_at_start


def errors_of(type_config: str = "float", **options: float) -> List[str]:
    tried = try_functions("cpu", type_config, NAMES, **options)  # type: ignore[arg-type]
    assert [t.name for t in tried] == list(NAMES)
    return [t.error for t in tried]


def only_tanh(error: str) -> List[str]:
    return ["", error, "", ""]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_all_work(processes: int) -> None:
    said: List[str] = []
    assert {
        t.error for t in try_functions("cpu", "half", NAMES, processes=processes, on_progress=said.append)
    } == {""}
    assert said[-1] == "cpu:half: 4 of 4 functions tried"


@pytest.mark.slow
def test_a_process_that_dies_by_a_signal_names_its_function_and_the_others_are_tried(
    break_nnabla: Break,
) -> None:
    break_nnabla("F.tanh = lambda x: os.kill(os.getpid(), signal.SIGSEGV)")
    first, error, *others = errors_of()
    assert error.startswith("Crash: the process ended by SIGSEGV")
    assert {first, *others} == {""}
    (found,) = findings_of(Area.CPU, "float", [Tried("tanh", error)], "nnabla 1.39.0")
    assert (
        found.detail
        == "tanh: the process ended by SIGSEGV. This is nnabla without this package (nnabla 1.39.0)"
    )


@pytest.mark.slow
def test_one_that_hangs(break_nnabla: Break) -> None:
    break_nnabla("F.tanh = lambda x: time.sleep(1000)")
    assert errors_of(time_limit=10.0) == only_tanh("TimeoutExpired: no answer within 10 s")


@pytest.mark.slow
def test_an_error_ends_a_process_and_the_next_goes_on(break_nnabla: Break) -> None:
    break_nnabla(
        "def tanh(x):\n  raise RuntimeError('an illegal instruction was encountered')\n"
        "def exp(x):\n  assert F.tanh is not None, 'a lost context'\n  return _exp(x)\n"
        "F.tanh, _exp, F.exp = tanh, F.exp, exp"
    )
    assert errors_of() == only_tanh("RuntimeError: an illegal instruction was encountered")


@pytest.mark.slow
def test_wrong_numbers_in_forward_are_found_by_numpy(break_nnabla: Break) -> None:
    break_nnabla("_tanh = F.tanh\nF.tanh = lambda x: _tanh(x) * 1.1")
    assert errors_of() == only_tanh("wrong numbers: its output differs by 1.0e-01 of the largest")


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
    assert errors_of("float") == only_tanh("")
    _, error, *_ = errors_of("half")
    assert error.startswith("wrong numbers: a gradient differs by ")


@pytest.mark.slow
def test_what_cannot_begin_is_the_error_of_all() -> None:
    (error,) = {t.error for t in try_functions("nothing", "float", NAMES)}
    assert "No module named 'nnabla_ext.nothing'" in error


@pytest.mark.parametrize("said", ["", "no line of ours", '{"begun": "exp"', 'cuDNN says {"begun": "exp"}'])
def test_silence_is_no_success(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setattr(native_functions, "call_isolated", lambda *a, **k: Outcome(said=said))
    assert errors_of() == ["no answer"] * 4


def test_a_line_that_is_lost_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(run: Any, extension: str, type_config: str, names: Sequence[str], **_: Any) -> Outcome:
        ended = [json.dumps({"ended": name, "error": "", "on_host": []}) for name in names]
        if "exp" in names:
            ended[0] = "something" + ended[0]
        return Outcome(said="\n".join(ended))

    monkeypatch.setattr(native_functions, "call_isolated", call)
    assert errors_of() == ["no answer", "", "", ""]


ILLEGAL = (
    "RuntimeError: target_specific error in forward_impl\n/x/sum.cu:{}\n(cudaGetLastError()) failed with "
    '"an illegal instruction was encountered" (cudaErrorIllegalInstruction).'
)


def test_functions_that_fail_alike_are_one_finding_with_versions_and_a_remedy() -> None:
    tried = [
        Tried("sum", ILLEGAL.format(7)),
        Tried("relu"),
        Tried("mean", ILLEGAL.format(9)),
        Tried("exp", "wrong numbers: its output differs by 1.0e-01 of the largest"),
        Tried("global_average_pooling", "", ["GlobalAveragePooling"]),
    ]
    works, illegal, wrong = findings_of(Area.GPU, "half", tried, MACHINE)
    assert works == Finding(
        Area.GPU,
        Status.WORKS,
        "nnabla's functions, half",
        "2 of 5 give the right numbers; on the host, for lack of a CUDA implementation: GlobalAveragePooling",
    )
    assert illegal.status is Status.BROKEN
    assert illegal.detail == (
        f"sum, mean: the GPU reports an illegal instruction. This is nnabla without this package ({MACHINE})"
    )
    assert "nvidia-cublas-cu12>=12.1" in illegal.cure
    assert wrong.detail.startswith("exp: wrong numbers. This is nnabla")
    assert "cublas" not in wrong.cure


def test_where_nothing_works_nothing_is_said_to() -> None:
    (found,) = findings_of(
        Area.CPU, "float", [Tried("sum", "Crash: the process ended by SIGSEGV")], "nnabla 1.39.0"
    )
    assert found.status is Status.BROKEN
    assert "fresh virtual environment" in found.cure


def test_the_versions_are_those_of_what_is_installed() -> None:
    assert versions_of(Area.CPU).startswith("nnabla 1.")
    assert "numpy" in versions_of(Area.CPU)


BROKEN = Finding(Area.GPU, Status.BROKEN, "adaptive loss scaling, half", "gradients differ from nnabla's", "")


def test_whose_fault_it_is() -> None:
    theirs = blamed(BROKEN, [Tried("sum", "wrong numbers"), Tried("relu")])
    assert theirs.detail.startswith("gradients differ from nnabla's. nnabla's own functions fail here (sum)")
    ours = blamed(BROKEN, [Tried("sum"), Tried("relu")])
    assert ours.detail.endswith("nnabla's own functions work here, so the fault is in this package")
    assert "report it" in ours.cure
    works = BROKEN._replace(status=Status.WORKS)
    assert blamed(works, [Tried("sum", "wrong numbers")]) == works
