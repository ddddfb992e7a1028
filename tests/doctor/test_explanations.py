# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from nnabla_adaloss.doctor.explanations import explain
from nnabla_adaloss.doctor.findings import Status

_CANNOT_OPEN = "cannot open shared object file: No such file or directory"


# Messages as the libraries word them.
@pytest.mark.parametrize(
    ("error", "meaning", "cure", "status"),
    [
        (
            f"ImportError: libcuda.so.1: {_CANNOT_OPEN}",
            "driver is not installed",
            "--gpus all",
            Status.MISSING,
        ),
        (f"ImportError: libcudart.so.12: {_CANNOT_OPEN}", "libcudart.so.12", "cuda120", Status.MISSING),
        (f"OSError: libcusolver.so.10: {_CANNOT_OPEN}", "libcusolver.so.10", "pip install", Status.MISSING),
        (
            f"RuntimeError: cannot load MPI library\nlibmpi.so: {_CANNOT_OPEN}",
            "no MPI library",
            "[mpi]",
            Status.MISSING,
        ),
        (
            "OSError: /x/libnnabla_cuda-120_8.so: undefined symbol: cuMemRelease",
            "cuMemRelease",
            "LD_LIBRARY_PATH",
            Status.BROKEN,
        ),
        (
            "ValueError: numpy.dtype size changed, may indicate binary incompatibility. "
            "Expected 96 from C header, got 88 from PyObject",
            "a different NumPy",
            "numpy>=1.26,<2",
            Status.BROKEN,
        ),
        ("ImportError: numpy.core.multiarray failed to import", "a different NumPy", "<2", Status.BROKEN),
        ("NVMLError: NVML Shared Library Not Found", "libnvidia-ml.so.1", "CAPABILITIES", Status.BROKEN),
        ("NVMLError: Driver Not Loaded", "no usable GPU", "nvidia-smi", Status.BROKEN),
        (
            "CUDARuntimeError: cudaErrorNoDevice: no CUDA-capable device is detected",
            "no usable GPU",
            "nvidia-smi",
            Status.BROKEN,
        ),
        (
            "CUDARuntimeError: cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA "
            "runtime version",
            "older than the CUDA libraries",
            "update the driver",
            Status.BROKEN,
        ),
        (
            "ValueError: Currently, nnabla-ext-cuda110 does not support your a100 GPU.",
            "a100",
            "AVAILABLE_GPU_NAMES",
            Status.BROKEN,
        ),
        (
            "RuntimeError: Any of [cudnn:half, cudnn:float] could not be found in [cpu:float]",
            "cudnn:half, cudnn:float",
            "nnabla_ext.cudnn",
            Status.BROKEN,
        ),
        ("ModuleNotFoundError: No module named 'mpi4py'", "not installed", "[mpi]", Status.MISSING),
        ("ModuleNotFoundError: No module named 'cupy'", "not installed", "cuda120", Status.MISSING),
        ("ModuleNotFoundError: No module named 'nnabla'", "nnabla", "pip install", Status.MISSING),
        ("Crash: the process ended by SIGSEGV", "SIGSEGV", "fresh virtual environment", Status.BROKEN),
    ],
)
def test_known_errors_are_told_in_plain_words(error: str, meaning: str, cure: str, status: Status) -> None:
    explanation = explain(error)
    assert meaning in explanation.meaning
    assert cure in explanation.cure
    assert explanation.status is status


def test_an_unknown_error_means_itself() -> None:
    assert explain("KeyError: 'who knows'") == ("KeyError: 'who knows'", "", Status.BROKEN)
