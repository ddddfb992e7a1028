# SPDX-License-Identifier: Apache-2.0
"""Findings of an examination: errors explained, with text and JSON output."""

from __future__ import annotations

import json
import re
import textwrap
from itertools import groupby
from operator import attrgetter
from typing import Dict, List, Literal, NamedTuple, Sequence, Tuple

Area = Literal["CPU", "GPU", "MPI"]
"""A way to use the package; each works or fails on its own."""
AREAS: Tuple[Area, ...] = "CPU", "GPU", "MPI"

Status = Literal["works", "missing", "broken", "not tried"]
"""State of an examined part."""


class Finding(NamedTuple):
    """One examined part, its state, the area that needs it, and a remedy if known."""

    area: Area
    status: Status
    subject: str
    detail: str = ""
    cure: str = ""


_INSTALL_GPU = "pip install 'nnabla-adaloss[cuda120]'   (or cuda116, to match your nnabla-ext-cuda)"
_INSTALL_MPI = "pip install 'nnabla-adaloss[mpi]'   (includes Open MPI)"

# Errors of nnabla, its CUDA extension, CuPy and MPI: by pattern, meaning and remedy. The first match counts.
_MISSING = {
    r"libcuda\.so": (
        "the NVIDIA driver is not installed, or not visible inside this container (libcuda.so.1)",
        "install the NVIDIA driver, or start the container with `--gpus all`",
    ),
    r"mpirun was not found": (
        "neither on the PATH nor beside Python",
        f"add the folder of your MPI library's mpirun to the PATH, or {_INSTALL_MPI}",
    ),
    r"libmpi\w*\.so|cannot load MPI library": ("no MPI library is installed", _INSTALL_MPI),
    r"(lib\w+\.so[.\d]*): cannot open shared object file": (
        r"\1 is not installed, or not on the library path",
        _INSTALL_GPU,
    ),
    r"No module named '?mpi4py": ("not installed; only needed for distributed training", _INSTALL_MPI),
    r"No module named '?cupy": ("not installed", _INSTALL_GPU),
    r"No module named '?([\w.]+)": (r"the Python package \1 is not installed", "pip install nnabla-adaloss"),
}
_BROKEN = {
    r"undefined symbol:? (\w+)": (
        r"libraries of different versions are mixed (\1 is not in the one that was found)",
        f"remove LD_LIBRARY_PATH from the environment, then {_INSTALL_GPU}",
    ),
    r"numpy\.(core\.)?multiarray|_ARRAY_API|numpy\.dtype size changed": (
        "nnabla was compiled for a different NumPy version",
        "pip install 'numpy>=1.26,<2'",
    ),
    r"driver version is insufficient(: .*)?": (
        r"the NVIDIA driver is older than the CUDA libraries\1",
        "update the driver, or use an extra for an older CUDA, such as cuda116",
    ),
    r"NVML Shared Library Not Found": (
        "the driver's NVML library (libnvidia-ml.so.1) is not visible",
        "start containers with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    r"NVMLError|cudaErrorNoDevice|no CUDA-capable device": (
        "the driver finds no usable GPU",
        "see whether `nvidia-smi` lists a GPU; check CUDA_VISIBLE_DEVICES; "
        "start containers with `--gpus all`",
    ),
    r"does not support your (.*) GPU": (
        r"NNabla lists this combination of CUDA and GPU (\1) as slow or wrong",
        "use an extra for another CUDA version, or set AVAILABLE_GPU_NAMES to that name",
    ),
    r"Any of \[(.*?)\] could not be found": (
        r"nnabla has no implementation for \1 here: its CUDA extension did not start",
        "import nnabla_ext.cudnn and read its warnings",
    ),
    r"^Crash: the process ended by (\w+)": (
        r"native code crashed (\1), most often because libraries of different versions are mixed",
        "install into a fresh virtual environment, without LD_LIBRARY_PATH and LD_PRELOAD",
    ),
    r"an illegal instruction": (
        "the GPU reports an illegal instruction",
        "on Hopper GPUs NNabla's own reductions end so (docs/gpu.md): take a mean in two steps of fewer than "
        "2,048 elements each, or by F.average_pooling",
    ),
    r"no kernel image is available|invalid value for --gpu-architecture": (
        "a library has no code for this GPU, which is newer or older than those that it was built for",
        "use an extra for another CUDA version: one that is as new as the GPU",
    ),
    r"(?i)out of memory|failed to allocate": (
        "the GPU has no memory left",
        "see with `nvidia-smi` which other processes use it",
    ),
    r"an illegal memory access|a misaligned address": (r"the GPU reports \g<0>", ""),
}
_ERRORS: Dict[Status, Dict[str, Tuple[str, str]]] = {"missing": _MISSING, "broken": _BROKEN}


def failure(area: Area, subject: str, error: str) -> Finding:
    """Explain an error as a finding; an unknown error is quoted, without a remedy."""
    for status, known in _ERRORS.items():
        for pattern, (meaning, cure) in known.items():
            match = re.search(pattern, error)
            if match:
                return Finding(area, status, subject, match.expand(meaning), cure)
    return Finding(area, "broken", subject, error)


def area_works(findings: Sequence[Finding], area: Area) -> bool:
    """True if every part that an area needs works."""
    return all(finding.status == "works" for finding in findings if finding.area == area)


def as_json(findings: Sequence[Finding]) -> str:
    """Write a JSON object with `works`, a boolean per area, and `findings`, a list of objects."""
    works = {area: area_works(findings, area) for area in AREAS}
    return json.dumps({"works": works, "findings": [finding._asdict() for finding in findings]}, indent=2)


def as_text(findings: Sequence[Finding]) -> str:
    """Write the findings as text: per area a verdict, a line per part, and each remedy once."""
    lines: List[str] = []
    margin = " " * 13
    for area in AREAS:
        verdict = "works" if area_works(findings, area) else "does not work"
        lines += ["", f"{area}: {verdict}"]
        for cure, sharing_it in groupby((f for f in findings if f.area == area), key=attrgetter("cure")):
            for _, status, subject, detail, _ in sharing_it:
                lines += textwrap.wrap(
                    f"{subject}: {detail}" if detail else subject,
                    width=110,
                    initial_indent=f"  {status}".ljust(len(margin)),
                    subsequent_indent=margin,
                    break_on_hyphens=False,
                )
            if cure:  # may hold a command: not wrapped, so that it can be copied
                lines.append(f"{margin}-> {cure}")
    return "\n".join(lines[1:])
