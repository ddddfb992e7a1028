# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml, the Makefile and the code say about each other holds."""

from __future__ import annotations

import re
import runpy
import sys
import zipfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import nnabla_adaloss
from nnabla_adaloss.cuda_libraries import LIBRARIES_BY_CUDA_VERSION
from tests.building.test_long_description import wheel_of_a_copy

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


@pytest.mark.parametrize("version", [(2, 7), (3, 8), (3, 11), (3, 13)])
def test_another_python_is_told_which_ones_work(
    version: Tuple[int, int], monkeypatch: pytest.MonkeyPatch, project: Dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 0, "final", 0))
    with pytest.raises(SystemExit) as told:
        runpy.run_path(str(ROOT / "setup.py"))
    this = ".".join(map(str, version))
    assert f"needs Python 3.9 or 3.10, for which nnabla has wheels; this is Python {this}." in str(told.value)
    assert all(v in SpecifierSet(project["requires-python"]) for v in ("3.9", "3.10"))


def test_setup_is_python_2_as_well() -> None:
    text = (ROOT / "setup.py").read_text("ascii")  # what is not ASCII would want a coding line
    assert not re.search(r"annotations|\bf\"|->|: str|:=", text)


def test_source_distributions_hold_no_lines_of_results() -> None:
    lines = (ROOT / "MANIFEST.in").read_text("utf-8").splitlines()
    assert lines.index("graft benchmarks") < lines.index("recursive-exclude benchmarks/results *.jsonl")


def test_files_that_a_release_changes_exist() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.M) == [nnabla_adaloss.__version__]
    releasing = (ROOT / "RELEASING.md").read_text("utf-8")
    changes = re.findall(r"^   - ((?:`[^`]+`, )*`[^`]+`): `([^`]+)`", releasing, re.M)
    assert len(changes) == releasing.count("\n   - ") == 7
    for files, text in changes:
        for file in re.findall(r"`([^`]+)`", files):
            assert text in (ROOT / file).read_text("utf-8"), (file, text)


@pytest.mark.parametrize("cuda_version", ["116", "120"])
def test_gpu_extras_bring_every_library_that_is_preloaded(project: Dict[str, Any], cuda_version: str) -> None:
    extra = project["optional-dependencies"][f"cuda{cuda_version}"]
    names = {Requirement(requirement).name for requirement in extra}
    suffix = f"cu{cuda_version[:2]}"
    package_of = {"cudart": "cuda-runtime", "cublasLt": "cublas", "nvrtc": "cuda-nvrtc"}
    for soname in LIBRARIES_BY_CUDA_VERSION[cuda_version]:
        library = soname[3:].partition(".")[0]
        assert f"nvidia-{package_of.get(library, library.lower())}-{suffix}" in names
    assert f"nnabla-ext-cuda{cuda_version}" in names


def test_the_viewers_imports_are_installed(project: Dict[str, Any]) -> None:
    extra = project["optional-dependencies"]["tensorboard"]
    assert "setuptools<82" in extra, "later ones have no pkg_resources, which TensorBoard imports"
    assert any(re.fullmatch(r"tensorboard>=[\d.]+,<[\d.]+", each) for each in extra), "tried up to there"


def test_gpu_extras_fit_the_nnabla_that_is_required(project: Dict[str, Any]) -> None:
    requirements: List[str] = [
        requirement
        for extra in (project["dependencies"], *project["optional-dependencies"].values())
        for requirement in extra
        if requirement.startswith(("nnabla==", "nnabla-ext-cuda"))
    ]
    assert len(requirements) == 1 + len(LIBRARIES_BY_CUDA_VERSION)
    assert len({str(Requirement(requirement).specifier) for requirement in requirements}) == 1


@pytest.mark.parametrize("folder", ["nnabla_adaloss", "building", "tests", "samples", "benchmarks", "tools"])
def test_every_source_file_names_its_licence(folder: str) -> None:
    suffixes = {".py", ".pyi", ".c", ".h", ".cu", ".cuh", ".sh"}
    sources = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in suffixes]
    nameless = [
        path for path in sources if "SPDX-License-Identifier: Apache-2.0" not in path.read_text("utf-8")[:100]
    ]
    assert nameless == []


@pytest.mark.slow
def test_the_wheel_holds_all_that_is_needed_at_run_time(tmp_path: Path) -> None:
    wheel = wheel_of_a_copy(tmp_path)
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)  # one library for all Pythons
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        (entry_points,) = (name for name in packed if name.endswith("/entry_points.txt"))
        assert "nnabla-adaloss = nnabla_adaloss.__main__:main" in archive.read(entry_points).decode()
    suffixes = {".py", ".pyi", ".cu", ".cuh", ".html", ".typed"}
    kept = (path for path in PACKAGE.rglob("*") if path.suffix in suffixes)
    assert {path.relative_to(ROOT).as_posix() for path in kept} <= packed
    assert {"nnabla_adaloss/py.typed", "nnabla_adaloss/kernels/adaloss.cu"} <= packed
    assert "nnabla_adaloss/kernels/native/libadaloss_cpu.so" in packed
    assert not [name for name in packed if name.endswith((".c", ".h"))]
    assert {name.partition("/")[0].partition("-")[0] for name in packed} == {"nnabla_adaloss"}


def test_pip_on_a_later_python_names_the_pythons_and_no_missing_nnabla() -> None:
    """An older pip looks for what a wheel needs before it looks at its `Requires-Python`."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (end,) = re.findall(r'^requires-python = ">=[\d.]+,<([\d.]+)"', text, re.M)
    assert f"\"nnabla==1.39.0; python_version < '{end}'\"" in text
