# SPDX-License-Identifier: Apache-2.0
"""Layers that something is wrong with; with True the remedy is applied."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF

from nnabla_adaloss import Way

from .nets import Built, affine, classifier, cross_entropy, feeder, inputs, one_hot, trouble


@trouble("fc2/affine", "dead_relu", "biases of 0")
def two_dead_relus(mended: bool) -> Built:
    bias = 0.0 if mended else -100.0

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "fc1"))
        h = F.relu(affine(h, 16, "fc2", bias=bias))
        return F.relu(affine(h, 16, "fc3", bias=bias))

    return classifier(layers)


@trouble("fc1/affine", "dead_relu", "F.leaky_relu")
def dead_first_layer(mended: bool) -> Built:
    activation = F.leaky_relu if mended else F.relu
    return classifier(lambda x: activation(affine(x, 16, "fc1", bias=-9.0)))


@trouble("fc2/affine", "saturated", "smaller weights")
def saturated_sigmoid(mended: bool) -> Built:
    factor = 1.0 if mended else 300.0

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.sigmoid(affine(x, 16, "fc1"))
        return F.sigmoid(affine(F.sigmoid(affine(h, 16, "fc2", factor)), 16, "fc3", factor))

    return classifier(layers)


@trouble("q/affine/BatchMatmul", "saturated", "divide the queries")
def saturated_attention(mended: bool) -> Built:
    factor = 1.0 if mended else 30.0

    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = (
            F.reshape(affine(x, 32, name, factor if name != "v" else 1.0), (32, 4, 8)) for name in "qkv"
        )
        return F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v)

    return classifier(layers)


@trouble("scores/affine", "constant_softmax", "choose the axis")
def softmax_over_an_axis_of_one(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        places = F.reshape(affine(x, 32, "places"), (32, 4, 8))
        scores = F.reshape(affine(F.tanh(affine(x, 8, "fc")), 4, "scores"), (32, 4, 1))
        return F.sum(F.softmax(scores, axis=1 if mended else 2) * places, axis=1)

    return classifier(layers)


@trouble("gate/affine", "no_backward", "a function with a gradient")
def hard_gate(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        y = affine(x, 16, "gate")
        return F.tanh(affine(x, 16, "fc1")) * (F.sigmoid(y) if mended else F.greater_scalar(y, 0.0))

    return classifier(layers)


@trouble("gates/affine", "saturated", "normalise before it")
def saturated_recurrence(mended: bool) -> Built:
    """Every step reads what is too large, and saturates both gates."""

    def layers(x: nn.Variable) -> nn.Variable:
        h, steps = F.constant(0.0, (32, 16)), F.split(F.reshape(x, (32, 8, 2)), axis=1)
        for step in steps:
            joined = F.concatenate(step if mended else step * 3e3, h, axis=1)
            gates = affine(joined, 32, "gates")
            h = F.sigmoid(gates[:, :16]) * F.tanh(gates[:, 16:])
        return h

    return classifier(layers)


@trouble("fc1/affine", "backward_not_finite", "before the root")
def root_beside_another_use(mended: bool) -> Built:
    """What else reads the same hands on what the root has spoiled."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "fc1"))
        distance = F.sum((h - h * 1.0) ** 2, axis=1, keepdims=True)
        root = (distance + 2**-14 if mended else distance) ** 0.5
        return F.broadcast(root, h.shape) + affine(h, 16, "fc2")

    return classifier(layers)


@trouble("q/affine/BatchMatmul", "attention_overflow", "divide the queries")
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


@trouble("head/affine", "forward_not_finite", "F.log_softmax")
def log_of_softmax(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 5, "head", factor=120.0)
    log = F.log_softmax(y) if mended else F.log(F.softmax(y))
    return -F.mean(F.sum(one_hot(t) * log, axis=1)), feeder(x, t)


@trouble("head/affine", "stored_zero", "F.sigmoid_cross_entropy")
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


