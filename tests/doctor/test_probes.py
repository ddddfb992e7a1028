# SPDX-License-Identifier: Apache-2.0
"""The driver probe, asked of drivers made up for the purpose: machines that run these tests have none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nnabla_adaloss.doctor import probes
from nnabla_adaloss.doctor.isolation import Outcome, call_isolated
from nnabla_adaloss.kernels import CpuKernels

_DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


def ask_driver(folder: Path, needed_by: str, **definitions: int) -> Outcome:
    """What the probe says, in a process whose driver is compiled with `definitions`."""
    macros = [f"-D{name}={value}" for name, value in definitions.items()]
    library = str(folder / "libcuda.so.1")
    subprocess.run(
        ["cc", "-shared", "-fPIC", *macros, "-x", "c", "-", "-o", library],
        input=_DRIVER,
        text=True,
        check=True,
    )
    return call_isolated(probes.driver, needed_by)


@pytest.fixture(autouse=True)
def _driver_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


def test_driver_tells_its_cuda_version_and_gpus(tmp_path: Path) -> None:
    outcome = ask_driver(tmp_path, "120", INIT=0, VERSION=12040)
    assert outcome == Outcome(value="serves CUDA 12.4, Big (sm_90), Small (sm_80)")


def test_a_driver_may_be_older_within_the_major_version(tmp_path: Path) -> None:
    assert ask_driver(tmp_path, "116", INIT=0, VERSION=11000).value.startswith("serves CUDA 11.0")


def test_a_driver_for_an_older_cuda_is_insufficient(tmp_path: Path) -> None:
    outcome = ask_driver(tmp_path, "120", INIT=0, VERSION=11080)
    assert outcome.error == "RuntimeError: driver version is insufficient: serves CUDA 11.8"


def test_no_gpu(tmp_path: Path) -> None:
    outcome = ask_driver(tmp_path, "120", INIT=100, VERSION=12040)
    assert outcome.error == "RuntimeError: cuInit: no CUDA-capable device"


def test_other_failures_show_their_number(tmp_path: Path) -> None:
    assert ask_driver(tmp_path, "", INIT=802, VERSION=12040).error == "RuntimeError: cuInit: CUDA error 802"


@pytest.mark.parametrize("type_config", ["float", "half"])
def test_scaled_weights_are_among_what_is_compared(type_config: str) -> None:
    said = call_isolated(probes.adaptive_backward, "cpu", type_config)
    assert said.value == "gradients agree with nnabla's, a layer scaled by 16 among them"


def test_a_scaled_copy_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(self: CpuKernels, source: Any, target: Any, alpha: float, *, half: bool = False) -> None:
        target.data = source.data

    monkeypatch.setattr(CpuKernels, "scaled_copy", unscaled)
    with pytest.raises(ArithmeticError, match="gradients differ from nnabla's"):
        probes.adaptive_backward("cpu", "float")
