# SPDX-License-Identifier: Apache-2.0
"""Networks for timing training on a CPU. Nothing here imports the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Callable, List, NamedTuple, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "samples"))
from common.resnet import cifar_resnet
from networks import NETWORKS


class Case(NamedTuple):
    """A network to train."""

    title: str
    shape: Sequence[int]
    build: Callable[[nn.Variable], nn.Variable]
    times: int = 1

    def loss(self) -> Callable[[], nn.Variable]:
        """Make a builder of the loss on one random batch, with parameters of the current scope."""
        random = np.random.default_rng(0)
        x = nn.Variable.from_numpy_array(random.standard_normal(self.shape).astype(np.float32))
        t = nn.Variable.from_numpy_array(random.integers(0, 10, (self.shape[0], 1)))
        return lambda: F.mean(F.softmax_cross_entropy(self.build(x), t))


def demo(name: str) -> Case:
    """Make a network of samples/demo.py."""
    network = NETWORKS[name]
    shape = (network.batch_size, 1, 8, 8)
    return Case(f"demo's {name}, 8x8, batch {network.batch_size}", shape, network.build, times=8)


def chain(h: nn.Variable, layers: int, width: int) -> nn.Variable:
    """Build the loss of a chain of affine layers and tanh."""
    for index in range(layers):
        h = F.tanh(PF.affine(h, width, name=f"layer{index}"))
    return F.mean(h**2)


def stochastic_depth(h: nn.Variable, kept: Sequence[bool], width: int) -> nn.Variable:
    """Build the loss of a residual network with only these blocks."""
    h = PF.affine(h, width, name="first")
    for block in [number for number, one in enumerate(kept) if one]:
        with nn.parameter_scope(f"block{block}"):
            h = F.relu(h + PF.affine(F.relu(PF.affine(h, width, name="a")), width, name="b"))
    return F.mean(PF.affine(h, 4, name="out") ** 2)


def messages(h: nn.Variable, edges: Sequence[Sequence[int]], nodes: int, width: int) -> nn.Variable:
    """Build the loss of a graph network: each edge connects two nodes, with the weight of its kind."""
    states = F.split(F.reshape(PF.affine(h, nodes * width, name="first"), (-1, nodes, width)), axis=1)
    for _ in range(3):
        arriving: List[List[nn.Variable]] = [[] for _ in states]
        for source, target, kind in edges:
            arriving[target].append(PF.affine(states[source], width, name=f"edge{kind}"))
        states = [F.tanh(F.add_n(state, *found)) for state, found in zip(states, arriving)]
    return F.mean(PF.affine(F.add_n(*states), 4, name="out") ** 2)


def lenet(x: nn.Variable) -> nn.Variable:
    h = F.relu(F.max_pooling(PF.convolution(x, 16, (5, 5), name="conv1"), (2, 2)))
    h = F.relu(F.max_pooling(PF.convolution(h, 32, (5, 5), name="conv2"), (2, 2)))
    h = F.relu(PF.affine(h, 120, name="fc1"))
    return PF.affine(F.relu(PF.affine(h, 84, name="fc2")), 10, name="fc3")


def mlp(x: nn.Variable) -> nn.Variable:
    for index in range(3):
        x = F.relu(PF.affine(x, 1024, name=f"fc{index}"))
    return PF.affine(x, 10, name="out")


def resnet20(x: nn.Variable) -> nn.Variable:
    return cifar_resnet(x, 3, (16, 32, 64), training=True)


CASES = {
    "lenet": Case("LeNet-style conv net, 28x28, batch 128", (128, 1, 28, 28), lenet),
    "mlp": Case("MLP 3x1024, batch 128", (128, 784), mlp),
    "resnet20": Case("CIFAR ResNet-20, 32x32, batch 32", (32, 3, 32, 32), resnet20),
    "demo-lenet": demo("lenet"),
    "demo-mlp": demo("mlp"),
}
