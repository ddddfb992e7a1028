# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
from fractions import Fraction
from typing import Any, Dict

import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater, GradScaler
from nnabla_adaloss.core.validation import boolean, integer, number, open_share, positive_number

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
