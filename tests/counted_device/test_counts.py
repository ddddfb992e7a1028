# SPDX-License-Identifier: Apache-2.0
"""What an iteration asks of a device: waits, launches, bytes, conversions of weights.

Counts of `cpu:float` and `cpu:half` with arrays that nnabla takes for a device's. Before one launch took what
could be taken together, an iteration of ResNet-50 waited 107 times and launched 307 kernels.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Tuple, Union

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from common.resnet import resnet

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    ArrayStatistics,
    GradScaler,
    LossScaleWarning,
    Method,
    Needs,
    save_checkpoint,
)
from nnabla_adaloss.engine.passes import backward_pass
from tests.counted_device.device import HALF, Build, CountedDevice, Counts, network
from tests.worlds.trainings import scaler_step

SHAPE = (2, 1, 20, 20)


class Four(Method):
    """Scales every layer, and looks at all weights to do so."""

    needs = Needs.STATISTICS

    def scale(self, g: ArrayStatistics, W: ArrayStatistics, **_: Any) -> float:
        return 4.0


def lenet(x: nn.Variable) -> nn.Variable:
    """LeNet; at that shape no weight is as large as an activation."""
    h = F.relu(F.max_pooling(PF.convolution(x, 6, (5, 5), pad=(2, 2), name="conv1"), (2, 2)))
    h = F.relu(F.max_pooling(PF.convolution(h, 16, (5, 5), name="conv2"), (2, 2)))
    h = F.relu(PF.affine(h, 20, name="affine1"))
    return PF.affine(h, 10, name="affine2")


def narrow_resnet50(x: nn.Variable) -> nn.Variable:
    """All the layers of ResNet-50, with a sixteenth of the maps."""
    return resnet(x, "resnet50", width=4, classes=10, training=True, last_gamma=1.0)


def counted(
    device: CountedDevice,
    build: Build,
    shape: Tuple[int, ...],
    type_config: str,
    method: Union[str, Method] = "amax_history",
    accum_grad: int = 1,
    **options: Any,
) -> Tuple[AdaptiveLossScalingUpdater, Counts]:
    """The fifth iteration: all is known by then, all arrays are made, and nothing runs twice."""
    solver, loss = network(device, build, shape, type_config)
    updater = AdaptiveLossScalingUpdater(
        solver,
        loss,
        accum_grad=accum_grad,
        config=AdaLossConfig(loss_scale_method=method, **options),
        # A scale that is searched for leaves room for those of layers.
        global_scale="dynamic" if isinstance(method, Four) else "history",
    )
    assert updater.scaling.delay == 1
    for _ in range(4):
        updater.update()
    with device as counts:
        result = updater.update()
    assert (result.updated, result.retries) == (True, 0)
    assert updater.scaling.result.kind == "hookless"
    # A host array that goes to the device waits for all that the device was given before.
    assert (counts.waits, counts.writes) == (accum_grad, 0)
    return updater, counts


def scaled_layers(updater: AdaptiveLossScalingUpdater) -> int:
    return sum(alpha != 1.0 for alpha in updater.scaling.layer_scales.values())


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize("method", ["amax_history", Four()])
@pytest.mark.parametrize("type_config", ["float", "half"])
def test_lenet(on_device: CountedDevice, type_config: str, method: Union[str, Method]) -> None:
    updater, counts = counted(on_device, lenet, SHAPE, type_config, method, measure_every=1)
    # Gradients and weights in one launch.
    assert counts.launches["statistics"] == counts.launches["unscale_add"] == 1
    # The gradient of the loss is brought to its scale.
    assert counts.launches["scaled_copy"] <= scaled_layers(updater) + 1
    assert scaled_layers(updater) >= 2 or not isinstance(method, Four)
    if type_config == "half":
        # Each weight once for forward, and its gradient: scaled copies need no conversion.
        sizes = [w.size for name, w in nn.get_parameters().items() if name.endswith("/W")]
        assert sum(counts.made[HALF, size] for size in sizes) == 2 * len(sizes)


@pytest.mark.parametrize("loop", ["updater", "scaler"])
@pytest.mark.parametrize("type_config", ["float", "half"])
def test_a_loss_that_is_nan_is_found_without_another_wait(
    on_device: CountedDevice, type_config: str, loop: str
) -> None:
    """The gradients of the logarithm of a negative number are finite."""
    positive: Any = None

    def with_a_logarithm(x: nn.Variable) -> nn.Variable:
        nonlocal positive
        positive = nn.Variable((2, 10))
        positive.d = 1.0
        return PF.affine(F.relu(PF.affine(x, 6, name="a")), 10, name="b") + 0.0 * F.log(positive)

    solver, loss = network(on_device, with_a_logarithm, (2, 4), type_config)
    updater = AdaptiveLossScalingUpdater(solver, loss, on_nonfinite_loss="skip")
    scaler = GradScaler(solver)

    def update() -> bool:
        if loop == "updater":
            return updater.update().updated
        return scaler_step(scaler, solver, loss)

    for _ in range(4):
        assert update()
    with on_device as counts:
        assert update()
    # GradScaler's step looks at the gradients, too.
    assert counts.waits == counts.launches["largest_magnitude"] == 1 + (loop == "scaler")
    before = {name: v.d.copy() for name, v in nn.get_parameters().items()}
    positive.d = -1.0
    with pytest.warns(LossScaleWarning) if loop == "scaler" else nullcontext():
        assert not update()
    assert all(np.array_equal(v.d, before[name]) for name, v in nn.get_parameters().items())
    positive.d = 1.0
    assert update()


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize("type_config", ["float", "half"])
def test_batches_that_are_accumulated_wait_once_each(on_device: CountedDevice, type_config: str) -> None:
    _, counts = counted(on_device, lenet, SHAPE, type_config, accum_grad=3)
    assert counts.launches["statistics"] == 0
    assert counts.launches["unscale_add"] == 3


@pytest.mark.slow
@pytest.mark.gate
def test_resnet50(on_device: CountedDevice) -> None:
    updater, counts = counted(on_device, narrow_resnet50, (2, 3, 32, 32), "float", measure_every=1)
    assert scaled_layers(updater) > 15
    # Those gradients that can be the largest of their component, two of a layer, up to 96 to a launch.
    assert counts.launches["statistics"] == 2
    assert counts.launches["largest_magnitude"] == 2  # of running statistics
    assert sum(counts.launches.values()) <= 10
    # Per element 8 of a scaled weight and of a gradient that is unscaled, 4 of what is measured.
    assert counts.bytes < 2.1e6


def test_a_communicator_gets_gradients_function_by_function_without_a_wait(
    on_device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loss = network(on_device, lenet, SHAPE, "half")
    scaling = AdaptiveLossScaling(loss)
    run_backward = backward_pass.run_backward

    def without_callbacks(loss: Any, seed: float, grad: Any, clear: bool, _: Any, *hooks: Any) -> None:
        # nnabla takes callbacks of its own communicators only.
        run_backward(loss, seed, grad, clear, None, *hooks)

    monkeypatch.setattr(backward_pass, "run_backward", without_callbacks)
    for _ in range(2):
        for v in nn.get_parameters().values():
            v.grad.zero()
        loss.forward(clear_no_need_grad=True)
        with on_device as counts:
            scaling.backward(clear_buffer=True, communicator_callbacks=[])
    assert counts.waits == 1
    assert counts.launches["unscale_add"] == 4  # for each function with parameters
    for v in nn.get_parameters().values():
        assert v.grad.dtype == np.float32
        assert np.isfinite(v.g).all()


def test_a_state_is_saved_without_moving_the_parameters(on_device: CountedDevice) -> None:
    solver, loss = network(on_device, lenet, SHAPE, "float")
    updater = AdaptiveLossScalingUpdater(solver, loss)
    updater.update()
    updater.update()
    with on_device as counts:
        updater.state_dict()
        updater.update()
    assert counts.reads == len(nn.get_parameters())
    assert counts.writes == 0


@pytest.mark.slow
@pytest.mark.gate
def test_a_planned_pass_of_resnet50(on_device: CountedDevice) -> None:
    updater, counts = counted(on_device, narrow_resnet50, (2, 3, 32, 32), "float", update_per_n_iteration=8)
    assert scaled_layers(updater) > 15
    # Running statistics copied and looked at, weights scaled, gradients unscaled: up to 96 to a launch.
    assert counts.launches == {"scaled_copy": 3, "largest_magnitude": 2, "unscale_add": 2}


def test_a_checkpoint_leaves_all_on_the_device(on_device: CountedDevice, tmp_path: Path) -> None:
    solver, loss = network(on_device, lenet, SHAPE, "float")
    updater = AdaptiveLossScalingUpdater(solver._solver, loss)
    for _ in range(2):
        updater.update()
    saved = len(nn.get_parameters()) * 2  # with Momentum's
    with on_device as counts:
        save_checkpoint(tmp_path / "checkpoint", updater)
        updater.update()
    assert (counts.reads, counts.writes) == (saved, 0)


def test_frozen_parameters_are_compared_where_they_are(on_device: CountedDevice) -> None:
    def frozen(x: nn.Variable) -> nn.Variable:
        h = F.relu(PF.affine(x, 6, name="frozen", fix_parameters=True))
        return PF.affine(h, 10, name="trained")

    solver, loss = network(on_device, frozen, (2, 4), "float")
    loss.forward(clear_no_need_grad=True)
    updater = AdaptiveLossScalingUpdater(solver, loss)
    # The first update looks at them: their values on the host are valid until a device writes them.
    for _ in range(2):
        with on_device as counts:
            updater.update()
        assert (counts.reads, counts.writes) == (0, 0)


def test_gradients_that_were_filled_are_made_on_the_device(on_device: CountedDevice) -> None:
    _, loss = network(on_device, lenet, SHAPE, "float")
    scaling = AdaptiveLossScaling(loss)
    for _ in range(3):
        for v in nn.get_parameters().values():
            v.grad = nn.NdArray(v.shape)
            v.grad.fill(1.0)
        scaling.forward(clear_no_need_grad=True)
        with on_device as counts:
            scaling.backward(clear_buffer=True)
            assert on_device.kernels.gradients_are_finite(nn.get_parameters().values())
    assert (counts.reads, counts.writes) == (0, 0)
