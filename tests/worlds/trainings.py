# SPDX-License-Identifier: Apache-2.0
"""Trainings: solvers, updaters, a data feeder, and steps of a loop."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import AdaptiveLossScalingUpdater, GradScaler
from tests.worlds.networks import gate
from tests.worlds.tampering import Gate
from tests.worlds.values import Values, snapshot

# The words with which the adaptive updater searches for its scale as nnabla's does.
AS_THE_BASELINE: Dict[str, Any] = {"global_scale": "dynamic", "on_overflow": "next"}
METHODS = ("approx_range", "amax_history")

Feeder = Callable[[], None]


class Training(NamedTuple):
    """A solver, a loss, and the data feeder that drives it."""

    solver: Any
    loss: nn.Variable
    feed: Feeder
    parameters: Dict[str, nn.Variable]


def training(
    *,
    overflow: Sequence[int] = (),
    nan: Sequence[int] = (),
    spoilt: Optional[Mapping[int, float]] = None,
    factors: Optional[Mapping[int, float]] = None,
    seed: int = 0,
    trained: Callable[[str], bool] = lambda name: True,
) -> Training:
    """A conv net on random images.

    Args:
        overflow: numbers of batches whose gradients are infinite at any loss scale, while the loss is finite.
        nan: numbers of batches that hold a NaN.
        spoilt: or another value in a pixel, by number.
        factors: what gradients of these batches are multiplied by, by number.
        seed: of parameters and data.
        trained: whether the solver has a parameter, by name.
    """
    nn.clear_parameters()
    rng = np.random.default_rng(seed)
    pixels = {**dict.fromkeys(nan, np.nan), **(spoilt or {})}
    x, t, one = nn.Variable((8, 1, 8, 8)), nn.Variable((8, 1)), nn.Variable((1,))
    h = F.swish(PF.convolution(x, 4, (3, 3), name="conv", rng=np.random.RandomState(seed)))
    h = PF.batch_normalization(h, name="bn")
    h = F.tanh(PF.affine(h, 16, name="hidden", rng=np.random.RandomState(seed + 1)))
    y, grown = PF.affine(h, 10, name="output", rng=np.random.RandomState(seed + 2)), Gate()
    if factors is not None:
        y = grown(y)
    loss = F.mean(F.softmax_cross_entropy(y, t)) + gate(y, one)
    solver = S.Momentum(0.05)
    solver.set_parameters({name: v for name, v in nn.get_parameters().items() if trained(name)})
    batches = [0]

    def feed() -> None:
        x.d = rng.standard_normal(x.shape)
        t.d = rng.integers(0, 10, t.shape)
        one.d = float(batches[0] not in overflow)
        if factors is not None:
            grown.factor = factors.get(batches[0], 1.0)
        if batches[0] in pixels:
            x.d[0, 0, 0, 0] = pixels[batches[0]]
        batches[0] += 1

    return Training(solver, loss, feed, nn.get_parameters())


def solver_of(solver: Any = None, parameters: Optional[Mapping[str, nn.Variable]] = None) -> Any:
    """A solver, by default Sgd(0.1), with these parameters, or with all that there are now."""
    solver = S.Sgd(0.1) if solver is None else solver
    solver.set_parameters(nn.get_parameters() if parameters is None else parameters)
    return solver


def updater_of(
    loss: nn.Variable,
    feed: Optional[Feeder] = None,
    solver: Any = None,
    parameters: Optional[Mapping[str, nn.Variable]] = None,
    **options: Any,
) -> AdaptiveLossScalingUpdater:
    """An updater that emulates float16, of these parameters, or of all that there are now."""
    fed = {} if feed is None else {"data_feeder": feed}
    options = {"storage": "float16", **fed, **options}
    return AdaptiveLossScalingUpdater(solver_of(solver, parameters), loss, **options)


def updater_on(train: Training, **options: Any) -> AdaptiveLossScalingUpdater:
    """The same for a conv net."""
    options = {"storage": "float16", **options}
    return AdaptiveLossScalingUpdater(train.solver, train.loss, train.feed, **options)


def scaler_step(scaler: GradScaler, solver: Any, loss: nn.Variable, grad: Any = None) -> bool:
    """One iteration of a loop with a `GradScaler` and a solver, or a list of them, on the present data;
    whether it has updated all parameters.
    """
    solvers = solver if isinstance(solver, list) else [solver]
    for one in solvers:
        one.zero_grad()
    scaler.forward(loss, clear_no_need_grad=True)
    scaler.backward(loss, clear_buffer=True, grad=grad)
    updated = [scaler.step(one) for one in solvers]
    scaler.update()
    return all(updated)


class Loop:
    """A network on random batches, trained by a bare loop, an updater or a `GradScaler`.

    Args:
        network: builds the loss of a batch.
        shape: of a batch.
        rebuilt: build the graph anew for each batch.
        need_grad: whether the batch gets a gradient.
        solver: by default Momentum(0.05).
    """

    def __init__(
        self,
        network: Callable[[nn.Variable], nn.Variable],
        shape: Tuple[int, ...],
        *,
        rebuilt: bool = False,
        need_grad: bool = False,
        solver: Any = None,
    ) -> None:
        nn.clear_parameters()
        nn.seed(0)
        nn.random.prng = np.random.RandomState(0)
        self.network, self.rebuilt = network, rebuilt
        self.rng, self.x = np.random.default_rng(0), nn.Variable(shape, need_grad=need_grad)
        self.loss = network(self.x)
        self.solver = solver_of(S.Momentum(0.05) if solver is None else solver)

    def feed(self) -> None:
        if self.rebuilt:
            self.loss = self.network(self.x)
        self.x.d = self.rng.standard_normal(self.x.shape)

    def plainly(self, updates: int, accum_grad: int = 1) -> Values:
        """What a bare loop comes to, in which nothing is freed."""
        for _ in range(updates):
            self.solver.zero_grad()
            for _ in range(accum_grad):
                self.feed()
                self.loss.forward()
                self.loss.backward()
            self.solver.update()
        return snapshot()

    def updated(self, updates: int, make: Any = AdaptiveLossScalingUpdater, **options: Any) -> Values:
        def feed() -> None:
            self.feed()
            updater.loss = self.loss

        updater = make(self.solver, self.loss, feed, **options)
        for _ in range(updates):
            result = updater.update()  # None from nnabla's own
            assert result is None or result.updated
        return snapshot()

    def scaled(self, updates: int, **options: Any) -> Values:
        scaler = GradScaler(self.solver, **options)
        for _ in range(updates):
            self.feed()
            assert scaler_step(scaler, self.solver, self.loss)
        return snapshot()


def watched(
    monitors: Sequence[Any], iterations: int, train: Optional[Training] = None, **options: Any
) -> AdaptiveLossScalingUpdater:
    """Train in float16, unless the options say otherwise."""
    updater = updater_on(train or training(), monitors=monitors, **options)
    for _ in range(iterations):
        updater.update()
    return updater
