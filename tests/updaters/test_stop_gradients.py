# SPDX-License-Identifier: Apache-2.0
"""Networks that read an output of theirs cut off from the graph train as in a plain loop."""

from __future__ import annotations

from typing import Any, Callable, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater, DynamicLossScalingUpdater, GradScaler
from tests.worlds.trainings import scaler_step, solver_of
from tests.worlds.values import assert_equal, snapshot

Network = Callable[[nn.Variable], nn.Variable]
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


class Training:
    """A loss on which nnabla's own forward and backward have run once already, and what trains on it."""

    def __init__(self, network: Network, *, rebuilt: bool) -> None:
        nn.clear_parameters()
        self._rng, self._x, self._rebuilt = np.random.RandomState(0), nn.Variable((4, 4)), rebuilt
        self._network = network
        self.loss = network(self._x)
        self.solver = solver_of(S.Momentum(0.05))
        self._x.d = self._rng.standard_normal(self._x.shape)
        self.solver.zero_grad()
        self.loss.forward(clear_no_need_grad=True)
        # Nothing is updated: nnabla may have freed what is read cut off, and computes with what is there.
        self.loss.backward(clear_buffer=True)

    def feed(self) -> None:
        self._x.d = self._rng.standard_normal(self._x.shape)
        if self._rebuilt:
            self.loss = self._network(self._x)

    def plainly(self) -> Dict[str, np.ndarray]:
        """With nothing freed: nnabla frees some outputs before what reads them cut off has run."""
        for _ in range(UPDATES):
            self.feed()
            self.solver.zero_grad()
            self.loss.forward()
            self.loss.backward()
            self.solver.update()
        return snapshot()

    def updated(self, updater_type: Any) -> Dict[str, np.ndarray]:
        def feed() -> None:
            self.feed()
            updater.loss = self.loss

        updater = updater_type(self.solver, self.loss, feed)
        for _ in range(UPDATES):
            updater.update()
        return snapshot()

    def scaled(self) -> Dict[str, np.ndarray]:
        scaler = GradScaler(self.solver)
        for _ in range(UPDATES):
            self.feed()
            scaler_step(scaler, self.solver, self.loss)
        return snapshot()


@pytest.mark.parametrize("rebuilt", [False, True], ids=["static", "rebuilt"])
@pytest.mark.parametrize("network", [diffusion, virtual_adversarial, quantized])
@pytest.mark.filterwarnings("ignore:nothing is stored in half precision")
def test_after_a_native_iteration_they_train_bit_for_bit(network: Network, rebuilt: bool) -> None:
    wanted = Training(network, rebuilt=rebuilt).plainly()
    assert_equal(Training(network, rebuilt=rebuilt).updated(AdaptiveLossScalingUpdater), wanted)
    assert_equal(Training(network, rebuilt=rebuilt).scaled(), wanted)
    if network is not diffusion:
        assert_equal(Training(network, rebuilt=rebuilt).updated(DynamicLossScalingUpdater), wanted)
