# SPDX-License-Identifier: Apache-2.0
"""Networks that nothing is wrong with, some of which leave parameters untrained on purpose."""

from __future__ import annotations

from typing import Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from sklearn.datasets import load_digits

from .nets import Built, affine, classifier, cross_entropy, feeder, inputs, updater_of


def conv(x: nn.Variable, name: str) -> nn.Variable:
    h = PF.convolution(x, 8, (3, 3), pad=(1, 1), name=name, rng=np.random.RandomState(len(name)))
    return PF.batch_normalization(h, name=f"{name}_bn")


def on_images(layers: Callable[[nn.Variable], nn.Variable]) -> Built:
    x, t = nn.Variable((8, 3, 8, 8)), nn.Variable((8, 1))
    return cross_entropy(affine(layers(x), 5, "head"), t), feeder(x, t)


def mlp() -> Built:
    return classifier(lambda x: F.relu(affine(F.tanh(affine(x, 16, "fc1")), 16, "fc2")))


def convolutions() -> Built:
    return on_images(lambda x: F.max_pooling(F.relu(conv(F.relu(conv(x, "conv1")), "conv02")), (2, 2)))


def digits() -> Built:
    """LeNet on images that are no noise."""
    data = load_digits()
    x, t = nn.Variable((32, 1, 8, 8)), nn.Variable((32, 1))
    h = F.relu(F.max_pooling(conv(x, "conv1"), (2, 2)))
    h = F.relu(F.max_pooling(conv(h, "conv02"), (2, 2)))
    rng = np.random.default_rng(0)

    def feed() -> None:
        chosen = rng.integers(0, len(data.images), 32)
        x.d, t.d = data.images[chosen, None] / 8.0 - 1.0, data.target[chosen, None]

    return cross_entropy(affine(F.relu(affine(h, 64, "fc1")), 10, "fc2"), t), feed


def resnet() -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(conv(x, "stem"))
        h = F.relu(h + conv(F.relu(conv(h, "block1/a")), "block1/bb"))
        return F.average_pooling(h, (8, 8))

    return on_images(layers)


def zero_initialised_residual() -> Built:
    """The last layer of a branch starts from 0, as residual nets and language models are often started."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "fc1"))
        return h + affine(F.tanh(affine(h, 16, "inner")), 16, "out", factor=0.0)

    return classifier(layers)


def lstm() -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = c = nn.Variable.from_numpy_array(np.zeros((1, 1, 32, 8), np.float32))
        steps = F.transpose(F.reshape(x, (32, 4, 4)), (1, 0, 2))
        return PF.lstm(steps, h, c, num_layers=1, name="lstm")[0][3]

    return classifier(layers)


def transformer_block() -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.reshape(x, (8, 4, 16))
        q, k, v = (PF.affine(h, 16, base_axis=2, name=name) for name in "qkv")
        mask = nn.Variable.from_numpy_array(np.triu(np.full((4, 4), -1e4, np.float32), 1)[None])
        scores = F.batch_matmul(q * 0.25, k, transpose_b=True)
        attended = F.batch_matmul(F.softmax(scores + F.broadcast(mask, scores.shape)), v)
        h = PF.layer_normalization(h + attended, batch_axis=(0, 1), name="ln")
        return F.reshape(h + PF.affine(F.gelu(PF.affine(h, 32, 2, name="up")), 16, 2, name="down"), (32, 16))

    return classifier(layers)


def adversarial() -> Tuple[nn.Variable, Callable[[], None]]:
    """A discriminator's loss on data and on what a generator makes, whose gradient is cut off."""
    x, z = inputs()[0], nn.Variable((32, 4))
    with nn.parameter_scope("generator"):
        fake = affine(F.relu(affine(z, 16, "fc1")), 16, "fc2")
    with nn.parameter_scope("discriminator"):
        fake.need_grad = False
        on_real, on_fake = (affine(F.leaky_relu(affine(v, 16, "fc1")), 1, "fc2") for v in (0.5 * x, fake))
    ones, zeros = F.constant(1, on_real.shape), F.constant(0, on_fake.shape)
    loss = F.mean(F.sigmoid_cross_entropy(on_real, ones) + F.sigmoid_cross_entropy(on_fake, zeros))
    return loss, feeder(x, z)


def discriminator() -> Built:
    return adversarial()


def trained_discriminator() -> Built:
    loss, feed = adversarial()
    with nn.parameter_scope("discriminator"):
        own = nn.get_parameters()
    return updater_of(loss, feed, S.Adam(1e-3), own), None


def fixed_features() -> Built:
    """A frozen extractor, by `fix_parameters`."""
    x, t = inputs()
    h = F.tanh(PF.affine(x, 16, name="features", fix_parameters=True))
    return cross_entropy(affine(h, 5, "head"), t), feeder(x, t)


def frozen_features() -> Built:
    """A frozen extractor, whose parameters need no gradient; the solver has them all the same."""
    x, t = inputs()
    h = F.tanh(affine(x, 16, "features"))
    loss = cross_entropy(affine(h, 5, "head"), t)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    for name, v in nn.get_parameters().items():
        v.need_grad = not name.startswith("features/")
    for v in h.parent.inputs[0].parent.inputs:
        v.need_grad = False
    return updater_of(loss, feeder(x, t), solver, solver.get_parameters()), None


def unlinked_features() -> Built:
    """A frozen extractor, cut off by `unlinked`; the solver has the head alone."""
    x, t = inputs()
    h = F.tanh(affine(x, 16, "features")).get_unlinked_variable(need_grad=False)
    loss = cross_entropy(affine(h, 5, "head"), t)
    head = {name: v for name, v in nn.get_parameters().items() if name.startswith("head/")}
    return updater_of(loss, feeder(x, t, lambda: None), S.Sgd(0.1), head), None


NETWORKS: List[Callable[[], Built]] = [
    mlp,
    convolutions,
    digits,
    resnet,
    zero_initialised_residual,
    lstm,
    transformer_block,
    discriminator,
    trained_discriminator,
    fixed_features,
    frozen_features,
    unlinked_features,
]
HEALTHY: Dict[str, Callable[[], Built]] = {network.__name__: network for network in NETWORKS}
