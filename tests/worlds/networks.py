# SPDX-License-Identifier: Apache-2.0
"""Small networks."""

from __future__ import annotations

from typing import Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np


def gate(y: nn.Variable, one: nn.Variable) -> nn.Variable:
    """A term of a loss: where `one` is 0, every gradient of `y` is lost, while forward is finite."""
    # sqrt has an infinite slope at 0.
    return F.sum(F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + one, 0.5))


def two_layers(x: nn.Variable, hidden: int = 5, out: int = 2) -> nn.Variable:
    """The loss of a network with parameters that follow from nothing but the sizes."""
    h = F.tanh(PF.affine(x, hidden, name="a", rng=np.random.RandomState(1)))
    return F.mean(PF.affine(h, out, name="b", rng=np.random.RandomState(2)) ** 2)


def layers(*widths: int, names: Sequence[str] = (), batch: int = 4, width: int = 5) -> nn.Variable:
    """Layers of these widths with tanh on random numbers; the network is the only one that has parameters."""
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    h = nn.Variable.from_numpy_array(rng.randn(batch, width).astype(np.float32))
    for index, own in enumerate(widths):
        h = F.tanh(PF.affine(h, own, name=names[index] if names else f"layer{index}", rng=rng))
    return h


def mlp(weight: float = 1.0, *, batch: int = 4) -> nn.Variable:
    """The loss of three layers, a, b and c."""
    return F.mean(layers(6, 6, 6, names="abc", batch=batch) ** 2) * weight
