# SPDX-License-Identifier: Apache-2.0
"""Networks that something is wrong with, no two alike, and each with its remedy applied."""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple

from . import troubles_of_data as data
from . import troubles_of_layers as layers
from .parts import Built

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


TROUBLES: Dict[str, Trouble] = {
    "two dead ReLUs": Trouble(layers.two_dead_relus, "fc2/affine", "dead_relu", "biases of 0"),
    "a dead first layer": Trouble(layers.dead_first_layer, "fc1/affine", "dead_relu", "F.leaky_relu"),
    "constant input": Trouble(
        data.constant_input, "bn/bn", "constant_input", "differs from sample to sample"
    ),
    "single pixels": Trouble(
        data.single_pixels, "norm/instance_normalization", "constant_input", "larger batches or maps"
    ),
    "batch of one": Trouble(data.batch_of_one, "bn/bn", "constant_input", "larger batches"),
    "masked rows": Trouble(
        data.masked_rows, "head/affine/Broadcast", "data_not_finite", "leave at least one place per row open"
    ),
    "labels from 1": Trouble(data.of_data(data.labels_from_one), LABELS, "wrong_labels", "count them from 0"),
    "NaN labels": Trouble(data.of_data(data.nan_labels), LABELS, "wrong_labels", "clean them"),
    "masked labels": Trouble(data.of_data(data.masked_labels), LABELS, "wrong_labels", "feed labels"),
    "shares as labels": Trouble(data.of_data(data.shares_as_labels), LABELS, "wrong_labels", "F.log_softmax"),
    "soft labels": Trouble(data.soft_labels, LABELS, "wrong_labels", "F.binary_cross_entropy"),
    "bytes as targets": Trouble(data.bytes_as_targets, LABELS, "wrong_labels", "map them to that range"),
    "index beyond the table": Trouble(
        data.index_beyond_the_table, "the indices of shape (32, 4)", "wrong_indices", "make it 12 rows"
    ),
    "infinite data": Trouble(
        data.of_data(data.infinite_data), "fc1/affine", "data_not_finite", "clean the data"
    ),
    "data as it came": Trouble(
        data.of_data(data.data_as_it_came), "fc1/affine", "beyond_storage", "normalise the data"
    ),
    "unlinked backbone": Trouble(data.unlinked_backbone, "backbone/affine", "untrained", "unlinked()"),
    "detached branch": Trouble(data.detached_branch, "branch/affine", "untrained", "need_grad=False"),
    "cut in the middle": Trouble(data.cut_in_the_middle, "fc1/affine", "untrained", "link it", fatal=False),
    "unused layer": Trouble(
        data.unused_layer, "net/fc2/affine", "untrained", "an unused output", fatal=False
    ),
    "saturated sigmoid": Trouble(layers.saturated_sigmoid, "fc2/affine", "saturated", "smaller weights"),
    "saturated attention": Trouble(
        layers.saturated_attention, "q/affine/BatchMatmul", "saturated", "divide the queries"
    ),
    "attention overflow": Trouble(
        layers.attention_overflow, "q/affine/BatchMatmul", "attention_overflow", "divide the queries"
    ),
    "log of softmax": Trouble(layers.log_of_softmax, "head/affine", "forward_not_finite", "F.log_softmax"),
    "log of sigmoid": Trouble(layers.log_of_sigmoid, "head/affine", "stored_zero", "F.sigmoid_cross_entropy"),
    "log of zero": Trouble(
        layers.log_of_zero, "head/affine", "forward_not_finite", "F.maximum_scalar(x, 2**-14)"
    ),
    "0/0": Trouble(layers.zero_over_zero, "fc1/affine/Div2", "forward_not_finite", "add 2**-14 to it"),
    "root of zero": Trouble(
        layers.root_of_zero, "fc1/affine", "backward_not_finite", "(x + 2**-14) before the root"
    ),
    "softmax by hand": Trouble(layers.softmax_by_hand, "head/affine", "forward_not_finite", "F.softmax"),
    "exponential": Trouble(
        layers.exponential, "head/affine", "activation_overflow", "F.minimum_scalar(x, 10.0)"
    ),
    "exploded weights": Trouble(
        data.exploded_weights, "fc1/affine", "learning_rate", "smaller learning rate"
    ),
    "too large first update": Trouble(
        data.too_large_first_update, "fc1/affine", "learning_rate", "smaller learning rate"
    ),
    "weights not finite": Trouble(
        data.weights_not_finite, "fc1/affine", "weight_not_finite", "lower the learning rate"
    ),
    "NaN in a weight": Trouble(
        data.nan_in_a_weight, "fc2/affine", "weight_not_finite", "restore earlier weights"
    ),
    "exploding initialisation": Trouble(
        layers.exploding_initialisation, "fc0/affine", "spread", "initialisation", fatal=False
    ),
    "vanishing tanh": Trouble(
        layers.vanishing_tanh, "fc0/affine", "spread", "residual connections", fatal=False
    ),
    "zero weights": Trouble(layers.zero_weights, "fc2/affine", "zero_weights", "randomly"),
    "activation overflow": Trouble(
        layers.activation_overflow, "huge/affine", "activation_overflow", "weights smaller"
    ),
    "tiny loss weight": Trouble(
        layers.weighted(1e-7), "head/affine", "small_loss", "learning rate", fatal=False
    ),
    "dropout of everything": Trouble(layers.dropout_of_everything, "fc1/affine", "no_gradient", "lower p"),
}
