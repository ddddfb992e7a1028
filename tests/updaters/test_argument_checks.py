# SPDX-License-Identifier: Apache-2.0
"""Errors about arguments name the argument, what it is, and the cure."""

from __future__ import annotations

import math
from typing import Any, Dict

import nnabla as nn
import nnabla.solvers as S
import pytest

from nnabla_adaloss.updaters.argument_checks import check_arguments, check_choice
from nnabla_adaloss.updaters.batch_run import keep_data

SOUND: Dict[str, Any] = {
    "solver": S.Sgd(0.1),
    "data_feeder": keep_data,
    "accum_grad": 1,
    "weight_decay": None,
    "comm": None,
    "grads": None,
}


class Communicator:
    def all_reduce(self, arrays: Any, division: bool, inplace: bool) -> None: ...


@pytest.mark.parametrize(
    "changes",
    [{}, {"weight_decay": 0}, {"grads": []}, {"comm": Communicator(), "grads": [nn.NdArray((1,))]}],
)
def test_sound_arguments(changes: Dict[str, Any]) -> None:
    check_arguments(**{**SOUND, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"solver": 3}, TypeError, r"solver must be an nnabla solver; int has no zero_grad\(\)"),
        ({"data_feeder": 3}, TypeError, "data_feeder must be callable without arguments, got int"),
        ({"accum_grad": 0}, ValueError, "accum_grad=0 must be 1 or more"),
        ({"accum_grad": 0.5}, TypeError, "accum_grad=0.5 must be an integer, not float"),
        ({"weight_decay": "much"}, TypeError, "weight_decay='much' must be a number, not str"),
        ({"weight_decay": -1}, ValueError, "weight_decay=-1 must be a finite number, 0 or more"),
        ({"weight_decay": math.nan}, ValueError, "weight_decay=nan must be a finite number, 0 or more"),
        ({"grads": 3}, TypeError, "grads must be a list of NdArrays, got int"),
        (
            {"grads": [nn.NdArray(()), nn.Variable(())]},
            TypeError,
            r"grads\[1\] must be an NdArray, such as a Variable's \.grad, got Variable",
        ),
        ({"comm": 3}, TypeError, "comm must be a communicator with all_reduce.*; int has no all_reduce"),
        (
            {"grads": [nn.NdArray((1,))]},
            ValueError,
            "grads are exchanged through comm, but comm is None; pass a communicator, or no grads",
        ),
    ],
)
def test_others(changes: Dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        check_arguments(**{**SOUND, **changes})


def test_a_choice() -> None:
    assert check_choice("on_overflow", "skip", ("raise", "skip")) == "skip"
    with pytest.raises(ValueError, match="^on_overflow='ignore' must be one of 'raise', 'skip'$"):
        check_choice("on_overflow", "ignore", ("raise", "skip"))