@trouble("head/affine", "forward_not_finite", "F.maximum_scalar(x, 2**-14)")
def log_of_zero(mended: bool) -> Built:
    x, t = inputs()
    y = F.relu(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"))
    log = F.log(F.maximum_scalar(y, 2**-14) if mended else y)
    return -F.mean(one_hot(t) * log), feeder(x, t)


@trouble("fc1/affine/Div2", "forward_not_finite", "add 2**-14 to it")
def zero_over_zero(mended: bool) -> Built:
    """Columns of a batch over their standard deviation; one column is the same everywhere."""
    x, t = inputs()
    away = x - F.mean(x, axis=0, keepdims=True)
    std = F.mean(away**2, axis=0, keepdims=True) ** 0.5
    h = away / (std + 2**-14 if mended else std)

    def spoil() -> None:
        x.d[:, 3] = 1.0

    return cross_entropy(affine(F.tanh(affine(h, 16, "fc1")), 5, "head"), t), feeder(x, t, spoil)


@trouble("fc1/affine", "backward_not_finite", "(x + 2**-14) before the root")
def root_of_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(affine(x, 16, "fc1"))
        return F.tanh((h + 2**-14 if mended else h) ** 0.5)

    return classifier(layers)


@trouble("head/affine", "forward_not_finite", "F.softmax")
def softmax_by_hand(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 5, "head", factor=60.0)
    e = F.exp(y)
    p = F.softmax(y) if mended else e / F.sum(e, axis=1, keepdims=True)
    return F.mean((p - one_hot(t)) ** 2), feeder(x, t)


@trouble("head/affine", "activation_overflow", "F.minimum_scalar(x, 10.0)")
def exponential(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 1, "head", factor=8.0)
    y = F.minimum_scalar(y, 10.0) if mended else y
    return F.mean(F.exp(y) - t * y), feeder(x, t)


@trouble("fc0/affine", "spread", "initialisation", needs=Way.ONE)
def exploding_initialisation(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(5):
            x = F.sin(affine(x, 16, f"fc{index}", 1.0 if mended else 40.0))
        return x

    return classifier(layers)


@trouble("fc0/affine", "spread", "residual connections", needs=Way.ONE)
def vanishing_tanh(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(5):
            h = F.tanh(affine(x, 16, f"fc{index}", 0.02))
            x = x + h if mended else h
        return x

    return classifier(layers)


@trouble("fc2/affine", "zero_weights", "randomly")
def zero_weights(mended: bool) -> Built:
    factor = 1.0 if mended else 0.0

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "fc1"))
        return F.tanh(affine(F.tanh(affine(h, 16, "fc2", factor)), 16, "fc3", factor))

    return classifier(layers)


@trouble("huge/affine", "activation_overflow", "weights smaller")
def activation_overflow(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(F.tanh(affine(x, 16, "fc1")), 16, "huge", 1.0 if mended else 5e4)
        return F.tanh(PF.batch_normalization(h, name="bn"))

    return classifier(layers)


@trouble("head/affine", "small_loss", "learning rate", needs=Way.ONE)
def tiny_loss_weight(mended: bool) -> Built:
    loss, feed = classifier(lambda x: F.tanh(affine(x, 16, "fc1")))
    return loss if mended else loss * 1e-7, feed


@trouble("quiet_head/affine", "small_loss", "be measured", needs=Way.ADAPTIVE)
def branches_apart(mended: bool) -> Built:
    """Two heads on one trunk; what one of them adds to the loss counts 2**-34 times as much."""
    (x, t), u = inputs(), nn.Variable((32, 1))
    h = F.relu(affine(x, 32, "trunk"))
    loud = cross_entropy(affine(h, 5, "loud_head"), t)
    quiet = cross_entropy(affine(F.relu(affine(h, 32, "quiet_fc")), 5, "quiet_head"), u)

    def other_labels() -> None:
        u.d = (t.d + 1) % 5

    return loud + quiet if mended else loud * 2.0**10 + quiet * 2.0**-24, feeder(x, t, other_labels)


@trouble("fc0/affine", "spread", "residual connections", needs=Way.ADAPTIVE)
def vanishing_sigmoid(mended: bool) -> Built:
    """Sixteen sigmoid layers, each of which shrinks gradients some ten times."""

    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(16):
            h = F.sigmoid(affine(x, 32, f"fc{index}", 0.7))
            x = x + h if mended and index else h
        return x

    return classifier(layers)


@trouble("small/affine", "shrinking", "take the factor out", needs=Way.NONE, beside=["exploding"])
def scaled_layer(mended: bool) -> Built:
    """One layer's output is multiplied by 1e-6; a normalization brings it back."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(F.relu(affine(x, 16, "fc1")), 16, "small") * (1.0 if mended else 1e-6)
        return F.tanh(PF.batch_normalization(h, name="bn", eps=1e-20))

    return classifier(layers)


@trouble("quiet/affine", "shrinking", "larger weights", needs=Way.ONE)
def quiet_layer(mended: bool) -> Built:
    factor = 1.0 if mended else 1e-6
    return classifier(lambda x: affine(F.relu(affine(x, 16, "fc1")), 16, "quiet", factor))


@trouble("loud/affine", "exploding", "smaller weights", needs=Way.NONE)
def exploding_layer(mended: bool) -> Built:
    factor = 1.0 if mended else 1e3
    return classifier(lambda x: F.tanh(affine(F.relu(affine(x, 16, "fc1")), 16, "loud", factor) / factor))


@trouble("fc1/affine", "no_gradient", "lower p")
def dropout_of_everything(mended: bool) -> Built:
    return classifier(lambda x: F.dropout(F.tanh(affine(x, 16, "fc1")), 0.5 if mended else 0.99999))


@trouble("head/affine", "applied_twice", "remove F.softmax", needs=Way.NONE)
def softmax_twice(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 5, "head")
    return cross_entropy(y if mended else F.softmax(y), t), feeder(x, t)


@trouble("head/affine", "applied_twice", "remove F.sigmoid", needs=Way.NONE)
def sigmoid_twice(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 1, "head")
    t = F.minimum_scalar(t, 1.0)
    return F.mean(F.sigmoid_cross_entropy(y if mended else F.sigmoid(y), t)), feeder(x, t.parent.inputs[0])


@trouble("head/affine", "applied_twice", "use F.softmax_cross_entropy")
def logarithm_twice(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 5, "head")
    loss = cross_entropy(y, t) if mended else F.mean(F.categorical_cross_entropy(F.log_softmax(y), t))
    return loss, feeder(x, t)


@trouble("head/affine", "rounding_noise", "check what the loss computes")
def mean_of_a_softmax(mended: bool) -> Built:
    x, t = inputs()
    p = F.softmax(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"))
    return F.mean(p**2 if mended else p), feeder(x, t)


@trouble("fc2/affine", "rounding_noise", "check what the loss computes", needs=Way.NONE)
def mean_of_a_normalization(mended: bool) -> Built:
    """The normalization's own bias learns, and nothing before it."""
    x, t = inputs()
    h = PF.batch_normalization(affine(F.tanh(affine(x, 16, "fc1")), 5, "fc2"), name="bn")
    return F.mean(F.tanh(h) if mended else h), feeder(x, t)
