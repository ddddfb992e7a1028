# SPDX-License-Identifier: Apache-2.0
"""Layers that something is wrong with; with True the remedy is applied."""

from __future__ import annotations

from typing import Callable

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF

from .parts import Built, affine, classifier, cross_entropy, feeder, inputs, one_hot


def two_dead_relus(mended: bool) -> Built:
    bias = 0.0 if mended else -100.0

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "fc1"))
        h = F.relu(affine(h, 16, "fc2", bias=bias))
        return F.relu(affine(h, 16, "fc3", bias=bias))

    return classifier(layers)


def dead_first_layer(mended: bool) -> Built:
    activation = F.leaky_relu if mended else F.relu
    return classifier(lambda x: activation(affine(x, 16, "fc1", bias=-9.0)))


def saturated_sigmoid(mended: bool) -> Built:
    factor = 1.0 if mended else 300.0

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.sigmoid(affine(x, 16, "fc1"))
        return F.sigmoid(affine(F.sigmoid(affine(h, 16, "fc2", factor)), 16, "fc3", factor))

    return classifier(layers)


def saturated_attention(mended: bool) -> Built:
    factor = 1.0 if mended else 30.0

    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = (
            F.reshape(affine(x, 32, name, factor if name != "v" else 1.0), (32, 4, 8)) for name in "qkv"
        )
        return F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v)

    return classifier(layers)


def attention_overflow(mended: bool) -> Built:
    """Queries and keys of 200: their products reach 1e6, and are divided too late."""
    factor = 1.0 if mended else 200.0

    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = (
            F.reshape(affine(x, 32, name, factor if name != "v" else 1.0), (32, 4, 8)) for name in "qkv"
        )
        if mended:
            return F.batch_matmul(F.softmax(F.batch_matmul(q * 8**-0.5, k, transpose_b=True)), v)
        return F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True) * 8**-0.5), v)

    return classifier(layers)


def log_of_softmax(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 5, "head", factor=120.0)
    log = F.log_softmax(y) if mended else F.log(F.softmax(y))
    return -F.mean(F.sum(one_hot(t) * log, axis=1)), feeder(x, t)


def log_of_sigmoid(mended: bool) -> Built:
    """Probabilities of 1e-9: 0 in fp16, though not in fp32."""
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 1, "head", factor=6.0)
    if mended:
        loss = F.sigmoid_cross_entropy(y, F.minimum_scalar(t, 1.0))
    else:
        p = F.sigmoid(y)
        u = F.minimum_scalar(t, 1.0)
        loss = -(u * F.log(p) + (1.0 - u) * F.log(1.0 - p))
    return F.mean(loss), feeder(x, t)


def log_of_zero(mended: bool) -> Built:
    x, t = inputs()
    y = F.relu(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"))
    log = F.log(F.maximum_scalar(y, 2**-14) if mended else y)
    return -F.mean(one_hot(t) * log), feeder(x, t)


def zero_over_zero(mended: bool) -> Built:
    """Columns of a batch over their standard deviation; one column is the same everywhere."""
    x, t = inputs()
    away = x - F.mean(x, axis=0, keepdims=True)
    std = F.mean(away**2, axis=0, keepdims=True) ** 0.5
    h = away / (std + 2**-14 if mended else std)

    def spoil() -> None:
        x.d[:, 3] = 1.0

    return cross_entropy(affine(F.tanh(affine(h, 16, "fc1")), 5, "head"), t), feeder(x, t, spoil)


def root_of_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(affine(x, 16, "fc1"))
        return F.tanh((h + 2**-14 if mended else h) ** 0.5)

    return classifier(layers)


def softmax_by_hand(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 5, "head", factor=60.0)
    e = F.exp(y)
    p = F.softmax(y) if mended else e / F.sum(e, axis=1, keepdims=True)
    return F.mean((p - one_hot(t)) ** 2), feeder(x, t)


def exponential(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 1, "head", factor=8.0)
    y = F.minimum_scalar(y, 10.0) if mended else y
    return F.mean(F.exp(y) - t * y), feeder(x, t)


def exploding_initialisation(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(5):
            x = F.sin(affine(x, 16, f"fc{index}", 1.0 if mended else 40.0))
        return x

    return classifier(layers)


def vanishing_tanh(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(5):
            h = F.tanh(affine(x, 16, f"fc{index}", 0.02))
            x = x + h if mended else h
        return x

    return classifier(layers)


def zero_weights(mended: bool) -> Built:
    factor = 1.0 if mended else 0.0

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "fc1"))
        return F.tanh(affine(F.tanh(affine(h, 16, "fc2", factor)), 16, "fc3", factor))

    return classifier(layers)


def activation_overflow(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(F.tanh(affine(x, 16, "fc1")), 16, "huge", 1.0 if mended else 5e4)
        return F.tanh(PF.batch_normalization(h, name="bn"))

    return classifier(layers)


def weighted(weight: float) -> Callable[[bool], Built]:
    def build(mended: bool) -> Built:
        loss, feed = classifier(lambda x: F.tanh(affine(x, 16, "fc1")))
        return loss if mended else loss * weight, feed

    return build


def dropout_of_everything(mended: bool) -> Built:
    return classifier(lambda x: F.dropout(F.tanh(affine(x, 16, "fc1")), 0.5 if mended else 0.99999))
