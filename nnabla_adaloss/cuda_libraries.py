# SPDX-License-Identifier: Apache-2.0
"""CUDA libraries of nnabla's GPU extension, found in NVIDIA's wheels and loaded from there.

nnabla-ext-cuda expects its CUDA libraries where the dynamic loader looks. Wheels put them into
`site-packages/nvidia/<package>/lib`, where it does not. A library that is already in the process under the
right soname satisfies the extension, so loading them beforehand replaces `LD_LIBRARY_PATH`.
"""

from __future__ import annotations

import ctypes
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Dict, Mapping, Optional, Sequence

_CUDA_11 = "cudart.so.11.0 cublasLt.so.11 cublas.so.11 curand.so.10 cufft.so.10 cudnn.so.8"
# A library comes after its dependencies: cuSOLVER and cuDNN need both parts of cuBLAS.
LIBRARIES_BY_CUDA_VERSION: Mapping[str, Sequence[str]] = {
    version: [f"lib{name}" for name in names.split()]
    for version, names in {
        "110": f"{_CUDA_11} cusolver.so.10 nvrtc.so.11.0",
        "116": f"{_CUDA_11} cusolver.so.11 nvrtc.so.11.2",
        "120": "cudart.so.12 cublasLt.so.12 cublas.so.12 nvJitLink.so.12 cusolver.so.11 curand.so.10 "
        "cufft.so.11 nvrtc.so.12 cudnn.so.8",
    }.items()
}
"""Sonames of the libraries of nnabla-ext-cuda and CuPy, in loading order, by the CUDA version in the
extension's name."""


def find_file(package: str, pattern: str) -> Optional[Path]:
    """Find a file in the folders of a package, if any, without importing it."""
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders for path in Path(folder).glob(pattern)), None)


def find_extension_library() -> Optional[Path]:
    """Find `libnnabla_cuda-<CUDA version>_<cuDNN version>.so` of nnabla's GPU extension, if any."""
    return find_file("nnabla_ext", "cuda/libnnabla_cuda-*.so")


def cuda_version_of(extension_library: Path) -> str:
    """CUDA version that an extension library was built for, three digits: "120" for CUDA 12.0."""
    return extension_library.stem.partition("-")[2].partition("_")[0]


def find_cuda_libraries(cuda_version: str) -> Dict[str, Optional[Path]]:
    """Path of each library of a CUDA version in NVIDIA's wheels, by soname, in loading order."""
    sonames = LIBRARIES_BY_CUDA_VERSION.get(cuda_version, ())
    return {soname: find_file("nvidia", f"*/lib/{soname}") for soname in sonames}


def preload_cuda_libraries() -> None:
    """Load those of the CUDA libraries that are in NVIDIA's wheels, for nnabla's extension and CuPy."""
    extension_library = find_extension_library()
    if extension_library is None:
        return
    for path in filter(None, find_cuda_libraries(cuda_version_of(extension_library)).values()):
        # Local: the extension's own links find the symbols, which stay hidden from others.
        with suppress(OSError):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
