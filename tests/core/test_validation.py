# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import math
from fractions import Fraction
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater, GradScaler
from nnabla_adaloss.core.validation import (
    array_of_numbers,
    boolean,
    instance,
    instance_or_none,
    integer,
    nonnegative_number,
    number,
    open_share,
    path_name,
    positive_number,
    scalar,
    strings,
)

UPDATER = "AdaptiveLossScalingUpdater has no argument"


@pytest.mark.parametrize("value", [2, 2.0, np.float16(2), np.int64(2), Fraction(2)])
def test_numbers_of_every_kind(value: Any) -> None:
    assert (number("x", value), positive_number("x", value)) == (2.0, 2.0)
    assert type(number("x", value)) is float


@pytest.mark.parametrize("value", [True, np.True_, "2", None, 2j, np.ones(1)])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^x=.* must be a number, not {type(value).__name__}$"):
        number("x", value)
    with pytest.raises(TypeError, match="^x=.* must be a number"):
        open_share("x", value, usual=0.5)


def test_an_integer_that_no_float_can_hold() -> None:
    with pytest.raises(ValueError, match="^x is an integer beyond the range of floating-point numbers$"):
        number("x", 10**400)


def test_integers() -> None:
    assert type(integer("n", np.int32(3))) is int
    for value in (True, 3.0, "3"):
        with pytest.raises(TypeError, match=rf"^n=.* must be an integer, not {type(value).__name__}$"):
            integer("n", value)


def test_booleans() -> None:
    assert boolean("b", False) is False
    for value in (0, None, "no"):
        with pytest.raises(TypeError, match=rf"^b=.* must be True or False, not {type(value).__name__}$"):
            boolean("b", value)


@pytest.mark.parametrize(
    ("kind", "argument", "message"),
    [
        (AdaptiveLossScalingUpdater, "init_scale", f"^{UPDATER} init_scale; use scale="),
        (AdaptiveLossScalingUpdater, "growth_factor", f"^{UPDATER} growth_factor; use scaling_factor="),
        (AdaptiveLossScalingUpdater, "backoff_factor", f"^{UPDATER} backoff_factor; use scaling_factor="),
        (AdaptiveLossScalingUpdater, "growth_interval", f"^{UPDATER} growth_interval; use N="),
        (AdaptiveLossScalingUpdater, "enabled", f"^{UPDATER} enabled; use nnabla's solver by itself"),
        (AdaptiveLossScalingUpdater, "acum_grad", f"^{UPDATER} acum_grad; did you mean accum_grad="),
        (AdaptiveLossScalingUpdater, "n", f"^{UPDATER} n; did you mean N="),
        (AdaptiveLossScalingUpdater, "zzz", f"^{UPDATER} zzz; it takes solver, loss, data_feeder, scale"),
        (GradScaler, "init_scale", r"^GradScaler has no argument init_scale; use history=HistoryPolicy\("),
        (GradScaler, "growth_interval", "scales follow from what was measured"),
        (GradScaler, "storag", "did you mean storage="),
    ],
)
def test_what_to_use_instead(kind: Any, argument: str, message: str) -> None:
    unknown: Dict[str, Any] = {argument: 2}
    with pytest.raises(TypeError, match=message):
        kind(object(), object(), **unknown)


def test_signatures_stay_as_they_are() -> None:
    assert list(inspect.signature(AdaptiveLossScalingUpdater).parameters)[:3] == [
        "solver",
        "loss",
        "data_feeder",
    ]
    assert "enabled" in inspect.signature(GradScaler).parameters


def test_numbers_that_are_not_negative() -> None:
    assert [nonnegative_number("x", value) for value in (0, 0.5, np.float32(2))] == [0.0, 0.5, 2.0]
    for value in (-1, -0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"^x={value} must be a finite number, 0 or more$"):
            nonnegative_number("x", value)


def test_numpys_booleans_become_pythons() -> None:
    assert boolean("x", np.True_) is True
    assert boolean("x", np.False_) is False
    for value in (0, 1, "yes", None, np.ones(2, bool)):
        with pytest.raises(TypeError, match="^x=.* must be True or False, not"):
            boolean("x", value)


def test_instances() -> None:
    path = Path("here")
    assert instance("x", path, Path) is instance_or_none("x", path, Path) is path
    assert instance_or_none("x", None, Path) is None
    with pytest.raises(TypeError, match="^x must be a Path, got NoneType$"):
        instance("x", None, Path)
    with pytest.raises(TypeError, match="^x must be an OSError or None, got int$"):
        instance_or_none("x", 3, OSError)


def test_strings() -> None:
    assert strings("x", ["a", "b"], "names") == ("a", "b")
    assert strings("x", (), "names") == ()
    for value, message in (
        ("a", r"x='a' must be a sequence of names; write \('a',\)"),
        (3, "x=3 must be a sequence of names"),
        (["a", 3], "x holds 3; names are strings"),
    ):
        with pytest.raises(TypeError, match=f"^{message}$"):
            strings("x", value, "names")  # type: ignore[arg-type]


def test_paths() -> None:
    assert [path_name("x", value) for value in ("a", Path("a"))] == ["a", "a"]
    for value in (None, 3, ["a"]):
        with pytest.raises(TypeError, match=f"^x=.* must be a path, not {type(value).__name__}$"):
            path_name("x", value)  # type: ignore[arg-type]


def test_arrays_of_numbers() -> None:
    array = np.ones(2, np.float16)
    assert array_of_numbers("x", array) is array
    np.testing.assert_array_equal(array_of_numbers("x", [1, 2]), [1, 2])
    for value in ("a", None, [True], 1j, object()):
        with pytest.raises(TypeError, match=f"^x must be an array of numbers, got {type(value).__name__} of"):
            array_of_numbers("x", value)


def test_scalars() -> None:
    assert type(scalar(np.array(2.0))) is float
    array = np.ones(1)
    assert scalar(array) is array
    assert scalar("a") == "a"
