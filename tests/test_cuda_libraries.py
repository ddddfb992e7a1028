# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import List

import pytest

from nnabla_adaloss.cuda_libraries import (
    LIBRARIES_BY_CUDA_VERSION,
    cuda_version_of,
    find_cuda_libraries,
    find_extension_library,
    find_file,
)


def install(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parent of three folders, a, b and c, in which all packages are installed."""
    locations = [str(tmp_path / name) for name in "abc"]
    spec = SimpleNamespace(submodule_search_locations=locations)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: spec)
    return tmp_path


def test_extension_library_tells_its_cuda_version(folders: Path) -> None:
    assert find_extension_library() is None
    install(folders, "a/cpu/init.so")
    assert find_extension_library() is None
    install(folders, "b/cuda/libnnabla_cuda-116_8.so", "b/cuda/init.so")
    library = find_extension_library()
    assert library == folders / "b" / "cuda" / "libnnabla_cuda-116_8.so"
    assert cuda_version_of(library) == "116"


@pytest.mark.parametrize("cuda_version", LIBRARIES_BY_CUDA_VERSION)
def test_a_library_is_loaded_after_those_that_it_needs(cuda_version: str) -> None:
    names = [soname.partition(".")[0] for soname in LIBRARIES_BY_CUDA_VERSION[cuda_version]]
    assert names.index("libcublasLt") < names.index("libcublas")
    assert names.index("libcublas") < min(names.index("libcusolver"), names.index("libcudnn"))


def test_wheels_of_the_right_cuda_version_are_found_in_loading_order(folders: Path) -> None:
    libraries = [
        "cuda_runtime/lib/libcudart.so.12",
        "cublas/lib/libcublasLt.so.12",
        "cublas/lib/libcublas.so.12",
        "cudnn/lib/libcudnn.so.8",
    ]
    # The first folder with a library counts.
    install(folders, *(f"b/{file}" for file in libraries), f"c/{libraries[0]}")
    install(folders, "b/cudnn/lib/libcudnn.so.9", "b/cublas/lib/libcublas.so.11")
    found = find_cuda_libraries("120")
    assert list(found) == list(LIBRARIES_BY_CUDA_VERSION["120"])
    assert list(filter(None, found.values())) == [folders / "b" / file for file in libraries]
    assert find_cuda_libraries("130") == {}


def test_files_of_packages() -> None:
    assert find_file("nnabla_ext", "cpu") is not None
    assert find_file("nnabla_ext", "no_such_folder") is None
    assert find_file("no_such_package", "*") is None


def preloaded(shadow: Path, *statements: str) -> List[str]:
    """What a program prints that preloads with packages from a folder, and goes on with these statements."""
    first = "from nnabla_adaloss.cuda_libraries import preload_cuda_libraries"
    process = subprocess.run(
        [sys.executable, "-c", "\n".join((first, *statements))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(shadow), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not find_file("nvidia", "cuda_runtime"), reason="needs NVIDIA's wheels")
def test_preloaded_libraries_satisfy_the_dynamic_loader(tmp_path: Path) -> None:
    output = preloaded(
        install(tmp_path, "nnabla_ext/cuda/libnnabla_cuda-120_8.so"),
        "preload_cuda_libraries()",
        "import ctypes; version = ctypes.c_int()",
        "ctypes.CDLL('libcudart.so.12').cudaRuntimeGetVersion(ctypes.byref(version))",
        "ctypes.CDLL('libnvrtc.so.12')",
        "print(version.value)",
    )
    assert output == ["12000"]


@pytest.mark.slow
def test_a_file_that_is_no_library_is_passed_over(tmp_path: Path) -> None:
    install(tmp_path, "nnabla_ext/cuda/libnnabla_cuda-120_8.so", "nvidia/__init__.py")
    install(tmp_path, "nvidia/cublas/lib/libcublas.so.12")
    assert preloaded(tmp_path, "preload_cuda_libraries()", "print('goes on')") == ["goes on"]
