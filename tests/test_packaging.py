# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml, the Makefile and the code say about each other holds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Dict, List

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nnabla_adaloss.cuda_libraries import LIBRARIES_BY_CUDA_VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nnabla_adaloss"


@pytest.fixture(scope="module")
def project() -> Dict[str, Any]:
    declared: Dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return declared


def test_the_makefile_offers_supported_pythons(project: Dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (offered,) = re.findall(r"^PYTHON_VERSIONS \?= (.*)$", makefile, flags=re.MULTILINE)
    supported = SpecifierSet(project["requires-python"])
    assert offered
    assert all(version in supported for version in offered.split())


@pytest.mark.parametrize("cuda_version", ["116", "120"])
def test_gpu_extras_bring_every_library_that_is_preloaded(project: Dict[str, Any], cuda_version: str) -> None:
    extra = project["optional-dependencies"][f"cuda{cuda_version}"]
    names = {Requirement(requirement).name for requirement in extra}
    suffix = f"cu{cuda_version[:2]}"
    libraries = LIBRARIES_BY_CUDA_VERSION[cuda_version]
    assert {f"nvidia-{library.package.replace('_', '-')}-{suffix}" for library in libraries} <= names
    assert f"nnabla-ext-cuda{cuda_version}" in names


def test_gpu_extras_fit_the_nnabla_that_is_required(project: Dict[str, Any]) -> None:
    requirements: List[str] = [
        requirement
        for extra in (project["dependencies"], *project["optional-dependencies"].values())
        for requirement in extra
        if requirement.startswith(("nnabla==", "nnabla-ext-cuda"))
    ]
    assert len(requirements) == 1 + len(LIBRARIES_BY_CUDA_VERSION)
    assert len({str(Requirement(requirement).specifier) for requirement in requirements}) == 1


@pytest.mark.parametrize("folder", ["nnabla_adaloss", "tests", "samples", "benchmarks", "tools"])
def test_every_source_file_names_its_licence(folder: str) -> None:
    sources = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", ".cu", ".cuh", ".sh"}]
    nameless = [
        path for path in sources if "SPDX-License-Identifier: Apache-2.0" not in path.read_text("utf-8")[:100]
    ]
    assert nameless == []


@pytest.mark.slow
def test_the_wheel_holds_all_that_is_needed_at_run_time(tmp_path: Path) -> None:
    # Built from a copy, because building leaves files behind in the source tree.
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True)
    (wheel,) = tmp_path.glob("nnabla_adaloss-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    kept = (
        path for path in (source / PACKAGE.name).rglob("*") if path.suffix in {".py", ".cu", ".cuh", ".typed"}
    )
    assert {path.relative_to(source).as_posix() for path in kept} <= packed
    assert {"nnabla_adaloss/py.typed", "nnabla_adaloss/kernels/adaloss.cu"} <= packed
    assert {name.partition("/")[0].partition("-")[0] for name in packed} == {"nnabla_adaloss"}
