# SPDX-License-Identifier: Apache-2.0
"""Reports of layers: the scales that they had, and their arrays right after backward."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, LayerScaled, Monitor, Reason
from tests.worlds.methods import Says
from tests.worlds.monitors import Records
from tests.worlds.networks import layers, mlp
from tests.worlds.passes import calibrated, run, settle
from tests.worlds.values import HALF


class Observations(Monitor):
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


def watched(
    loss: Any, passes: int = 2, scale: float = 64.0, **options: Any
) -> Tuple[Observations, AdaptiveLossScaling]:
    seen = Observations()
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(**options), monitors=[seen])
    for _ in range(passes):
        scaling.forward(clear_no_need_grad=True)
        scaling.backward(scale, clear_buffer=True)
    return seen, scaling


@pytest.mark.parametrize(
    "config", [{"delay": 0}, {"delay": 1}, {"loss_scale_method": "fixed", "fixed_loss_scale": 4.0}], ids=str
)
def test_arrays_are_those_of_the_layers_product(config: Any) -> None:
    seen, scaling = watched(mlp(), **config)
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


def test_emulated_storage_counts_lost_elements() -> None:
    loss = FormatEmulation(mlp() * 3e-3, "float8_e5m2")
    seen, _ = watched(loss, 1, 1.0, loss_scale_method="fixed")
    for gradient in seen.gradients.values():
        assert gradient.format.name == "float8_e5m2"
    assert sum(gradient.underflowed for gradient in seen.gradients.values()) > 0


def test_half_arrays_are_read_as_they_are() -> None:
    with nn.context_scope(HALF):
        seen, _ = watched(mlp())
    for layer, gradient in seen.gradients.items():
        assert gradient.format.name == "float16"
        assert (gradient.underflowed, gradient.overflowed) == (None, None)
        assert gradient.statistics.count == seen.arrays[layer]["input_gradient"].size


def test_probes_are_not_told() -> None:
    seen, scaling = watched(mlp(), 1)
    assert seen.told == 2
    scaling.forward(clear_no_need_grad=True)
    scaling.probe(1.0)
    assert seen.told == 2


@pytest.mark.parametrize("which", ["weight range", "scale limit", "meeting of branches"])
def test_a_record_holds_the_scale_that_was_applied(which: str) -> None:
    h = layers(6)
    head = PF.affine(h, 6, name="head", rng=np.random.RandomState(1))
    y = head * 1e-6
    if which == "weight range":
        nn.get_parameters()["head/affine/W"].d = 5000.0
    elif which == "scale limit":
        y, nn.get_parameters()["head/affine/W"].d = head, 100.0
    else:
        # The shortcut leads from the loss to what is behind the layer: both carry the scale of that.
        y = F.mean(y) + F.mean(h)
    monitor = Records()
    config = AdaLossConfig(Says(64.0), use_bound=False, delay=0)
    with nn.context_scope(nn.Context(["cpu:float"])):
        scaling = AdaptiveLossScaling(FormatEmulation(F.mean(y)), config, monitors=[monitor])
    calibrated(scaling, None if which == "scale limit" else 1.0)
    record = monitor.records[-1]
    assert scaling.layer_scales == {"head/affine": record.alpha}
    assert scaling.accumulated_scales == {"head/affine": record.accumulated_scale}
    assert (record.alpha != record.unbounded == 64.0, record.reason.value) == (True, which)


@pytest.mark.parametrize("weight", [1.0, 2.0**-20])
def test_a_record_holds_the_loss_weight(weight: float) -> None:
    seen, _ = watched(mlp() * weight)
    assert {event.record.loss_weight for event in seen.events.values()} == {weight}


def test_passes_of_one_iteration_are_numbered_in_records() -> None:
    monitor = Records()
    records, scaling = monitor.records, AdaptiveLossScaling(mlp(), monitors=[monitor])

    def numbers() -> List[Any]:
        found = [(record.iteration, record.attempt) for record in records]
        records.clear()
        assert found == sorted(found)
        return list(dict.fromkeys(found))

    for iteration in (1, 1, 1, 2, 3, 3):
        run(scaling, 8.0, iteration=iteration)
    assert numbers() == [(1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (3, 1)]
    state = scaling.state_dict()
    for _ in range(2):
        run(scaling, 8.0)
    assert numbers() == [(4, 0), (5, 0)]
    scaling.load_state_dict(state)
    run(scaling, 8.0)
    assert numbers() == [(4, 0)]

    def fail(f: Any) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        run(scaling, 8.0, iteration=5, function_post_hook=fail)
    run(scaling, 8.0, iteration=5)
    assert numbers()[-1] == (5, 1)


def test_records_of_choices_have_the_statistics_that_they_follow_from() -> None:
    monitor = Records()
    scaling = AdaptiveLossScaling(mlp(), AdaLossConfig(measure_every=2), monitors=[monitor])
    for _ in range(6):
        run(scaling)
        scaling.after_update()
    chosen = [record for record in monitor.records if record.iteration and record.reason is not Reason.HELD]
    assert chosen
    assert all(record.g is not None and record.g.abs_max > 0.0 for record in chosen)


@pytest.mark.parametrize("weight", [1.0, 2.0**-10])
def test_statistics_of_a_record_are_of_the_gradient_as_it_arrives(weight: float) -> None:
    seen = Observations()
    scaling = AdaptiveLossScaling(mlp(weight), AdaLossConfig(delay=0), monitors=[seen])
    calibrated(scaling)
    assert seen.events
    for layer, event in seen.events.items():
        assert event.record.g is not None
        assert event.record.g.abs_max == np.abs(seen.arrays[layer]["output_gradient"]).max()


def test_a_layer_that_computes_the_loss_itself_has_statistics_too() -> None:
    seen, y = Observations(), PF.affine(layers(6), 3, name="last")
    scaling = AdaptiveLossScaling(y, AdaLossConfig(delay=0), monitors=[seen])
    settle(scaling, grad=np.full(y.shape, 0.5, np.float32))
    record = seen.events["last/affine"].record
    assert record.g is not None
    assert record.g.abs_max == 0.5 * record.previous_scale
