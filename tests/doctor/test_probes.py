# SPDX-License-Identifier: Apache-2.0
"""Processes of their own; the driver is made up for the purpose: machines that run these tests have none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnabla_adaloss.doctor import probes
from nnabla_adaloss.doctor.findings import failure
from nnabla_adaloss.doctor.probes import call_isolated
from nnabla_adaloss.engine.passes import hooked, hookless
from nnabla_adaloss.engine.scaled_weights import ScaledWeights, SwappedWeights
from tests.doctor.behaviour import behave


def test_values_come_back_whatever_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert call_isolated(os.path.commonprefix, [["abc", "abd"]], [[]]) == [("ab", ""), ("", "")]
    assert call_isolated(print, ["not JSON"]) == [(None, "")]
    assert call_isolated(os.system, ["echo not JSON"]) == [(0, "")]
    assert call_isolated(print) == []


@pytest.mark.parametrize(
    ("function", "argument", "error"),
    [
        (os.listdir, "/no/such/folder", "FileNotFoundError: "),
        (sys.exit, "enough", "SystemExit: enough"),
        (behave, "crash", "Crash: the process ended by SIGABRT"),
        (os._exit, 7, "Exit: the process ended with code 7"),
        (os._exit, 0, "Exit: the process ended with code 0"),
        (Path, "no JSON", "Exit: the process ended with code 1 TypeError: "),
    ],
)
def test_errors_and_silence_are_answers(function: Any, argument: Any, error: str) -> None:
    ((_, found),) = call_isolated(function, [argument])
    assert found.startswith(error)


def test_another_process_goes_on_behind_a_call_that_fails() -> None:
    calls = ["tell", "tell", "raise", "tell", "crash", "tell", "hang", "tell"]
    # A process that imports no nnabla starts in 0.1 s; this one waits until the limit.
    found = call_isolated(behave, *([call] for call in calls), time_limit=3.0)
    assert found[2][1] == "KeyError: 'raise'"
    assert found[4][1].startswith("Crash: the process ended by SIGABRT")
    assert found[6][1] == "TimeoutExpired: no answer within 3 s"
    first, *processes = [found[i][0] for i in (0, 1, 3, 5, 7)]
    assert processes[0] == first
    assert len({*processes}) == 4


def test_the_origin_of_a_library() -> None:
    sonames = ("libstdc++.so.6", "libnone.so.1")
    found, missing = call_isolated(probes.loaded_from, *([soname, soname] for soname in sonames))
    assert Path(found[0]).name.startswith("libstdc++.so.6")
    assert "libnone.so.1: cannot open shared object file" in missing[1]


_DRIVER = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return atoi(getenv("INIT")); }
int cuDriverGetVersion(int *version) { *version = atoi(getenv("VERSION")); return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, device ? "Small" : "Big", length);
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 - device : 0;  // major and minor compute capability
    return 0;
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_output_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = str(tmp_path / "libcuda.so.1")
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=_DRIVER, text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    for needed_by, init, version, value, error in [
        ("120", 0, 12040, "serves CUDA 12.4, Big (sm_90), Small (sm_80)", ""),
        ("116", 0, 11000, "serves CUDA 11.0, Big (sm_90), Small (sm_80)", ""),
        ("", 0, 10000, "serves CUDA 10.0, Big (sm_90), Small (sm_80)", ""),
        ("120", 0, 11080, None, "RuntimeError: driver version is insufficient: serves CUDA 11.8"),
        ("120", 100, 12040, None, "RuntimeError: cuInit: no CUDA-capable device"),
        ("", 802, 12040, None, "RuntimeError: cuInit: CUDA error 802"),
    ]:
        monkeypatch.setenv("INIT", str(init))
        monkeypatch.setenv("VERSION", str(version))
        assert call_isolated(probes.driver, [needed_by]) == [(value, error)]


def test_a_missing_mpirun_is_not_called_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(FileNotFoundError) as raised:
        probes.mpi_sum()
    finding = failure("MPI", "mpirun", f"FileNotFoundError: {raised.value}")
    assert finding.status == "missing"
    assert finding.detail == "neither on the PATH nor beside Python"


@pytest.mark.slow
@pytest.mark.parametrize("type_config", ["float", "half"])
def test_scaled_weights_are_compared_too(type_config: str) -> None:
    (said,) = call_isolated(probes.adaptive_backward, ["cpu", type_config])
    assert said[0] == "gradients agree with nnabla's, a layer scaled by 16384 among them"


@pytest.mark.slow
@pytest.mark.parametrize("passes", [hooked, hookless])
def test_weights_that_are_not_scaled_are_noticed(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unscaled(ScaledWeights):
        def swap(self, weights: SwappedWeights) -> None:
            pass

    monkeypatch.setattr(passes, "ScaledWeights", Unscaled)
    with pytest.raises(ArithmeticError, match="gradients differ from nnabla's"):
        probes.adaptive_backward("cpu", "float")
