# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import math
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

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
    path_name,
    positive_number,
    scalar,
    strings,
)


@pytest.mark.parametrize("value", [2, 2.0, np.float16(2), np.int64(2), Fraction(2)])
def test_numbers_of_every_kind(value: Any) -> None:
    for check in (number, positive_number, nonnegative_number):
        assert check("x", value) == 2.0
        assert type(check("x", value)) is float


def test_what_is_right_is_handed_back() -> None:
    assert type(integer("n", np.int32(3))) is int
    assert boolean("b", np.True_) is True
    assert boolean("b", np.False_) is boolean("b", False) is False
    assert nonnegative_number("x", 0) == 0.0
    path, array = Path("here"), np.ones(2, np.float16)
    assert instance("x", path, Path) is instance_or_none("x", path, Path) is path
    assert instance_or_none("x", None, Path) is None
    assert strings("x", ["a", "b"], "names") == ("a", "b")
    assert strings("x", (), "names") == ()
    assert [path_name("x", value) for value in ("a", Path("a"))] == ["a", "a"]
    assert array_of_numbers("x", array) is scalar(array) is array
    np.testing.assert_array_equal(array_of_numbers("x", [1, 2]), [1, 2])
    assert type(scalar(np.array(2.0))) is float
    assert scalar("a") == "a"


# The check, what is of another type, and what it must be.
WRONG: Dict[str, Tuple[Callable[[str, Any], Any], Tuple[Any, ...], str]] = {
    "number": (number, (True, np.True_, "2", None, 2j, np.ones(1)), "a number"),
    "integer": (integer, (True, 3.0, "3"), "an integer"),
    "boolean": (boolean, (0, 1, None, "no", np.ones(2, bool)), "True or False"),
    "path": (path_name, (None, 3, ["a"]), "a path"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_another_type_is_named(kind: str) -> None:
    check, values, wanted = WRONG[kind]
    for value in values:
        with pytest.raises(TypeError, match=rf"^x=.* must be {wanted}, not {type(value).__name__}$"):
            check("x", value)


def test_other_objects_are_named() -> None:
    for value in ("a", None, [True], 1j, object()):
        with pytest.raises(TypeError, match=f"^x must be an array of numbers, got {type(value).__name__} of"):
            array_of_numbers("x", value)
    with pytest.raises(TypeError, match="^x must be a Path, got NoneType$"):
        instance("x", None, Path)
    with pytest.raises(TypeError, match="^x must be an OSError or None, got int$"):
        instance_or_none("x", 3, OSError)
    for value, message in (
        ("a", r"x='a' must be a sequence of names; write \('a',\)"),
        (3, "x=3 must be a sequence of names"),
        (["a", 3], "x holds 3; names are strings"),
    ):
        with pytest.raises(TypeError, match=f"^{message}$"):
            strings("x", value, "names")  # type: ignore[arg-type]


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="^x is an integer beyond the range of floating-point numbers$"):
        number("x", 10**400)
    for check, values in (
        (positive_number, (0.0, -1.0, math.nan, math.inf)),
        (nonnegative_number, (-1, -0.1, math.nan, math.inf)),
    ):
        for value in values:
            with pytest.raises(ValueError, match=f"^x={value} "):
                check("x", value)


@pytest.mark.parametrize(
    ("kind", "argument", "advice"),
    [
        (AdaptiveLossScalingUpdater, "init_scale", "use scale="),
        (AdaptiveLossScalingUpdater, "growth_factor", "use scaling_factor="),
        (AdaptiveLossScalingUpdater, "growth_interval", "use N="),
        (AdaptiveLossScalingUpdater, "enabled", "use nnabla's solver by itself"),
        (AdaptiveLossScalingUpdater, "acum_grad", "did you mean accum_grad="),
        (AdaptiveLossScalingUpdater, "n", "did you mean N="),
        (AdaptiveLossScalingUpdater, "zzz", "it takes solver, loss, data_feeder, scale"),
        (GradScaler, "init_scale", r"use history=HistoryPolicy\("),
        (GradScaler, "growth_interval", ".*scales follow from what was measured"),
        (GradScaler, "storag", "did you mean storage="),
    ],
)
def test_what_to_use_instead(kind: Any, argument: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__} has no argument {argument}; {advice}"):
        kind(object(), object(), **{argument: 2})


def test_signatures_stay_as_they_are() -> None:
    found = [*inspect.signature(AdaptiveLossScalingUpdater).parameters]
    assert found[:3] == ["solver", "loss", "data_feeder"]
    assert "enabled" in inspect.signature(GradScaler).parameters
