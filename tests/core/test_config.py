# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any, Dict

import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig
from nnabla_adaloss.core.methods import ApproxRange


def test_range_follows_a_changed_dtype() -> None:
    config = AdaLossConfig(u_max=100.0)
    assert config.range == (6e-8, 100.0)
    assert dataclasses.replace(config, dtype="float32").range == (1e-23, 100.0)
    # A dtype is kept by its canonical name.
    assert AdaLossConfig(dtype="half") == AdaLossConfig(dtype="float16")


def test_is_immutable_comparable_and_saved_by_value() -> None:
    config = AdaLossConfig("abs_range", include=["a", "b"], init_scale=np.float32(2), scale_upper_bound=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.init_scale = 2.0
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.include == ("a", "b")
    assert type(config.init_scale) is type(config.scale_upper_bound) is float


def test_selection_from_include_and_exclude() -> None:
    config = AdaLossConfig(include=("block1/*", "head"), exclude=("*/fc",))
    layers = ["block1/conv", "block1/fc", "block2/conv", "head"]
    assert [layer for layer in layers if config.selection.selects(layer)] == ["block1/conv", "head"]
    assert AdaLossConfig().selection.selects("any/thing")


def test_settings_that_a_method_reads_are_used() -> None:
    assert AdaLossConfig("fixed").unused_by_method.isdisjoint({"fixed_loss_scale", "scale_upper_bound"})
    assert {"n_uf_threshold", "scale_upper_bound"} <= AdaLossConfig("amax_history").unused_by_method
    # A function may read any setting.
    assert not AdaLossConfig(lambda g, W, *, config, fan_in: config.fixed_loss_scale).unused_by_method


POSITIVE = ("fixed_loss_scale", "init_scale", "u_min", "u_max", "scale_upper_bound", "accum_upper_bound")


@pytest.mark.parametrize("name", [*POSITIVE, "n_uf_threshold", "max_rescue_ratio"])
def test_numbers_in_range(name: str) -> None:
    for value in (0.0, -1.0, math.nan, *([math.inf] if name in POSITIVE else [])):
        with pytest.raises(ValueError, match=f"^{name}={value!r} "):
            AdaLossConfig(**{name: value})
    for wrong in (True, "1", [1.0]):
        with pytest.raises(TypeError, match=f"^{name}=.* must be a number, not {type(wrong).__name__}"):
            AdaLossConfig(**{name: wrong})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"loss_scale_method": "aprox"},
            ValueError,
            "'aprox' is unknown; choose one of approx_range, .*, or name a method of your own as .*:name\"$",
        ),
        (
            {"loss_scale_method": "math:pi"},
            TypeError,
            "'math:pi' must be a name, a Method, or callable.*, got float",
        ),
        ({"loss_scale_method": int}, TypeError, "'int'> must be a name, a Method, or callable"),
        ({"loss_scale_method": "builtins:float"}, TypeError, "must be a name, a Method, or callable"),
        ({"loss_scale_method": "os:getenv"}, TypeError, r"callable as f.*, unlike getenv\(key, default"),
        ({"loss_scale_method": lambda g, W: 1.0}, TypeError, r"callable as f.*, unlike <lambda>\(g, W\)"),
        ({"loss_scale_method": 1}, TypeError, "must be a name, .*, got int: give such a function$"),
        ({"max_rescue_ratio": 1.5}, ValueError, "max_rescue_ratio=1.5"),
        ({"u_min": 1.0, "u_max": 1.0}, ValueError, "u_min=1.0 must be smaller than u_max=1.0"),
        ({"u_min": 1e5}, ValueError, "u_min=100000.0 must be smaller than u_max=65504.0"),
        ({"dtype": "hafl"}, ValueError, "dtype='hafl' is unknown; choose one of float16"),
        ({"update_per_n_iteration": 0}, ValueError, "update_per_n_iteration=0 must be 1 or more"),
        ({"measure_every": 0}, ValueError, "measure_every=0 must be 1 or more"),
        ({"planned_bytes": 0}, TypeError, "has no argument planned_bytes; scaled copies of weights take as"),
        ({"update_per_n_iteration": 1.0}, TypeError, "update_per_n_iteration=1.0 must be an integer"),
        ({"debug_level": 1}, TypeError, r"has no argument debug_level; .* monitors=\[LogMonitor\(level\)\]$"),
        ({"delay": 2}, ValueError, "delay=2 must be 0, 1 or None"),
        ({"delay": 0.5}, TypeError, "^delay=0.5 must be an integer"),
        ({"use_bound": 1}, TypeError, "use_bound=1 must be True or False"),
        ({"power_of_two": None}, TypeError, "power_of_two=None must be True or False"),
        ({"recorder": print}, TypeError, "has no argument recorder; .* an object that has on_layer_scaled"),
        ({"include": "conv*"}, TypeError, r"include='conv\*' must be a sequence"),
        ({"exclude": 1}, TypeError, "exclude=1 must be a sequence"),
        ({"exclude": (1,)}, TypeError, "exclude holds 1"),
    ],
)
def test_refused(arguments: Dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        AdaLossConfig(**arguments)


def test_the_default_method_follows_from_the_scaled_object() -> None:
    assert AdaLossConfig().method == ApproxRange()
    config = AdaLossConfig(measure_every=4)
    assert config.for_network() == AdaLossConfig(loss_scale_method="amax_history", measure_every=4)
    given = AdaLossConfig(loss_scale_method="fixed", use_bound=False)
    assert given.for_network() is given


def test_settings_of_another_method_are_not_ignored_in_silence() -> None:
    config = AdaLossConfig(n_uf_threshold=1e-4, use_bound=False)
    assert config.changed_without_effect == ["n_uf_threshold", "use_bound"]
    for other in (AdaLossConfig(), AdaLossConfig("approx_range", use_bound=False)):
        assert other.changed_without_effect == []
