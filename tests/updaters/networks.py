# SPDX-License-Identifier: Apache-2.0
"""What the tests of trainings share: networks, solvers, updaters, ranks, and comparisons."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import AdaptiveLossScalingUpdater, GradScaler
from tests.tampering import Gate

# The words with which the adaptive updater searches for its scale as nnabla's does.
AS_THE_BASELINE: Dict[str, Any] = {"global_scale": "dynamic", "on_overflow": "next"}
HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")
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


def gate(y: nn.Variable, one: nn.Variable) -> nn.Variable:
    """A term of a loss: where `one` is 0, every gradient of `y` is lost, while forward is finite."""
    # sqrt has an infinite slope at 0.
    return F.sum(F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + one, 0.5))


def two_layers(x: nn.Variable, hidden: int = 5, out: int = 2) -> nn.Variable:
    """The loss of a network with parameters that follow from nothing but the sizes."""
    h = F.tanh(PF.affine(x, hidden, name="a", rng=np.random.RandomState(1)))
    return F.mean(PF.affine(h, out, name="b", rng=np.random.RandomState(2)) ** 2)


def constant(values: Any) -> nn.Variable:
    """A Variable that holds these values in float32."""
    return nn.Variable.from_numpy_array(np.asarray(values, np.float32))


def data(*shape: int, seed: int = 0) -> nn.Variable:
    """A Variable of random numbers."""
    return constant(np.random.RandomState(seed).randn(*shape))


def solver_of(solver: Any = None) -> Any:
    """A solver, by default Sgd(0.1), with all parameters that there are now."""
    solver = S.Sgd(0.1) if solver is None else solver
    solver.set_parameters(nn.get_parameters())
    return solver


def updater_of(
    loss: nn.Variable, *feed: Feeder, solver: Any = None, **options: Any
) -> AdaptiveLossScalingUpdater:
    """An updater of all parameters that emulates float16."""
    return AdaptiveLossScalingUpdater(solver_of(solver), loss, *feed, **{"storage": "float16", **options})


def updater_on(train: Training, **options: Any) -> AdaptiveLossScalingUpdater:
    """The same for a conv net."""
    options = {"storage": "float16", **options}
    return AdaptiveLossScalingUpdater(train.solver, train.loss, train.feed, **options)


def scaler_step(scaler: GradScaler, solver: Any, loss: nn.Variable) -> bool:
    """One iteration of a loop with a `GradScaler`, on the present data; whether it has updated parameters."""
    solver.zero_grad()
    scaler.forward(loss, clear_no_need_grad=True)
    scaler.backward(loss, clear_buffer=True)
    updated = scaler.step(solver)
    scaler.update()
    return updated


def snapshot(parameters: Optional[Mapping[str, nn.Variable]] = None) -> Dict[str, np.ndarray]:
    """Return copies of parameters, or of all that there are, running statistics among them."""
    if parameters is None:
        parameters = nn.get_parameters(grad_only=False)
    return {name: v.d.copy() for name, v in parameters.items()}


def gradients() -> Dict[str, np.ndarray]:
    """Return copies of the gradients of all parameters."""
    return {name: v.g.copy() for name, v in nn.get_parameters().items()}


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Assert that no bit of the arrays that are expected is another."""
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


class Pair:
    """A communicator of two ranks: what the other one adds to an array follows from ours; of itself it tells
    what we tell.

    Args:
        other: that; by default the other rank has nothing but zeros.
        size: 1 for a rank that is alone.

    Attributes:
        asked: the iteration, the name and the number of arrays of each message.
        shapes: of all arrays that were summed.
    """

    rank, iteration = 0, 0

    def __init__(self, other: Callable[[np.ndarray], Any] = lambda own: 0.0, size: int = 2) -> None:
        self._other, self.size = other, size
        self.asked: List[Tuple[int, str, int]] = []
        self.shapes: List[Tuple[int, ...]] = []

    def all_reduce(self, arrays: Sequence[nn.NdArray], division: bool = False, inplace: bool = False) -> None:
        self.asked.append((self.iteration, "all_reduce", len(arrays)))
        for array in arrays if self.size > 1 else ():
            self.shapes.append(array.shape)
            own = array.data
            told = own.ndim == 2 and len(own) == self.size and own[0].any() and not own[1].any()
            with np.errstate(over="ignore"):
                array.data = own + (own[::-1] if told else self._other(own))

    def bcast(self, arrays: Sequence[nn.NdArray], src: int, inplace: bool = False) -> None:
        self.asked.append((self.iteration, "bcast", len(arrays)))
