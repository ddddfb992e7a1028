# SPDX-License-Identifier: Apache-2.0
"""What of a layer's arrays is seen right after its backward."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, Monitor
from nnabla_adaloss.monitor import LayerScaled
from tests.worlds.networks import mlp
from tests.worlds.values import HALF


class Seen(Monitor):
    def __init__(self) -> None:
        self.told = 0
        self.events: Dict[str, LayerScaled] = {}
        self.arrays: Dict[str, Any] = {}
        self.gradients: Dict[str, Any] = {}

    def on_layer_scaled(self, event: LayerScaled) -> None:
        layer = event.record.layer
        self.told += 1
        self.events[layer] = event
        self.arrays[layer] = event.look.arrays()
        self.gradients[layer] = event.look.gradient
        assert event.look.gradient is event.look.gradient  # read once


def run(loss: Any, passes: int = 2, scale: float = 64.0, **options: Any) -> Tuple[Seen, AdaptiveLossScaling]:
    seen = Seen()
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(**options), monitors=[seen])
    for _ in range(passes):
        scaling.forward(clear_no_need_grad=True)
        scaling.backward(scale, clear_buffer=True)
    return seen, scaling


@pytest.mark.parametrize(
    "config", [{"delay": 0}, {"delay": 1}, {"loss_scale_method": "fixed", "fixed_loss_scale": 4.0}], ids=str
)
def test_arrays_are_those_of_the_layers_product(config: Any) -> None:
    seen, scaling = run(mlp(), **config)
    assert list(seen.events) == scaling.layers == ["c/affine", "b/affine"]
    for layer, event in seen.events.items():
        arrays, record = seen.arrays[layer], event.record
        assert record.iteration == 1
        assert record.alpha == config.get("fixed_loss_scale", record.alpha)
        expected = record.alpha * arrays["output_gradient"] @ arrays["weight"].T
        np.testing.assert_allclose(arrays["input_gradient"], expected, rtol=1e-4, atol=1e-6)
        assert np.abs(arrays["input_gradient"]).max() == seen.gradients[layer].statistics.abs_max
        # Its weight is shown unscaled.
        parameter = nn.get_parameters()[layer.replace("/affine", "/affine/W")]
        np.testing.assert_array_equal(arrays["weight"], parameter.d)
        assert arrays["input"].shape == arrays["input_gradient"].shape


def test_emulated_storage_tells_what_was_lost() -> None:
    loss = FormatEmulation(mlp() * 3e-3, "float8_e5m2")
    seen, _ = run(loss, 1, 1.0, loss_scale_method="fixed")
    for gradient in seen.gradients.values():
        assert gradient.format.name == "float8_e5m2"
    assert sum(gradient.underflowed for gradient in seen.gradients.values()) > 0


def test_half_arrays_are_read_as_they_are() -> None:
    with nn.context_scope(HALF):
        seen, _ = run(mlp())
    for layer, gradient in seen.gradients.items():
        assert gradient.format.name == "float16"
        assert (gradient.underflowed, gradient.overflowed) == (None, None)
        assert gradient.statistics.count == seen.arrays[layer]["input_gradient"].size


def test_probes_are_not_told() -> None:
    seen, scaling = run(mlp(), 1)
    assert seen.told == 2
    scaling.forward(clear_no_need_grad=True)
    scaling.probe(1.0)
    assert seen.told == 2
