# SPDX-License-Identifier: Apache-2.0
"""Small trainings that two updaters can be compared on."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

# The words with which the adaptive updater searches for its scale as nnabla's does.
AS_THE_BASELINE: Dict[str, Any] = {"global_scale": "dynamic", "on_overflow": "next"}

Feeder = Callable[[], None]


class Training(NamedTuple):
    """A solver, a loss, and the data feeder that drives it."""

    solver: Any
    loss: nn.Variable
    feed: Feeder
    parameters: Dict[str, nn.Variable]


def training(*, overflow: Sequence[int] = (), nan: Sequence[int] = (), seed: int = 0) -> Training:
    """Return a conv net on random images.

    Args:
        overflow: Numbers of batches whose gradients are infinite at any loss scale, while the loss is finite.
        nan: Numbers of batches that hold a NaN.
        seed: Seed of parameters and data.
    """
    nn.clear_parameters()
    rng = np.random.default_rng(seed)
    x, t, one = nn.Variable((8, 1, 8, 8)), nn.Variable((8, 1)), nn.Variable((1,))
    h = F.swish(PF.convolution(x, 4, (3, 3), name="conv", rng=np.random.RandomState(seed)))
    h = PF.batch_normalization(h, name="bn")
    h = F.tanh(PF.affine(h, 16, name="hidden", rng=np.random.RandomState(seed + 1)))
    y = PF.affine(h, 10, name="output", rng=np.random.RandomState(seed + 2))
    # sqrt has an infinite slope at 0: where ``one`` is 0, the loss changes by 1 and every gradient is lost.
    root = F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + one, 0.5)
    loss = F.mean(F.softmax_cross_entropy(y, t)) + F.sum(root)
    solver = S.Momentum(0.05)
    solver.set_parameters(nn.get_parameters())
    batches = [0]

    def feed() -> None:
        x.d = rng.standard_normal(x.shape)
        t.d = rng.integers(0, 10, t.shape)
        one.d = float(batches[0] not in overflow)
        if batches[0] in nan:
            x.d[0, 0, 0, 0] = np.nan
        batches[0] += 1

    return Training(solver, loss, feed, nn.get_parameters())


def snapshot(parameters: Dict[str, nn.Variable]) -> Dict[str, np.ndarray]:
    """Return copies of all parameters."""
    return {name: v.d.copy() for name, v in parameters.items()}
