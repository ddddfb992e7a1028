# SPDX-License-Identifier: Apache-2.0
"""Data, labels, parameters and solvers that something is wrong with; with True the remedy is applied."""

from __future__ import annotations

from typing import Any, Callable

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import Way

from .nets import Built, affine, classifier, cross_entropy, feeder, inputs, trouble, updater_of

LABELS = "the labels of shape (32, 1)"


def of_data(spoil: Callable[[nn.Variable, nn.Variable], None]) -> Callable[[bool], Built]:
    """A sound network whose data is spoiled."""

    def build(mended: bool) -> Built:
        x, t = inputs()
        loss = cross_entropy(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"), t)
        return loss, feeder(x, t) if mended else feeder(x, t, lambda: spoil(x, t))

    return build


@trouble("bn/bn", "constant_input", "differs from sample to sample")
def constant_input(mended: bool) -> Built:
    x, t = inputs()
    h = F.relu(PF.batch_normalization(affine(x, 16, "fc1"), name="bn"))

    def spoil() -> None:
        if not mended:
            x.d = np.ones(x.shape)

    return cross_entropy(affine(h, 5, "head"), t), feeder(x, t, spoil)


@trouble("norm/instance_normalization", "constant_input", "larger batches or maps")
def single_pixels(mended: bool) -> Built:
    size = 4 if mended else 1

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.reshape(affine(x, 8 * size * size, "fc1"), (32, 8, size, size))
        return F.tanh(PF.instance_normalization(h, name="norm"))

    return classifier(layers)


@trouble("bn/bn", "constant_input", "larger batches")
def batch_of_one(mended: bool) -> Built:
    size = 32 if mended else 1
    x, t = nn.Variable((size, 16)), nn.Variable((size, 1))
    h = F.tanh(PF.batch_normalization(affine(x, 16, "fc1"), name="bn"))
    return cross_entropy(affine(h, 5, "head"), t), feeder(x, t)


@trouble("q/affine/BatchMatmul", "closed_row", "leave at least one place per row open")
def masked_rows(mended: bool) -> Built:
    """An attention whose mask leaves nothing open."""
    x, t = inputs()
    mask = nn.Variable((1, 4, 4))
    mask.d = np.triu(np.full((4, 4), -np.inf), 1) if mended else -np.inf
    q, k, v = (F.reshape(affine(x, 32, name), (32, 4, 8)) for name in "qkv")
    scores = F.batch_matmul(q, k, transpose_b=True)
    h = F.batch_matmul(F.softmax(scores + F.broadcast(mask, scores.shape)), v)
    return cross_entropy(affine(h, 5, "head"), t), feeder(x, t)


@trouble(LABELS, "wrong_labels", "count them from 0")
@of_data
def labels_from_one(x: nn.Variable, t: nn.Variable) -> None:
    t.d = t.d + 1


@trouble(LABELS, "wrong_labels", "to -1, which is ignored")
def void_labels(mended: bool) -> Built:
    x, t = inputs()
    loss = cross_entropy(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"), t)

    def spoil() -> None:
        t.d[:4] = -1 if mended else 255

    return loss, feeder(x, t, spoil)


@trouble(LABELS, "wrong_labels", "clean them")
@of_data
def nan_labels(x: nn.Variable, t: nn.Variable) -> None:
    t.d = np.where(np.arange(32)[:, None] == 3, np.nan, t.d)


@trouble(LABELS, "wrong_labels", "feed labels")
@of_data
def masked_labels(x: nn.Variable, t: nn.Variable) -> None:
    t.d = -1


@trouble(LABELS, "wrong_labels", "F.log_softmax")
@of_data
def shares_as_labels(x: nn.Variable, t: nn.Variable) -> None:
    t.d = t.d / 5.0


@trouble("fc1/affine", "data_not_finite", "clean the data")
@of_data
def nan_in_data(x: nn.Variable, t: nn.Variable) -> None:
    x.d[1, 2] = np.nan


@trouble("fc1/affine", "data_not_finite", "clean the data")
@of_data
def infinite_data(x: nn.Variable, t: nn.Variable) -> None:
    x.d[1, 2] = np.inf


@trouble("fc1/affine", "beyond_storage", "normalise the data")
@of_data
def data_as_it_came(x: nn.Variable, t: nn.Variable) -> None:
    x.d = x.d * 1e6


@trouble("fc1/affine", "beyond_storage", "normalise the data")
def column_of_timestamps(mended: bool) -> Built:
    """The normalization behind it makes gradients small, which is a consequence."""
    x, t = inputs()
    h = F.relu(PF.batch_normalization(affine(x, 16, "fc1"), name="bn"))

    def spoil() -> None:
        x.d[:, 0] *= 1.0 if mended else 1e8

    return cross_entropy(affine(h, 5, "head"), t), feeder(x, t, spoil)


@trouble(LABELS, "wrong_labels", "F.binary_cross_entropy")
def soft_labels(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 1, "head")
    loss = F.binary_cross_entropy(F.sigmoid(y), t) if mended else F.sigmoid_cross_entropy(y, t)

    def spoil() -> None:
        t.d = 0.1 + 0.2 * t.d

    return F.mean(loss), feeder(x, t, spoil)


@trouble(LABELS, "wrong_labels", "map them to that range")
def bytes_as_targets(mended: bool) -> Built:
    x, t = inputs()
    y = F.sigmoid(affine(F.tanh(affine(x, 16, "fc1")), 1, "head"))

    def spoil() -> None:
        t.d = t.d / 4.0 if mended else t.d * 63.0

    return F.mean(F.binary_cross_entropy(y, t)), feeder(x, t, spoil)


@trouble("the indices of shape (32, 4)", "wrong_indices", "make it 12 rows")
def index_beyond_the_table(mended: bool) -> Built:
    x, t = nn.Variable((32, 4)), nn.Variable((32, 1))
    h = F.reshape(PF.embed(x, 12 if mended else 10, 8, name="embed"), (32, 32))
    rng = np.random.default_rng(0)

    def feed() -> None:
        x.d, t.d = rng.integers(0, 12, x.shape), rng.integers(0, 5, t.shape)

    return cross_entropy(affine(h, 5, "head"), t), feed


@trouble("backbone/affine", "untrained", "unlinked()", needs=Way.NONE)
def unlinked_backbone(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "backbone"))
    h = h if mended else h.get_unlinked_variable()
    return cross_entropy(affine(F.tanh(affine(h, 16, "neck")), 5, "head"), t), feeder(x, t)


@trouble("branch/affine", "untrained", "need_grad=False", needs=Way.NONE)
def detached_branch(mended: bool) -> Built:
    x, t = inputs()
    trunk = F.tanh(affine(x, 16, "trunk"))
    branch = F.tanh(affine(trunk, 16, "branch"))
    branch.need_grad = mended
    return cross_entropy(affine(trunk + branch, 5, "head"), t), feeder(x, t)


@trouble("backbone/affine", "untrained", "unlinked()")
def unlinked_backbone_of_a_solver(mended: bool) -> Built:
    return updater_of(*unlinked_backbone.build(mended), S.Sgd(0.1)), None


@trouble("branch/affine", "untrained", "need_grad=False")
def detached_branch_of_a_solver(mended: bool) -> Built:
    return updater_of(*detached_branch.build(mended), S.Sgd(0.1)), None


@trouble("fc1/affine", "untrained", "link it", needs=Way.NONE)
def cut_in_the_middle(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "fc1"))
    h.need_grad = mended
    return cross_entropy(affine(F.tanh(affine(h, 16, "fc2")), 5, "head"), t), feeder(x, t)


