# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import List

import pytest

from nnabla_adaloss.cuda_libraries import (
    LIBRARIES_BY_CUDA_VERSION,
    cuda_version_of,
    find_cuda_libraries,
    find_extension_library,
    namespace_folders,
    preload_cuda_libraries,
)


def install(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


@pytest.mark.parametrize("cuda_version", ["110", "116", "120"])
def test_extension_library_tells_its_cuda_version(tmp_path: Path, cuda_version: str) -> None:
    install(tmp_path, f"b/cuda/libnnabla_cuda-{cuda_version}_8.so", "b/cuda/init.so", "a/cpu/init.so")
    library = find_extension_library([tmp_path / "a", tmp_path / "b"])
    assert library == tmp_path / "b" / "cuda" / f"libnnabla_cuda-{cuda_version}_8.so"
    assert cuda_version_of(library) == cuda_version


def test_no_extension(tmp_path: Path) -> None:
    assert find_extension_library([]) is None
    assert find_extension_library([install(tmp_path, "cpu/init.so")]) is None


def test_wheels_of_the_right_cuda_version_are_found_in_loading_order(tmp_path: Path) -> None:
    install(
        tmp_path,
        "cudnn/lib/libcudnn.so.8",
        "cudnn/lib/libcudnn.so.9",
        "cublas/lib/libcublas.so.11",
        "cublas/lib/libcublas.so.12",
        "cublas/lib/libcublasLt.so.12",
        "cuda_runtime/lib/libcudart.so.12",
    )
    found = {library.soname: library.path for library in find_cuda_libraries([tmp_path], "120")}
    assert list(found) == [library.soname for library in LIBRARIES_BY_CUDA_VERSION["120"]]
    assert [path.relative_to(tmp_path).as_posix() for path in found.values() if path] == [
        "cuda_runtime/lib/libcudart.so.12",
        "cublas/lib/libcublasLt.so.12",
        "cublas/lib/libcublas.so.12",
        "cudnn/lib/libcudnn.so.8",
    ]
    assert found["libcufft.so.11"] is None


def test_the_first_folder_with_a_library_counts(tmp_path: Path) -> None:
    library = "cufft/lib/libcufft.so.10"
    install(tmp_path, f"b/{library}", f"c/{library}")
    found = find_cuda_libraries([tmp_path / "a", tmp_path / "b", tmp_path / "c"], "116")
    assert [library.path for library in found if library.path] == [tmp_path / "b" / library]


def test_nothing_is_known_of_other_cuda_versions(tmp_path: Path) -> None:
    assert find_cuda_libraries([install(tmp_path, "cublas/lib/libcublas.so.13")], "130") == []


def test_folders_of_packages() -> None:
    assert (namespace_folders("nnabla_ext")[0] / "cpu").is_dir()
    assert namespace_folders("no_such_package") == []


@pytest.mark.skipif(
    find_extension_library(namespace_folders("nnabla_ext")) is not None, reason="the CUDA extension is there"
)
def test_without_the_extension_nothing_is_loaded_and_no_time_lost() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        assert preload_cuda_libraries() == []
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.005


def loaded_in_a_new_process(shadow: Path, *statements: str) -> List[str]:
    """Output lines of a program that runs with `nnabla_ext` from a folder."""
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(statements)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(shadow), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not namespace_folders("nvidia.cuda_runtime"), reason="needs NVIDIA's wheels")
def test_preloaded_libraries_satisfy_the_dynamic_loader(tmp_path: Path) -> None:
    install(tmp_path, "nnabla_ext/cuda/libnnabla_cuda-120_8.so")
    output = loaded_in_a_new_process(
        tmp_path,
        "import ctypes",
        "from nnabla_adaloss.cuda_libraries import preload_cuda_libraries",
        "for library in preload_cuda_libraries(): print(library.soname)",
        "version = ctypes.c_int()",
        "ctypes.CDLL('libcudart.so.12').cudaRuntimeGetVersion(ctypes.byref(version))",
        "print(version.value)",
    )
    assert {"libcudart.so.12", "libnvrtc.so.12"} <= set(output)
    assert output[-1] == "12000"


@pytest.mark.slow
def test_a_file_that_is_no_library_is_passed_over(tmp_path: Path) -> None:
    install(
        tmp_path,
        "nnabla_ext/cuda/libnnabla_cuda-120_8.so",
        "nvidia/__init__.py",
        "nvidia/cublas/lib/libcublas.so.12",
    )
    assert loaded_in_a_new_process(
        tmp_path,
        "from nnabla_adaloss.cuda_libraries import preload_cuda_libraries",
        "print(preload_cuda_libraries())",
    ) == ["[]"]
