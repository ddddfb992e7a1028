# SPDX-License-Identifier: Apache-2.0
"""The storage owns the format: ranges, formats of one's own, two formats in one training, half precision."""

from __future__ import annotations

from typing import Any, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    FixedLossScalingUpdater,
    Format,
    FormatEmulation,
    Precision,
)
from tests.worlds.methods import Says
from tests.worlds.networks import layers, mlp
from tests.worlds.passes import settle
from tests.worlds.trainings import solver_of
from tests.worlds.values import HALF, constant, data

OWN = Format.ieee("float12", exponent_bits=5, mantissa_bits=6)


def trained(storage: Any, config: Any = None, updater: Any = AdaptiveLossScalingUpdater) -> Any:
    loss = mlp(batch=8)
    options = {} if config is None else {"config": config}
    made = updater(solver_of(), loss, storage=storage, **options)
    losses = []
    for _ in range(30):
        assert made.update().updated
        losses.append(float(loss.d))
    assert losses[-1] < losses[0]
    return made


def test_the_range_is_that_of_the_storage_for_any_configuration() -> None:
    updater = trained("float8_e4m3", AdaLossConfig("approx_range", n_uf_threshold=1e-4))
    assert updater.scaling.config.range == (2.0**-9, 448.0)


@pytest.mark.parametrize("updater", [AdaptiveLossScalingUpdater, FixedLossScalingUpdater])
def test_a_format_of_ones_own_trains(updater: Any) -> None:
    made = trained(OWN, updater=updater)
    if updater is AdaptiveLossScalingUpdater:
        assert made.scaling.config.range == (OWN.smallest_subnormal, OWN.max)
        state = made.state_dict()
        made.load_state_dict(state)
        assert state["settings"]["dtype"]["mantissa_bits"] == 6


def test_scaled_weights_are_stored_as_weights_are() -> None:
    """Weights are in the format of forward: their scaled copies must stay in the range of that."""
    loss = mlp(1e-6, batch=8)
    for name, v in nn.get_parameters().items():
        if name.endswith("W"):
            v.d = v.d * 100.0 + 100.0
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=16.0, delay=0)
    storage = Precision("float8_e4m3", "float16", saturate=True)
    scaling = AdaptiveLossScaling(FormatEmulation(loss, storage), config)
    largest: List[float] = []

    def look(f: Any) -> None:
        if f.info.type_name == "Affine":
            largest.append(float(np.abs(f.inputs[1].d).max()))

    # Also in the first pass, which measures them.
    for again in (False, True):
        largest.clear()
        scaling.forward()
        scaling.backward(1.0, function_pre_hook=look, iteration=0, rerun=again)
        assert max(largest) <= 448.0
    assert max(largest) > 200.0
    assert max(scaling.layer_scales.values()) > 1.0


def test_the_copy_of_a_shared_weight_stays_in_the_range_of_each_of_its_layers() -> None:
    h = layers(6)
    for _ in range(2):
        h = F.tanh(PF.affine(h * 1e-2, 6, name="shared", with_bias=False))
    nn.get_parameters()["shared/affine/W"].d = 100.0
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=16.0, delay=0)
    # What backward reaches last is wide again.
    storage: Any = {"shared/affine": Precision("float16", "float8_e4m3"), "*": "float16"}
    scaling = AdaptiveLossScaling(FormatEmulation(F.mean(h**2) * 1e-6, storage), config)
    for again in (False, True):
        scaling.forward()
        scaling.backward(1.0, iteration=0, rerun=again)
    # 400 is in the range of float8_e4m3, 800 is not.
    assert scaling.layer_scales == {"shared/affine#2": 4.0, "shared/affine": 4.0}


@pytest.mark.parametrize("delay", [0, 1])
def test_scaled_weights_stay_in_range(delay: int) -> None:
    """A layer that shrinks its gradient by more than fp16 has room for in its weight."""
    rng = np.random.RandomState(0)
    with nn.context_scope(HALF):
        h = F.tanh(PF.affine(data(8, 16), 16, name="a", rng=rng))
        # Behind it gradients are 2^-20 of what they were, and its weights are not small: they cancel out.
        h = F.mul_scalar(PF.affine(h, 16, name="b", rng=rng), 2.0**-10)
        loss = F.mean(PF.affine(F.mul_scalar(h, 2.0**-10), 4, name="c", rng=rng) ** 2)
    weight = nn.get_parameters()["b/affine/W"]
    weight.d = weight.d * 2.0**6
    config = AdaLossConfig(loss_scale_method="amax_history", delay=delay, measure_every=1)
    scaling = AdaptiveLossScaling(loss, config)
    for iteration in range(6):
        settle(scaling, iteration, 8.0)
        for layer, alpha in scaling.layer_scales.items():
            assert alpha * np.abs(nn.get_parameters()[f"{layer}/W"].d).max() <= 65504.0
        assert scaling.found_inf == []


def test_a_copy_times_a_scale_that_is_no_power_of_two_is_rounded_as_in_native_half() -> None:
    inputs = []
    for context, storage in ((nn.get_current_context(), "float16"), (HALF, None)):
        with nn.context_scope(context):
            x = constant(np.ones((1, 2))).apply(need_grad=True)
            weight = constant(np.diag([1.0 + 2.0**-10, 1.0]) / 64.0).apply(need_grad=True)
            loss = F.sum(F.affine(x, weight) * constant(np.full((1, 2), 1.5)))
            config = AdaLossConfig(Says(1.5), use_bound=False, power_of_two=False, delay=0)
            scaling = AdaptiveLossScaling(loss if storage is None else FormatEmulation(loss, storage), config)
            for iteration in range(2):
                settle(scaling, iteration, leaves=(x, weight))
            assert scaling.layer_scales == {"Affine": 1.5}
            inputs.append(x.g.tolist())
    emulated, native = inputs
    assert emulated == native