@trouble("net/fc2/affine", "untrained", "an unused output", needs=Way.NONE)
def unused_layer(mended: bool) -> Built:
    x, t = inputs()
    with nn.parameter_scope("net"):
        h = F.tanh(affine(x, 16, "fc1"))
        deeper = F.tanh(affine(h, 16, "fc2"))
        loss = cross_entropy(affine(deeper if mended else h, 5, "head"), t)
    return loss, feeder(x, t)


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


@trouble("fc1/affine", "learning_rate", "smaller learning rate")
def exploded_weights(mended: bool) -> Built:
    return trained(0.1 if mended else 1e3)


@trouble("fc1/affine", "learning_rate", "smaller learning rate")
def too_large_first_update(mended: bool) -> Built:
    x, t = inputs()
    loss = cross_entropy(affine(F.relu(affine(x, 16, "fc1")), 5, "head"), t)
    return updater_of(loss, feeder(x, t), S.Adam(1e-3 if mended else 3.0)), None


@trouble("huge/affine", "activation_overflow", "weights smaller", beside=["learning_rate"])
def overflow_before_a_too_large_update(mended: bool) -> Built:
    x, t = inputs()
    h = affine(F.tanh(affine(x, 16, "fc1")), 16, "huge", 1.0 if mended else 5e4)
    loss = cross_entropy(affine(F.tanh(PF.batch_normalization(h, name="bn")), 5, "head"), t)
    return updater_of(loss, feeder(x, t), S.Adam(1e-3 if mended else 3.0)), None


@trouble("loud/affine", "exploding", "smaller weights", beside=["learning_rate"])
def gradients_that_make_updates_too_large(mended: bool) -> Built:
    x, t = inputs()
    h = affine(F.relu(affine(x, 16, "fc1")), 16, "loud", 1.0 if mended else 1e3)
    return updater_of(cross_entropy(affine(h, 5, "head"), t), feeder(x, t), S.Sgd(0.1)), None


def updated(rate: float, **arguments: Any) -> Built:
    x, t = inputs()
    loss = cross_entropy(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"), t)
    return updater_of(loss, feeder(x, t), S.Momentum(rate, 0.9), **arguments), None


@trouble("the updater", "weight_decay", "smaller weight_decay", needs=Way.NONE)
def weights_that_decay(mended: bool) -> Built:
    return updated(0.1, weight_decay=1e-4 if mended else 2.0)


@trouble("the updater", "idle_update", "larger norm", needs=Way.NONE)
def gradients_clipped_to_nothing(mended: bool) -> Built:
    norm = 1.0 if mended else 1e-8
    return updated(0.1, on_gradients=lambda solver: solver.clip_grad_by_norm(norm))


@trouble("the updater", "idle_update", "larger learning rate", needs=Way.NONE)
def learning_rate_of_nothing(mended: bool) -> Built:
    return updated(0.1 if mended else 1e-9)


@trouble("fc1/affine", "weight_not_finite", "lower the learning rate")
def weights_not_finite(mended: bool) -> Built:
    return trained(0.1 if mended else 1e38)


@trouble("fc2/affine", "weight_not_finite", "restore earlier weights")
def nan_in_a_weight(mended: bool) -> Built:
    built = classifier(lambda x: F.tanh(affine(F.tanh(affine(x, 16, "fc1")), 16, "fc2")))
    if not mended:
        nn.get_parameters()["fc2/affine/W"].d[3, 4] = np.nan
    return built


@trouble("head/affine", "in_no_solver", "set_parameters", needs=Way.NONE)
def head_in_no_solver(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(F.tanh(affine(x, 16, "fc1")), 16, "fc2"))
    early = nn.get_parameters()
    loss = cross_entropy(affine(h, 5, "head"), t)
    return updater_of(loss, feeder(x, t), S.Sgd(0.1), None if mended else early), None
