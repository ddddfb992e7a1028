# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import nnabla as nn
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, profile
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.profiling import _FIELDS
from tests.diagnosis.healthy import HEALTHY
from tests.worlds.trainings import updater_of


def updater_for(name: str, **arguments: Any) -> Any:
    nn.clear_parameters()
    return updater_of(*HEALTHY[name](), S.Sgd(0.1), **arguments)


@pytest.mark.parametrize("method", ["approx_range", "amax_history"])
def test_the_parts_are_the_whole(method: str) -> None:
    updater = updater_for("resnet", config=AdaLossConfig(loss_scale_method=method, measure_every=1))
    profile(updater, iterations=1)  # kernels are loaded
    times = profile(updater, iterations=3)
    assert times.sum.total == pytest.approx(times.milliseconds, rel=0.02)
    assert updater.iteration == 2 + 4
    for name in updater.scaling.layers:
        layer = times.layers[name]
        assert min(layer) >= 0.0
        assert layer.rounding > 0.0
        assert layer.unscaling > 0.0
        assert layer.rest > 0.0
    assert times.sum.scaling > 0.0
    assert times.layers["(between passes)"].rest > 0.0


def test_times_are_of_kernels_that_exist() -> None:
    assert all(callable(getattr(CpuKernels, name)) for name in _FIELDS)


def test_nothing_is_rounded_without_emulation() -> None:
    times = profile(updater_for("mlp", storage=None, config=AdaLossConfig(measure_every=1)), iterations=2)
    assert times.sum.rounding == 0.0
    assert times.sum.statistics > 0.0
    found = times.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["layers"]["fc1/affine"]["rest"] > 0.0
    lines = str(times).splitlines()
    assert lines[2].split() == ["layer", "statistics", "scaling", "unscaling", "rounding", "rest", "total"]
    assert len({len(line) for line in lines[2:]}) == 1


def test_everything_is_put_back() -> None:
    def train(iterations: int) -> np.ndarray:
        updater = updater_for("mlp")
        kernels = dict(vars(updater.scaling.kernels))
        if iterations:
            profile(updater, iterations)  # after one that it does not measure
        while updater.iteration < 5:
            updater.update()
        assert not {"forward", "backward"} & vars(updater.scaling).keys()
        assert vars(updater.scaling.kernels) == kernels
        return np.concatenate([v.d.ravel() for v in nn.get_parameters().values()])

    np.testing.assert_array_equal(train(0), train(3))
    updater = updater_for("mlp")

    def fail() -> None:
        raise OSError("no more data")

    updater.data_feeder, feed = fail, updater.data_feeder
    with pytest.raises(OSError, match="no more data"):
        profile(updater)
    updater.data_feeder = feed
    assert updater.update().updated


def test_refused() -> None:
    with pytest.raises(ValueError, match="iterations=0 must be 1 or more"):
        profile(updater_for("mlp"), iterations=0)


def test_a_feeder_that_assigns_another_loss_is_refused() -> None:
    updater = updater_for("mlp")

    def feed() -> None:
        updater.loss, fill = HEALTHY["mlp"]()
        fill()

    updater.data_feeder = feed
    with pytest.raises(ValueError, match="the feeder assigns updater.loss"):
        profile(updater, iterations=2)
    assert not {"forward", "backward"} & vars(updater.scaling).keys()


def test_hooks_of_the_updater_are_called_as_ever() -> None:
    seen: list[str] = []
    updater = updater_for("mlp", function_post_hook=(None, lambda f: seen.append(f.info.type_name)))
    updater.update()
    once = len(seen)
    profile(updater, iterations=1)
    # After one that it does not measure.
    assert len(seen) == once + 2 * len(updater.scaling.plan.nodes)
