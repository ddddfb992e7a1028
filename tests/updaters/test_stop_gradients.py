# SPDX-License-Identifier: Apache-2.0
"""Networks that read an output of theirs cut off from the graph train as in a plain loop."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater, DynamicLossScalingUpdater, GradScaler

UPDATES = 12


def cut(v: nn.Variable) -> nn.Variable:
    return v.get_unlinked_variable(need_grad=False)


def affine(h: nn.Variable, width: int, name: str) -> nn.Variable:
    return PF.affine(h, width, name=name, rng=np.random.RandomState(len(name)))


def diffusion(x: nn.Variable) -> nn.Variable:
    """The variance is learned by a second loss that does not reach the mean."""
    h = F.swish(affine(x, 6, "in"))
    mean, variance = F.split(F.reshape(affine(h, 8, "out"), (4, 2, 4)), axis=1)
    bound = (x - cut(mean)) ** 2 * F.exp(-variance) + variance
    return F.mean((x - mean) ** 2) + 0.1 * F.mean(bound)


def virtual_adversarial(x: nn.Variable) -> nn.Variable:
    """What the network says should change little with its input."""

    def said(x: nn.Variable) -> nn.Variable:
        return F.log_softmax(affine(F.relu(affine(x, 6, "hidden")), 3, "logits"))

    clean = said(x)
    return F.mean(clean**2) + F.mean(F.exp(cut(clean)) * (cut(clean) - said(x + 0.1)))


def quantized(x: nn.Variable) -> nn.Variable:
    """Gradients go around a code book, whose entries and the encoder come closer to each other."""
    h = affine(x, 6, "encoder")
    codes = nn.parameter.get_parameter_or_create("codes", (5, 6), np.eye(5, 6), need_grad=True)
    nearest = F.max(F.affine(cut(h), F.transpose(codes, (1, 0))), axis=1, only_index=True)
    nearest.need_grad = False
    q = F.reshape(F.embed(nearest, codes), h.shape)
    out = affine(h + cut(q - h), 4, "decoder")
    return F.mean((out - x) ** 2) + F.mean((cut(h) - q) ** 2) + 0.25 * F.mean((h - cut(q)) ** 2)


class Training(NamedTuple):
    """A loss on which nnabla's own forward and backward have run once already."""

    loss: nn.Variable
    solver: Any
    feed: Callable[[], None]
    build: Callable[[], nn.Variable]


def training(network: Callable[[nn.Variable], nn.Variable]) -> Training:
    nn.clear_parameters()
    rng, x = np.random.RandomState(0), nn.Variable((4, 4))

    def feed() -> None:
        x.d = rng.standard_normal(x.shape)

    loss = network(x)
    solver = S.Momentum(0.05)
    solver.set_parameters(nn.get_parameters())
    feed()
    solver.zero_grad()
    loss.forward(clear_no_need_grad=True)
    # Nothing is updated: nnabla may have freed what is read cut off, and computes with what is there.
    loss.backward(clear_buffer=True)
    return Training(loss, solver, feed, lambda: network(x))


def plainly(t: Training, *, rebuilt: bool) -> Dict[str, np.ndarray]:
    """With nothing freed: nnabla frees some outputs before what reads them cut off has run."""
    loss = t.loss
    for _ in range(UPDATES):
        t.feed()
        if rebuilt:
            loss = t.build()
        t.solver.zero_grad()
        loss.forward()
        loss.backward()
        t.solver.update()
    return parameters()


def updated(t: Training, updater_type: Any, *, rebuilt: bool) -> Dict[str, np.ndarray]:
    def feed() -> None:
        t.feed()
        if rebuilt:
            updater.loss = t.build()

    updater = updater_type(t.solver, t.loss, feed)
    for _ in range(UPDATES):
        updater.update()
    return parameters()


def scaled(t: Training, *, rebuilt: bool) -> Dict[str, np.ndarray]:
    scaler, loss = GradScaler(t.solver), t.loss
    for _ in range(UPDATES):
        t.feed()
        if rebuilt:
            loss = t.build()
        t.solver.zero_grad()
        scaler.forward(loss, clear_no_need_grad=True)
        scaler.backward(loss, clear_buffer=True)
        scaler.step(t.solver)
        scaler.update()
    return parameters()


def parameters() -> Dict[str, np.ndarray]:
    return {name: v.d.copy() for name, v in nn.get_parameters().items()}


every_graph = pytest.mark.parametrize("rebuilt", [False, True], ids=["static", "rebuilt"])


def assert_equal(found: Dict[str, np.ndarray], wanted: Dict[str, np.ndarray]) -> None:
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@every_graph
@pytest.mark.parametrize("network", [diffusion, virtual_adversarial, quantized])
@pytest.mark.filterwarnings("ignore:nothing is stored in half precision")
def test_after_a_native_iteration_they_train_bit_for_bit(
    network: Callable[[nn.Variable], nn.Variable], rebuilt: bool
) -> None:
    wanted = plainly(training(network), rebuilt=rebuilt)
    assert_equal(updated(training(network), AdaptiveLossScalingUpdater, rebuilt=rebuilt), wanted)
    assert_equal(scaled(training(network), rebuilt=rebuilt), wanted)


@every_graph
@pytest.mark.parametrize("network", [virtual_adversarial, quantized])
@pytest.mark.filterwarnings("ignore:nothing is stored in half precision")
def test_they_train_as_with_nnablas_updater(
    network: Callable[[nn.Variable], nn.Variable], rebuilt: bool
) -> None:
    wanted = updated(training(network), DynamicLossScalingUpdater, rebuilt=rebuilt)
    assert_equal(updated(training(network), AdaptiveLossScalingUpdater, rebuilt=rebuilt), wanted)
