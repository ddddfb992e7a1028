# SPDX-License-Identifier: Apache-2.0
"""What a type checker tells a user: wrong words, and the types of what is returned."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import nnabla_adaloss
from nnabla_adaloss.core.formats import FORMATS, FormatName, canonical_name
from nnabla_adaloss.core.methods import METHODS, MethodName
from nnabla_adaloss.core.precision import PRECISIONS, PrecisionName, get_precision

RIGHT = """
from typing import Any
from nnabla_adaloss import (
    AdaLossConfig, AdaptiveLossScalingUpdater, FormatEmulation, GradScaler, LossScaler, Precision,
    PrecisionAdvice, Profile, StorageLike, diagnose, profile)

def train(solver: Any, loss: Any) -> None:
    by_layer: StorageLike = {"head/*": "float16", "*": "fp8_hybrid"}
    AdaptiveLossScalingUpdater(solver, loss, storage={"head/*": "float16", "*": "fp8_hybrid"})
    updater = AdaptiveLossScalingUpdater(solver, loss, on_overflow="next", storage=by_layer)
    updater.on_scale_floor = "skip"
    AdaptiveLossScalingUpdater(solver, loss, global_scale="dynamic", storage="fp16")
    AdaptiveLossScalingUpdater(solver, loss, on_nonfinite_loss="warn", on_nonfinite_forward="skip")
    config = AdaLossConfig(loss_scale_method="approx_range", dtype="bfloat16")
    FormatEmulation(loss, "float8_e5m2")
    GradScaler(solver, config=config, storage="float16")
    LossScaler(initial_scale=8.0)
    Precision("float8_e4m3", "float8_e5m2")
    times: Profile = profile(updater)
    advice: PrecisionAdvice = diagnose(loss, ["fp8_hybrid", "float16"])
    AdaptiveLossScalingUpdater(solver, loss, storage=advice.storage)
"""

# Each makes one line of that program wrong.
WRONG = {
    'on_overflow="next"': 'on_overflow="again"',
    'on_scale_floor = "skip"': 'on_scale_floor = "ignore"',
    'global_scale="dynamic"': 'global_scale="dynamical"',
    'on_nonfinite_loss="warn"': 'on_nonfinite_loss="print"',
    '"approx_range"': '"aprox_range"',
    'FormatEmulation(loss, "float8_e5m2")': 'FormatEmulation(loss, "float8_m5e2")',
    'config=config, storage="float16"': 'config=config, storage="flaot16"',
    "LossScaler(initial_scale=8.0)": 'LossScaler(initial_scale="8")',
    '"float8_e4m3", "float8_e5m2"': '"float8_e4m3", "float8"',
    'diagnose(loss, ["fp8_hybrid", "float16"])': 'diagnose(loss, ["fp8", "float16"])',
}


def told(program: str, folder: Path) -> list[int]:
    """The lines in which mypy finds an error."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "program.py"]
    root = str(Path(nnabla_adaloss.__file__).parents[1])
    done = subprocess.run(
        command, cwd=folder, env={"MYPYPATH": root, "PATH": ""}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [int(line) for line in re.findall(r"^program\.py:(\d+): error", done.stdout, re.M)]


@pytest.mark.slow
def test_mypy_tells_ten_wrong_words(tmp_path: Path) -> None:
    wrong = RIGHT
    for word, other in WRONG.items():
        assert wrong.count(word) == 1
        wrong = wrong.replace(word, other)
    pairs = zip(RIGHT.splitlines(), wrong.splitlines())
    expected = [number for number, (right, other) in enumerate(pairs, 1) if right != other]
    assert len(expected) == len(WRONG) == 10
    assert told(RIGHT, tmp_path) == []
    assert sorted(set(told(wrong, tmp_path))) == expected


def test_the_names_that_are_typed_are_those_that_are_known() -> None:
    assert {canonical_name(name) for name in get_args(FormatName)} == set(FORMATS)
    assert set(get_args(PrecisionName)) - set(get_args(FormatName)) == set(PRECISIONS) - set(FORMATS)
    assert all(get_precision(name) for name in get_args(PrecisionName))
    assert get_args(MethodName) == tuple(METHODS)


def returned_by(function: Any) -> set[str]:
    """The classes of the package in the annotation of what a function returns."""
    names = re.findall(r"\w+", str(inspect.signature(function).return_annotation))
    module = inspect.getmodule(function)
    found = (getattr(module, name, None) for name in names)
    return {f.__name__ for f in found if isinstance(f, type) and f.__module__.startswith("nnabla_adaloss.")}


def test_types_returned_by_public_functions_are_public() -> None:
    functions = [
        f for f in map(nnabla_adaloss.__getattr__, nnabla_adaloss.__all__[:-1]) if inspect.isfunction(f)
    ]
    functions += [nnabla_adaloss.Recording.underflows, nnabla_adaloss.AdaptiveLossScalingUpdater.update]
    functions.append(nnabla_adaloss.AdaptiveLossScaling.result.fget)
    assert {"Diagnosis", "PassReport", "PrecisionAdvice", "Profile"} <= set().union(
        *map(returned_by, functions)
    )
    assert set().union(*map(returned_by, functions)) <= set(nnabla_adaloss.__all__)
