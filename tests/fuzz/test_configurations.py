# SPDX-License-Identifier: Apache-2.0
"""Configurations as random dicts: each is refused by name, or works."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict

import hypothesis.strategies as st
import nnabla.solvers as S
import numpy as np
import pytest
from hypothesis import given

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from tests.fuzz.budget import budget
from tests.worlds.networks import mlp
from tests.worlds.trainings import updater_of
from tests.worlds.values import snapshot

pytestmark = [pytest.mark.slow, pytest.mark.gate]


def half(g: Any, W: Any, *, config: AdaLossConfig, fan_in: float) -> float:
    return 0.5


def large(g: Any, W: Any, *, config: AdaLossConfig, fan_in: float) -> float:
    return 1e30


NUMBERS = st.sampled_from([0, 1, 2, -1, 3.7, 1e-8, 1e-300, 1e300, 5e-324, math.inf, math.nan, True, 10**400])
NUMPY = st.sampled_from([np.float32(2.0), np.int64(3), np.array(2.0), np.float16(0.5), np.bool_(True)])
OTHERS = st.sampled_from([None, "2", b"2", [], (), {}, object(), 1j, ["a*"], ("*",), "float16", int])
ANYTHING = NUMBERS | NUMPY | OTHERS

METHODS = ["approx_range", "abs_range", "element_wise_range", "fixed", "no_such", "os:getcwd", "os:nothing"]
LIKELY = {
    "loss_scale_method": st.sampled_from([*METHODS, half, large]),
    "dtype": st.sampled_from(["float16", "bfloat16", "float32", "float8_e4m3", "float64"]),
    "n_uf_threshold": st.floats(0.0, 1.0),
    "max_rescue_ratio": st.floats(0.0, 1.0),
    "update_per_n_iteration": st.integers(0, 5),
    "delay": st.sampled_from([None, 0, 1]),
    "use_bound": st.booleans(),
    "power_of_two": st.booleans(),
    "include": st.lists(st.text(max_size=3), max_size=2),
}
FIELDS = sorted(field.name for field in dataclasses.fields(AdaLossConfig))
configurations = st.lists(st.sampled_from(FIELDS), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({n: LIKELY.get(n, ANYTHING) | ANYTHING for n in names})
)

ARGUMENTS = (
    *("scale", "scaling_factor", "N", "accum_grad", "weight_decay", "storage", "max_retries", "hysteresis"),
    *("on_nonfinite_loss", "on_scale_floor", "min_scale", "max_scale", "on_gradients", "check_every"),
)
arguments = st.lists(st.sampled_from(ARGUMENTS), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries(dict.fromkeys(names, ANYTHING))
)


def updater_with(**options: Any) -> AdaptiveLossScalingUpdater:
    return updater_of(mlp(), solver=S.Sgd(1e-3), **{"storage": None, **options})


def named(error: Exception, names: Any) -> None:
    message = str(error)
    # u_min and u_max are taken from dtype, and a delay depends on the method.
    related = {"dtype": ["u_min", "u_max"], "u_min": ["u_max"], "loss_scale_method": ["delay"]}
    possible = {*names, *(r for n in names for r in related.get(n, []))}
    assert any(name in message for name in possible), f"{error!r} names none of {sorted(possible)}"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@budget(200)
@given(arguments | configurations.map(lambda options: {"config": options}))
def test_options_are_refused_by_name_or_work(options: Dict[str, Any]) -> None:
    fields = options.pop("config", None)
    try:
        if fields is not None:
            options = {"config": AdaLossConfig(**fields), "on_scale_floor": "skip", "max_retries": 200}
        updater = updater_with(**options)
        if options.get("on_gradients") is not None or updater.accum_grad > 5:
            return
        results = [updater.update() for _ in range(1 if fields is None else 2)]
    except (TypeError, ValueError) as error:
        named(error, options if fields is None else fields)
        return
    assert all(0.0 < result.scale < math.inf for result in results)
    assert fields is None or all(np.isfinite(v).all() for v in snapshot().values())
    state = updater.state_dict()
    updater.load_state_dict(state)
    assert updater.state_dict() == state
