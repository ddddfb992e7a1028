# SPDX-License-Identifier: Apache-2.0
"""Errors of nnabla, its CUDA extension, CuPy and MPI, in plain words."""

from __future__ import annotations

import re
from typing import NamedTuple, Sequence, Tuple

from .findings import Status


class Explanation(NamedTuple):
    """What an error means.

    Attributes:
        meaning: what is wrong.
        cure: what to do about it; empty if unknown.
        status: whether something is missing, or there and broken.
    """

    meaning: str
    cure: str = ""
    status: Status = Status.BROKEN


_INSTALL_GPU = "pip install 'nnabla-adaloss[cuda120]'   (or cuda116, to match your nnabla-ext-cuda)"
_INSTALL_MPI = "pip install 'nnabla-adaloss[mpi]'   (includes Open MPI)"
_MAKE_GPU_VISIBLE = (
    "see whether `nvidia-smi` lists a GPU; check CUDA_VISIBLE_DEVICES; start containers with `--gpus all`"
)

_EXPLANATIONS: Sequence[Tuple[str, Explanation]] = (
    (
        r"libcuda\.so",
        Explanation(
            "the NVIDIA driver is not installed, or not visible inside this container (libcuda.so.1)",
            "install the NVIDIA driver, or start the container with `--gpus all`",
            Status.MISSING,
        ),
    ),
    (
        r"libmpi\w*\.so|cannot load MPI library",
        Explanation(
            "no MPI library is installed",
            _INSTALL_MPI,
            Status.MISSING,
        ),
    ),
    (
        r"(lib\w+\.so[.\d]*): cannot open shared object file",
        Explanation(r"\1 is not installed, or not on the library path", _INSTALL_GPU, Status.MISSING),
    ),
    (
        r"undefined symbol:? (\w+)",
        Explanation(
            r"libraries of different versions are mixed (\1 is not in the one that was found)",
            f"remove LD_LIBRARY_PATH from the environment, then {_INSTALL_GPU}",
        ),
    ),
    (
        r"numpy\.(core\.)?multiarray|_ARRAY_API|numpy\.dtype size changed",
        Explanation("nnabla was compiled for a different NumPy version", "pip install 'numpy>=1.26,<2'"),
    ),
    (
        r"driver version is insufficient(: .*)?",
        Explanation(
            r"the NVIDIA driver is older than the CUDA libraries\1",
            "update the driver, or use an extra for an older CUDA, such as cuda116",
        ),
    ),
    (
        r"NVML Shared Library Not Found",
        Explanation(
            "the driver's NVML library (libnvidia-ml.so.1) is not visible",
            "start containers with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
    ),
    (
        r"NVMLError|cudaErrorNoDevice|no CUDA-capable device",
        Explanation("the driver finds no usable GPU", _MAKE_GPU_VISIBLE),
    ),
    (
        r"does not support your (.*) GPU",
        Explanation(
            r"NNabla lists this combination of CUDA and GPU (\1) as slow or wrong",
            "use an extra for another CUDA version, or set AVAILABLE_GPU_NAMES to that name",
        ),
    ),
    (
        r"Any of \[(.*?)\] could not be found",
        Explanation(
            r"nnabla has no implementation for \1 here: its CUDA extension did not start",
            "import nnabla_ext.cudnn and read its warnings",
        ),
    ),
    (
        r"distribution training feature is disabled",
        Explanation(
            "nnabla's GPU communicator found no MPI when it was imported",
            "import mpi4py before nnabla_ext, and start the program with mpirun",
        ),
    ),
    (
        r"No module named '?mpi4py",
        Explanation(
            "not installed; only needed for distributed training",
            _INSTALL_MPI,
            Status.MISSING,
        ),
    ),
    (
        r"No module named '?cupy",
        Explanation("not installed", _INSTALL_GPU, Status.MISSING),
    ),
    (
        r"No module named '?([\w.]+)",
        Explanation(r"the Python package \1 is not installed", "pip install nnabla-adaloss", Status.MISSING),
    ),
    (
        r"^Crash: the process ended by (\w+)",
        Explanation(
            r"native code crashed (\1), most often because libraries of different versions are mixed",
            "install into a fresh virtual environment, without LD_LIBRARY_PATH and LD_PRELOAD",
        ),
    ),
)


def explain(error: str) -> Explanation:
    """Say what an error means and what to do about it.

    Args:
        error: type and message of an exception, as in `"ImportError: libcuda.so.1: cannot open ..."`.

    Returns:
        The explanation; an unknown error means itself and has no cure.

    Example:
        >>> explain("ImportError: libcuda.so.1: cannot open shared object file").cure
        'install the NVIDIA driver, or start the container with `--gpus all`'
    """
    for pattern, explanation in _EXPLANATIONS:
        match = re.search(pattern, error)
        if match:
            return explanation._replace(meaning=match.expand(explanation.meaning))
    return Explanation(error)
