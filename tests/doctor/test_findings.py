# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from nnabla_adaloss.doctor.findings import Finding, Status, area_works, as_json, as_text, failure

MISSING, BROKEN = "missing", "broken"
FINDINGS = [
    Finding("CPU", "works", "Python 3.10", "with everything"),
    Finding("GPU", "works", "driver", "/usr/lib/libcuda.so.1"),
    Finding("GPU", MISSING, "libcufft.so.11", "not installed", "pip install 'something'"),
    Finding("GPU", MISSING, "libcudnn.so.8", "not installed", "pip install 'something'"),
    Finding("GPU", "not tried", "CuPy"),
]


# Messages as the libraries word them; words of what they mean, and of the cure.
@pytest.mark.parametrize(
    ("error", "status", "meaning", "cure"),
    [
        ("ImportError: libcuda.so.1: {}", MISSING, "driver is not installed", "--gpus all"),
        ("ImportError: libcudart.so.12: {}", MISSING, "libcudart.so.12", "cuda120"),
        ("RuntimeError: cannot load MPI library\nlibmpi.so: {}", MISSING, "no MPI library", "[mpi]"),
        ("FileNotFoundError: mpirun was not found", MISSING, "on the PATH", "your MPI library's mpirun"),
        ("OSError: /x/libx.so: undefined symbol: cuMemRelease", BROKEN, "cuMemRelease", "LD_LIBRARY_PATH"),
        ("ValueError: numpy.dtype size changed, may ...", BROKEN, "a different NumPy", "numpy>=1.26,<2"),
        ("ImportError: numpy.core.multiarray failed to import", BROKEN, "a different NumPy", "<2"),
        ("NVMLError: NVML Shared Library Not Found", BROKEN, "libnvidia-ml.so.1", "CAPABILITIES"),
        ("NVMLError: Driver Not Loaded", BROKEN, "no usable GPU", "nvidia-smi"),
        ("cudaErrorNoDevice: no CUDA-capable device is detected", BROKEN, "no usable GPU", "nvidia-smi"),
        ("cudaErrorInsufficientDriver: CUDA driver version is insufficient", BROKEN, "older", "update"),
        ("ValueError: ... does not support your a100 GPU.", BROKEN, "a100", "AVAILABLE_GPU_NAMES"),
        ("Any of [cudnn:half, cpu:x] could not be found", BROKEN, "cudnn:half, cpu:x", "nnabla_ext.cudnn"),
        ("ModuleNotFoundError: No module named 'mpi4py'", MISSING, "not installed", "[mpi]"),
        ("ModuleNotFoundError: No module named 'cupy'", MISSING, "not installed", "cuda120"),
        ("ModuleNotFoundError: No module named 'nnabla'", MISSING, "nnabla", "pip install"),
        ("Crash: the process ended by SIGSEGV", BROKEN, "SIGSEGV", "fresh virtual environment"),
        (
            'failed with "an illegal instruction was encountered"',
            BROKEN,
            "GPU reports an illegal",
            "average_pooling",
        ),
        (
            'failed with "no kernel image is available for execution on the device"',
            BROKEN,
            "no code for this GPU",
            "another CUDA version",
        ),
        ("CompileException: nvrtc: error: invalid value for --gpu-architecture", BROKEN, "no code", "CUDA"),
        ("RuntimeError: memory error in alloc: Failed to allocate again.", BROKEN, "no memory", "nvidia-smi"),
        ("OutOfMemoryError: Out of memory allocating 8 bytes", BROKEN, "no memory left", "nvidia-smi"),
        ('failed with "a misaligned address"', BROKEN, "the GPU reports a misaligned address", ""),
        ("KeyError: 'who knows'", BROKEN, "KeyError: 'who knows'", ""),
    ],
)
def test_errors_are_told_in_plain_words(error: str, status: Status, meaning: str, cure: str) -> None:
    cannot_open = "cannot open shared object file: No such file or directory"
    found = failure("GPU", "part", error.replace("{}", cannot_open))
    assert found[:3] == ("GPU", status, "part")
    assert meaning in found.detail
    assert cure in found.cure
    assert bool(cure) == bool(found.cure)


@pytest.mark.parametrize("status", [MISSING, BROKEN, "not tried"])
def test_an_area_works_when_all_of_it_does(status: Status) -> None:
    found = [Finding("GPU", "works", "one part"), Finding("MPI", status, "part of another area")]
    assert area_works(found, "GPU")
    assert not area_works([*found, Finding("GPU", status, "another part")], "GPU")


def test_text_has_verdicts_and_each_cure_once() -> None:
    assert as_text(FINDINGS).splitlines() == [
        "CPU: works",
        "  works      Python 3.10: with everything",
        "",
        "GPU: does not work",
        "  works      driver: /usr/lib/libcuda.so.1",
        "  missing    libcufft.so.11: not installed",
        "  missing    libcudnn.so.8: not installed",
        "             -> pip install 'something'",
        "  not tried  CuPy",
        "",
        "MPI: works",
    ]


def test_long_details_are_wrapped_and_commands_are_not() -> None:
    finding = Finding("CPU", BROKEN, "part", "word " * 60, "command " * 60)
    *detail, cure = as_text([finding]).split("\n\n")[0].splitlines()[1:]
    assert max(map(len, detail)) <= 110
    assert " ".join(" ".join(detail).split()) == "broken part: " + " ".join(["word"] * 60)
    assert cure.count("command") == 60


def test_json_is_for_programs() -> None:
    report = json.loads(as_json(FINDINGS))
    assert report["works"] == {"CPU": True, "GPU": False, "MPI": True}
    assert report["findings"] == [finding._asdict() for finding in FINDINGS]
