# SPDX-License-Identifier: Apache-2.0
"""Networks that something is wrong with, no two alike, and each with its remedy applied."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import AdaptiveLossScalingUpdater

Built = Tuple[Any, Optional[Callable[[], None]]]
LABELS = "the labels of shape (32, 1)"


class Trouble(NamedTuple):
    """A network that something is wrong with.

    Attributes:
        build: makes its loss, or an updater, and its feeder; with True the remedy is applied.
        layer: the layer, or the labels, that are to be named first.
        kind: what is wrong.
        remedy: words of the remedy.
        fatal: whether no loss scale mends it.
    """

    build: Callable[[bool], Built]
    layer: str
    kind: str
    remedy: str
    fatal: bool = True


def affine(x: nn.Variable, size: int, name: str, factor: float = 1.0, bias: float = 0.0) -> nn.Variable:
    """Weights of a standard deviation of `factor` over the root of the fan-in."""
    std = factor / np.sqrt(np.prod(x.shape[1:]))
    rng = np.random.RandomState(sum(map(ord, name)))
    weights = I.NormalInitializer(std, rng=rng)
    return PF.affine(x, size, name=name, w_init=weights, b_init=I.ConstantInitializer(bias))


def inputs() -> Tuple[nn.Variable, nn.Variable]:
    return nn.Variable((32, 16)), nn.Variable((32, 1))


def feeder(x: nn.Variable, t: nn.Variable, spoil: Callable[[], None] = lambda: None) -> Callable[[], None]:
    rng = np.random.default_rng(0)

    def feed() -> None:
        x.d, t.d = rng.standard_normal(x.shape), rng.integers(0, 5, t.shape)
        spoil()

    return feed


def cross_entropy(y: nn.Variable, t: nn.Variable) -> nn.Variable:
    return F.mean(F.softmax_cross_entropy(y, t))


def classifier(layers: Callable[[nn.Variable], nn.Variable]) -> Built:
    x, t = inputs()
    return cross_entropy(affine(layers(x), 5, "head"), t), feeder(x, t)


def of_data(spoil: Callable[[nn.Variable, nn.Variable], None]) -> Callable[[bool], Built]:
    """A sound network whose data is spoiled."""

    def build(mended: bool) -> Built:
        x, t = inputs()
        loss = cross_entropy(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"), t)
        return loss, feeder(x, t) if mended else feeder(x, t, lambda: spoil(x, t))

    return build


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


def constant_input(mended: bool) -> Built:
    x, t = inputs()
    h = F.relu(PF.batch_normalization(affine(x, 16, "fc1"), name="bn"))

    def spoil() -> None:
        if not mended:
            x.d = np.ones(x.shape)

    return cross_entropy(affine(h, 5, "head"), t), feeder(x, t, spoil)


def single_pixels(mended: bool) -> Built:
    size = 4 if mended else 1

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.reshape(affine(x, 8 * size * size, "fc1"), (32, 8, size, size))
        return F.tanh(PF.instance_normalization(h, name="norm"))

    return classifier(layers)


def labels_from_one(x: nn.Variable, t: nn.Variable) -> None:
    t.d = t.d + 1


def nan_labels(x: nn.Variable, t: nn.Variable) -> None:
    t.d = np.where(np.arange(32)[:, None] == 3, np.nan, t.d)


def masked_labels(x: nn.Variable, t: nn.Variable) -> None:
    t.d = -1


def shares_as_labels(x: nn.Variable, t: nn.Variable) -> None:
    t.d = t.d / 5.0


def infinite_data(x: nn.Variable, t: nn.Variable) -> None:
    x.d[1, 2] = np.inf


def data_as_it_came(x: nn.Variable, t: nn.Variable) -> None:
    x.d = x.d * 1e6


def soft_labels(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 1, "head")
    loss = F.binary_cross_entropy(F.sigmoid(y), t) if mended else F.sigmoid_cross_entropy(y, t)

    def spoil() -> None:
        t.d = 0.1 + 0.2 * t.d

    return F.mean(loss), feeder(x, t, spoil)


def bytes_as_targets(mended: bool) -> Built:
    x, t = inputs()
    y = F.sigmoid(affine(F.tanh(affine(x, 16, "fc1")), 1, "head"))

    def spoil() -> None:
        t.d = t.d / 4.0 if mended else t.d * 63.0

    return F.mean(F.binary_cross_entropy(y, t)), feeder(x, t, spoil)


def index_beyond_the_table(mended: bool) -> Built:
    x, t = nn.Variable((32, 4)), nn.Variable((32, 1))
    h = F.reshape(PF.embed(x, 12 if mended else 10, 8, name="embed"), (32, 32))
    rng = np.random.default_rng(0)

    def feed() -> None:
        x.d, t.d = rng.integers(0, 12, x.shape), rng.integers(0, 5, t.shape)

    return cross_entropy(affine(h, 5, "head"), t), feed


def updater_of(loss: nn.Variable, feed: Any, solver: Any, parameters: Any = None) -> Any:
    solver.set_parameters(nn.get_parameters() if parameters is None else parameters)
    return AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16")


def unlinked_backbone(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "backbone"))
    h = h if mended else h.get_unlinked_variable()
    loss = cross_entropy(affine(F.tanh(affine(h, 16, "neck")), 5, "head"), t)
    return updater_of(loss, feeder(x, t), S.Sgd(0.1)), None


def detached_branch(mended: bool) -> Built:
    x, t = inputs()
    trunk = F.tanh(affine(x, 16, "trunk"))
    branch = F.tanh(affine(trunk, 16, "branch"))
    branch.need_grad = mended
    loss = cross_entropy(affine(trunk + branch, 5, "head"), t)
    return updater_of(loss, feeder(x, t), S.Sgd(0.1)), None


def cut_in_the_middle(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "fc1"))
    h.need_grad = mended
    return cross_entropy(affine(F.tanh(affine(h, 16, "fc2")), 5, "head"), t), feeder(x, t)


def unused_layer(mended: bool) -> Built:
    x, t = inputs()
    with nn.parameter_scope("net"):
        h = F.tanh(affine(x, 16, "fc1"))
        deeper = F.tanh(affine(h, 16, "fc2"))
        loss = cross_entropy(affine(deeper if mended else h, 5, "head"), t)
    return loss, feeder(x, t)


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


def one_hot(t: nn.Variable) -> nn.Variable:
    return F.one_hot(t, (5,))


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


def trained(rate: float) -> Built:
    """After two updates in fp32."""
    x, t = inputs()
    loss = cross_entropy(affine(F.relu(affine(x, 16, "fc1")), 5, "head"), t)
    solver, feed = S.Sgd(rate), feeder(x, t)
    solver.set_parameters(nn.get_parameters())
    for _ in range(2):
        feed()
        loss.forward()
        solver.zero_grad()
        loss.backward()
        solver.update()
    return updater_of(loss, feed, solver), None


def exploded_weights(mended: bool) -> Built:
    return trained(0.1 if mended else 1e3)


def too_large_first_update(mended: bool) -> Built:
    x, t = inputs()
    loss = cross_entropy(affine(F.relu(affine(x, 16, "fc1")), 5, "head"), t)
    return updater_of(loss, feeder(x, t), S.Adam(1e-3 if mended else 3.0)), None


def weights_not_finite(mended: bool) -> Built:
    return trained(0.1 if mended else 1e39)


def nan_in_a_weight(mended: bool) -> Built:
    built = classifier(lambda x: F.tanh(affine(F.tanh(affine(x, 16, "fc1")), 16, "fc2")))
    if not mended:
        nn.get_parameters()["fc2/affine/W"].d[3, 4] = np.nan
    return built


def exploding_initialisation(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(8):
            x = F.sin(affine(x, 16, f"fc{index}", 1.0 if mended else 20.0))
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


TROUBLES: Dict[str, Trouble] = {
    "two dead ReLUs": Trouble(two_dead_relus, "fc2/affine", "dead_relu", "biases of 0"),
    "a dead first layer": Trouble(dead_first_layer, "fc1/affine", "dead_relu", "F.leaky_relu"),
    "constant input": Trouble(constant_input, "bn/bn", "constant_input", "differs from sample to sample"),
    "single pixels": Trouble(
        single_pixels, "norm/instance_normalization", "constant_input", "larger batches or maps"
    ),
    "labels from 1": Trouble(of_data(labels_from_one), LABELS, "wrong_labels", "count them from 0"),
    "NaN labels": Trouble(of_data(nan_labels), LABELS, "wrong_labels", "clean them"),
    "masked labels": Trouble(of_data(masked_labels), LABELS, "wrong_labels", "feed labels"),
    "shares as labels": Trouble(of_data(shares_as_labels), LABELS, "wrong_labels", "F.log_softmax"),
    "soft labels": Trouble(soft_labels, LABELS, "wrong_labels", "F.binary_cross_entropy"),
    "bytes as targets": Trouble(bytes_as_targets, LABELS, "wrong_labels", "map them to that range"),
    "index beyond the table": Trouble(
        index_beyond_the_table, "the indices of shape (32, 4)", "wrong_indices", "make it 12 rows"
    ),
    "infinite data": Trouble(of_data(infinite_data), "fc1/affine", "data_not_finite", "clean the data"),
    "data as it came": Trouble(
        of_data(data_as_it_came), "fc1/affine", "beyond_storage", "normalise the data"
    ),
    "unlinked backbone": Trouble(unlinked_backbone, "backbone/affine", "untrained", "unlinked()"),
    "detached branch": Trouble(detached_branch, "branch/affine", "untrained", "need_grad=False"),
    "cut in the middle": Trouble(cut_in_the_middle, "fc1/affine", "untrained", "link it", fatal=False),
    "unused layer": Trouble(unused_layer, "net/fc2/affine", "untrained", "that is not used", fatal=False),
    "saturated sigmoid": Trouble(saturated_sigmoid, "fc2/affine", "saturated", "smaller weights"),
    "saturated attention": Trouble(
        saturated_attention, "q/affine/BatchMatmul", "saturated", "divide the queries"
    ),
    "attention overflow": Trouble(
        attention_overflow, "q/affine/BatchMatmul", "attention_overflow", "divide the queries"
    ),
    "log of softmax": Trouble(log_of_softmax, "head/affine", "forward_not_finite", "F.log_softmax"),
    "log of sigmoid": Trouble(log_of_sigmoid, "head/affine", "stored_zero", "F.sigmoid_cross_entropy"),
    "log of zero": Trouble(log_of_zero, "head/affine", "forward_not_finite", "F.maximum_scalar(x, 2**-14)"),
    "0/0": Trouble(zero_over_zero, "fc1/affine/Div2", "forward_not_finite", "add 2**-14 to it"),
    "root of zero": Trouble(
        root_of_zero, "fc1/affine", "backward_not_finite", "(x + 2**-14) before the root"
    ),
    "softmax by hand": Trouble(softmax_by_hand, "head/affine", "forward_not_finite", "F.softmax"),
    "exponential": Trouble(exponential, "head/affine", "activation_overflow", "F.minimum_scalar(x, 10.0)"),
    "exploded weights": Trouble(exploded_weights, "fc1/affine", "learning_rate", "smaller learning rate"),
    "too large first update": Trouble(
        too_large_first_update, "fc1/affine", "learning_rate", "smaller learning rate"
    ),
    "weights not finite": Trouble(
        weights_not_finite, "fc1/affine", "weight_not_finite", "lower the learning rate"
    ),
    "NaN in a weight": Trouble(nan_in_a_weight, "fc2/affine", "weight_not_finite", "load weights"),
    "exploding initialisation": Trouble(
        exploding_initialisation, "fc0/affine", "spread", "initialisation", fatal=False
    ),
    "vanishing tanh": Trouble(vanishing_tanh, "fc0/affine", "spread", "residual connections", fatal=False),
    "zero weights": Trouble(zero_weights, "fc2/affine", "zero_weights", "at random"),
    "activation overflow": Trouble(
        activation_overflow, "huge/affine", "activation_overflow", "weights smaller"
    ),
    "tiny loss weight": Trouble(weighted(1e-7), "head/affine", "small_loss", "learning rate", fatal=False),
    "huge loss weight": Trouble(weighted(1e7), "head/affine", "large_loss", "learning rate"),
    "dropout of everything": Trouble(dropout_of_everything, "fc1/affine", "no_gradient", "lower p"),
}
