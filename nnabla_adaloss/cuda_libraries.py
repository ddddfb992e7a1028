# SPDX-License-Identifier: Apache-2.0
"""The CUDA libraries that nnabla's GPU extension needs, found in NVIDIA's wheels and loaded from there.

nnabla-ext-cuda expects its CUDA libraries where the dynamic loader looks. Wheels put them into
`site-packages/nvidia/<package>/lib`, where it does not. A library that is already in the process under the
right soname satisfies the extension, so loading them beforehand replaces `LD_LIBRARY_PATH`.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple


class CudaLibrary(NamedTuple):
    """A shared library that the extension needs.

    Attributes:
        package: folder below `nvidia/` that NVIDIA's wheels keep it in.
        soname: name that the dynamic loader knows it by.
        path: the file, or None where no wheel holds one.
    """

    package: str
    soname: str
    path: Optional[Path] = None


def _libraries(**sonames: str) -> Tuple[CudaLibrary, ...]:
    # A library comes after those that it is linked to itself: cuSOLVER and cuDNN need both parts of cuBLAS.
    packages = {
        "cudart": "cuda_runtime",
        "cublasLt": "cublas",
        "cublas": "cublas",
        "nvJitLink": "nvjitlink",
        "cusolver": "cusolver",
        "curand": "curand",
        "cufft": "cufft",
        "nvrtc": "cuda_nvrtc",
        "cudnn": "cudnn",
    }
    return tuple(
        CudaLibrary(package, f"lib{name}.so.{sonames[name]}")
        for name, package in packages.items()
        if name in sonames
    )


_CUDA_11 = {"cudart": "11.0", "cublasLt": "11", "cublas": "11", "curand": "10", "cufft": "10", "cudnn": "8"}

LIBRARIES_BY_CUDA_VERSION: Mapping[str, Sequence[CudaLibrary]] = {
    "110": _libraries(**_CUDA_11, cusolver="10", nvrtc="11.0"),
    "116": _libraries(**_CUDA_11, cusolver="11", nvrtc="11.2"),
    "120": _libraries(
        cudart="12",
        cublasLt="12",
        cublas="12",
        nvJitLink="12",
        cusolver="11",
        curand="10",
        cufft="11",
        nvrtc="12",
        cudnn="8",
    ),
}
"""What nnabla-ext-cuda and CuPy load, in loading order, by the CUDA version in the extension's name."""


def find_extension_library(nnabla_ext_folders: Iterable[Path]) -> Optional[Path]:
    """Find the native library of nnabla's CUDA extension, `libnnabla_cuda-<CUDA version>_<cuDNN version>.so`.

    Args:
        nnabla_ext_folders: the folders that make up the namespace package `nnabla_ext`.

    Returns:
        Path of the library, or None when the extension is not installed.
    """
    found = (library for folder in nnabla_ext_folders for library in folder.glob("cuda/libnnabla_cuda-*.so"))
    return next(found, None)


def cuda_version_of(extension_library: Path) -> str:
    """CUDA version that an extension library was built for, three digits: "120" for CUDA 12.0.

    Example:
        >>> cuda_version_of(Path("nnabla_ext/cuda/libnnabla_cuda-120_8.so"))
        '120'
    """
    return extension_library.stem.partition("-")[2].partition("_")[0]


def find_cuda_libraries(nvidia_folders: Sequence[Path], cuda_version: str) -> List[CudaLibrary]:
    """Look for the libraries of one CUDA version in NVIDIA's wheels. Loads nothing.

    Args:
        nvidia_folders: the folders that make up the namespace package `nvidia`.
        cuda_version: a key of `LIBRARIES_BY_CUDA_VERSION`. Nothing is known about, nor found for, any other.

    Returns:
        One entry per library, in loading order; `path` is None where no folder holds it.
    """
    return [
        library._replace(path=next(filter(Path.is_file, candidates), None))
        for library in LIBRARIES_BY_CUDA_VERSION.get(cuda_version, ())
        for candidates in [[folder / library.package / "lib" / library.soname for folder in nvidia_folders]]
    ]


def namespace_folders(package: str) -> List[Path]:
    """Folders of an installed package, without importing it; empty when it is not installed."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def preload_cuda_libraries() -> List[CudaLibrary]:
    """Load the CUDA libraries of NVIDIA's wheels, so that `nnabla_ext.cuda` and CuPy find them.

    Importing nnabla_adaloss calls this. It does nothing where nnabla's CUDA extension is not installed.
    Libraries that no wheel holds are left to the dynamic loader. A file that cannot be loaded is left to
    whoever needs it, whose error names it (`python -m nnabla_adaloss doctor` explains such errors).

    Returns:
        The libraries that were loaded, in loading order.
    """
    extension_library = find_extension_library(namespace_folders("nnabla_ext"))
    if extension_library is None:
        return []
    wheel_libraries = find_cuda_libraries(namespace_folders("nvidia"), cuda_version_of(extension_library))
    return [library for library in wheel_libraries if _load(library.path)]


def _load(path: Optional[Path]) -> bool:
    if path is None:
        return False
    try:
        # Local: their symbols are found through the extension's own links and get in nobody else's way.
        ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    except OSError:
        return False
    return True
