# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

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

ARRAY, PATH = np.ones(2, np.float16), Path("here")


@pytest.mark.parametrize("value", [2, 2.0, np.float16(2), np.int64(2), Fraction(2)])
def test_numbers_of_every_kind(value: Any) -> None:
    for check in (number, positive_number, nonnegative_number):
        assert check("x", value) == 2.0
        assert type(check("x", value)) is float


def test_valid_arguments_are_returned() -> None:
    assert type(integer("n", np.int32(3))) is int
    assert boolean("b", np.True_) is True
    assert boolean("b", np.False_) is boolean("b", False) is False
    assert nonnegative_number("x", 0) == 0.0
    assert instance("x", PATH, Path) is instance_or_none("x", PATH, Path) is PATH
    assert instance_or_none("x", None, Path) is None
    assert strings("x", ["a", "b"], "names") == ("a", "b")
    assert [path_name("x", value) for value in ("a", b"a", Path("a"))] == ["a"] * 3
    assert array_of_numbers("x", ARRAY) is scalar(ARRAY) is ARRAY
    assert type(scalar(np.array(2.0))) is float


@pytest.mark.parametrize(
    ("check", "values"),
    [
        (number, (True, np.True_, "2", None, 2j, np.ones(1))),
        (integer, (True, 3.0, "3")),
        (boolean, (0, 1, None, "no", np.ones(2, bool))),
        (path_name, (None, 3, ["a"])),
        (array_of_numbers, ("a", None, [True], 1j, object())),
        (lambda name, value: instance(name, value, Path), (None, "a")),
        (lambda name, value: instance_or_none(name, value, Path), ("a",)),
        (lambda name, value: strings(name, value, "names"), ("a", 3, ["a", 3])),
    ],
)
def test_another_type_is_named(check: Any, values: Any) -> None:
    for value in values:
        with pytest.raises(TypeError, match="^x[= ].*(must be|are strings)"):
            check("x", value)


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
        (GradScaler, "zzz", "it takes config"),
        (GradScaler, "init_scale", r"use history=HistoryPolicy\("),
        (GradScaler, "growth_interval", ".*scales follow from measurements"),
        (GradScaler, "storag", "did you mean storage="),
        (GradScaler, "solver", "give the solvers by position"),
        (GradScaler, "solvers", "give the solvers by position"),
    ],
)
def test_errors_name_replacements(kind: Any, argument: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__} has no argument {argument}; {advice}"):
        kind(object(), object(), **{argument: 2})


def test_signatures_stay_as_they_are() -> None:
    found = [*inspect.signature(AdaptiveLossScalingUpdater).parameters]
    assert found[:3] == ["solver", "loss", "data_feeder"]
    assert "enabled" in inspect.signature(GradScaler).parameters
