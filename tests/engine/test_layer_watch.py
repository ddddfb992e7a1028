# SPDX-License-Identifier: Apache-2.0
"""What of a layer's arrays is seen right after its backward."""

from __future__ import annotations

from typing import Any, Dict

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, Monitor
from nnabla_adaloss.monitor import LayerScaled
from tests.worlds.networks import mlp


class Seen(Monitor):
    def __init__(self) -> None:
        self.events: Dict[str, LayerScaled] = {}
        self.arrays: Dict[str, Any] = {}
        self.gradients: Dict[str, Any] = {}

    def on_layer_scaled(self, event: LayerScaled) -> None:
        layer = event.record.layer
        self.events[layer] = event
        self.arrays[layer] = event.look.arrays()
        self.gradients[layer] = event.look.gradient
        assert event.look.gradient is event.look.gradient  # read once


def run(loss: Any, seen: Seen, **options: Any) -> AdaptiveLossScaling:
    config = AdaLossConfig(**options)
    scaling = AdaptiveLossScaling(loss, config, monitors=[seen])
    for _ in range(2):
        scaling.forward(clear_no_need_grad=True)
        scaling.backward(64.0, clear_buffer=True)
    return scaling


@pytest.mark.parametrize("delay", [0, 1])
def test_arrays_are_those_of_the_layers_product(delay: int) -> None:
    seen = Seen()
    scaling = run(mlp(), seen, delay=delay)
    assert list(seen.events) == scaling.layers == ["c/affine", "b/affine"]
    for layer, event in seen.events.items():
        arrays, record = seen.arrays[layer], event.record
        assert record.iteration == 1
        np.testing.assert_allclose(
            arrays.input_gradient,
            record.alpha * arrays.output_gradient @ arrays.weight.T,
            rtol=1e-4,
            atol=1e-6,
        )
        assert np.abs(arrays.input_gradient).max() == seen.gradients[layer].statistics.abs_max
        parameter = nn.get_parameters()[layer.replace("/affine", "/affine/W")]
        np.testing.assert_array_equal(arrays.weight, parameter.d)
        assert arrays.input.shape == arrays.input_gradient.shape


def test_a_scaled_layer_shows_its_weight_unscaled() -> None:
    seen = Seen()
    run(mlp(), seen, loss_scale_method="fixed", fixed_loss_scale=4.0)
    assert seen.events["c/affine"].record.alpha == 4.0
    np.testing.assert_array_equal(seen.arrays["c/affine"].weight, nn.get_parameters()["c/affine/W"].d)


def test_emulated_storage_tells_what_was_lost() -> None:
    seen = Seen()
    scaling = AdaptiveLossScaling(
        FormatEmulation(mlp() * 3e-3, "float8_e5m2"),
        AdaLossConfig(loss_scale_method="fixed"),
        monitors=[seen],
    )
    scaling.forward(clear_no_need_grad=True)
    scaling.backward(1.0, clear_buffer=True)
    for gradient in seen.gradients.values():
        assert gradient.format.name == "float8_e5m2"
    assert sum(gradient.underflowed for gradient in seen.gradients.values()) > 0


def test_half_arrays_are_read_as_they_are() -> None:
    seen = Seen()
    with nn.context_scope(nn.Context(["cpu:half"], "CpuCachedArray", "0")):
        run(mlp(), seen)
    for layer, gradient in seen.gradients.items():
        assert gradient.format.name == "float16"
        assert (gradient.underflowed, gradient.overflowed) == (None, None)
        assert gradient.statistics.count == seen.arrays[layer].input_gradient.size


def test_probes_are_not_told() -> None:
    class Count(Monitor):
        told = 0

        def on_layer_scaled(self, event: LayerScaled) -> None:
            self.told += 1

    count = Count()
    scaling = AdaptiveLossScaling(mlp(), AdaLossConfig(), monitors=[count])
    scaling.forward(clear_no_need_grad=True)
    scaling.backward(8.0, clear_buffer=True)
    assert count.told == 2
    scaling.forward(clear_no_need_grad=True)
    scaling.probe(1.0)
    assert count.told == 2
