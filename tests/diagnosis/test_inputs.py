# SPDX-License-Identifier: Apache-2.0
"""Inputs that no layer can learn from as they are read are noted; their mended siblings are not."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from numpy.typing import NDArray

from nnabla_adaloss import diagnose

from .nets import affine, cross_entropy, hidden

Arrays = Tuple[NDArray[Any], ...]
ROWS = 32


def regression(outputs: Callable[[nn.Variable], nn.Variable]) -> Callable[..., nn.Variable]:
    return lambda x, t: F.mean(F.squared_error(outputs(affine(hidden(x), 1, "head")), t))


def classification(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    return cross_entropy(affine(hidden(x), 5, "head"), t)


def contrast(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    """The first score is that of the right pair."""
    h = hidden(x)
    scores = F.concatenate(affine(h, 1, "right"), affine(h, 4, "wrong"))
    return F.mean(F.softmax_cross_entropy(scores * 2.0, t))


def over_samples(axis: int) -> Callable[..., nn.Variable]:
    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        scores = F.log_softmax(affine(hidden(x), 5, "head"), axis=axis)
        return -F.mean(F.one_hot(t, (5,)) * scores)

    return loss


def over_maps(axis: int) -> Callable[..., nn.Variable]:
    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        maps = PF.convolution(
            F.reshape(x, (ROWS, 1, 4, 4)), 3, (1, 1), name="head", rng=np.random.RandomState(1)
        )
        chosen = F.broadcast(F.reshape(F.one_hot(t, (3,)), (ROWS, 3, 1, 1)), maps.shape)
        return -F.mean(chosen * F.log_softmax(maps, axis=axis))

    return loss


def pairs(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    """Both axes are of samples."""
    scores = F.affine(hidden(x), F.transpose(PF.affine(x, 16, name="text"), (1, 0)))
    return -F.mean(F.one_hot(F.reshape(t, (ROWS, 1)), (ROWS,)) * F.log_softmax(scores, axis=0))


def recurrent(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    states = (nn.Variable.from_numpy_array(np.zeros((1, 1, ROWS, 8))) for _ in range(2))
    y, *_ = PF.lstm(F.reshape(x, (1, ROWS, 16)), *states, training=True)
    return cross_entropy(affine(F.reshape(y, (ROWS, 8)), 5, "head"), t)


def gates(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    h, c = (F.constant(0.0, (ROWS, 8)) for _ in range(2))
    for _ in range(3):
        h, c = PF.lstm_cell(x, h, c, 8, name="cell")
    return cross_entropy(affine(h, 5, "head"), t)


def log_of_softmax(constant: float) -> Callable[..., nn.Variable]:
    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        probabilities = F.softmax(affine(hidden(x), 5, "head")) + constant
        return -F.mean(F.sum(F.one_hot(t, (5,)) * F.log(probabilities), axis=1))

    return loss


def dropped(p: float) -> Callable[..., nn.Variable]:
    return lambda x, t: cross_entropy(affine(F.dropout(affine(x, 64, "fc1"), p, seed=3), 5, "head"), t)


def weighted(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    return F.mean(F.squared_error(hidden(x), 0.0 * x) * t)


def normal(rng: np.random.Generator) -> NDArray[Any]:
    return rng.standard_normal((ROWS, 16))


def labels(rng: np.random.Generator) -> NDArray[Any]:
    return rng.integers(0, 5, (ROWS, 1))


COLUMNS = np.ones(16)
COLUMNS[3] = 1e-9
Draw = Callable[[np.random.Generator], NDArray[Any]]
# Loss, inputs and targets that are noted, others that are not, and words of the note.
NOTED: Dict[str, Tuple[Callable[..., nn.Variable], Tuple[Draw, Draw], Any, str]] = {
    "targets_below_a_relu": (
        regression(F.relu),
        (normal, lambda rng: -1.0 - rng.random((ROWS, 1))),
        (normal, lambda rng: rng.random((ROWS, 1))),
        "head/affine/SquaredError compares numbers from 0 to inf with targets from -1.",
    ),
    "targets_beyond_a_sigmoid": (
        regression(F.sigmoid),
        (normal, lambda rng: 20.0 + rng.random((ROWS, 1))),
        (normal, lambda rng: rng.random((ROWS, 1))),
        "head/affine/SquaredError compares numbers from 0 to 1 with targets from 20",
    ),
    "all_pairs": (
        regression(F.identity),
        (normal, lambda rng: rng.standard_normal((1, ROWS))),
        (normal, lambda rng: rng.standard_normal((ROWS, 1))),
        "head/affine/SquaredError compares each of 32 numbers with each of 32 targets",
    ),
    "equal_rows": (
        classification,
        (lambda rng: np.tile(rng.standard_normal((1, 16)), (ROWS, 1)), labels),
        (normal, labels),
        "With these weights no layer can tell samples apart, from fc1/affine on",
    ),
    "equal_labels": (
        classification,
        (normal, lambda rng: np.zeros((ROWS, 1))),
        (normal, labels),
        "head/affine/SoftmaxCrossEntropy reads the label 0 of all samples: check the labels",
    ),
    "small_numbers": (
        classification,
        (lambda rng: 1e-4 * normal(rng), labels),
        (normal, labels),
        "fc1/affine reads numbers up to 0.00",
    ),
    "numbers_beside_their_mean": (
        classification,
        (lambda rng: 2.0 + 5e-3 * normal(rng), labels),
        (lambda rng: 2.0 + normal(rng), labels),
        "Numbers of the input of shape (32, 16) differ by 0.0048 from 2, their mean",
    ),
    "softmax_over_samples": (
        over_samples(0),
        (normal, labels),
        over_samples(1),
        "head/affine/LogSoftmax normalises over the first axis, which is that of samples",
    ),
    "most_numbers_dropped": (
        dropped(0.95),
        (normal, labels),
        dropped(0.5),
        "fc1/affine/Dropout drops 95% of",
    ),
    "raw_data_of_gates": (
        recurrent,
        (lambda rng: 100.0 * normal(rng), labels),
        (normal, labels),
        "reads numbers up to 3",
    ),
    "saturated_gates": (
        gates,
        (lambda rng: 20.0 * normal(rng), labels),
        (normal, labels),
        "activations are where the derivative is next to 0, from cell/lstm/affine/Sigmoid on",
    ),
    "a_loss_that_is_maximised": (
        lambda x, t: -1.0 * classification(x, t),
        (normal, labels),
        classification,
        "head/affine/SoftmaxCrossEntropy gets larger by training, as its gradient is below 0",
    ),
    "statistics_that_nothing_has_measured": (
        lambda x, t: classification(PF.batch_normalization(x, batch_stat=False, name="bn"), t),
        (normal, labels),
        lambda x, t: classification(PF.batch_normalization(x, name="bn"), t),
        "A mean of 0 and a variance of 1, as at the start, are used by bn/bn: run batches with",
    ),
    "targets_of_zeros": (
        lambda x, t: F.mean(F.sigmoid_cross_entropy(affine(hidden(x), 5, "head"), t)),
        (normal, lambda rng: np.zeros((ROWS, 5))),
        (normal, lambda rng: rng.integers(0, 2, (ROWS, 5))),
        "head/affine/SigmoidCrossEntropy reads targets that are all 0: check the labels",
    ),
    "sigmoids_for_scores": (
        lambda x, t: cross_entropy(F.sigmoid(affine(hidden(x), 5, "head")), t),
        (normal, labels),
        classification,
        "head/affine/SoftmaxCrossEntropy reads the output of a sigmoid, which is from 0 to 1: give it the",
    ),
    "data_that_a_mask_makes_zero": (
        lambda x, t: cross_entropy(
            affine(hidden(x) + affine(F.relu(x) * F.relu(-x), 16, "side"), 5, "head"), t
        ),
        (normal, labels),
        classification,
        "side/affine/Mul2 makes 0 of other numbers: check the mask",
    ),
    "a_single_label_in_each_batch": (
        classification,
        (normal, lambda rng: np.full((ROWS, 1), rng.integers(0, 5))),
        (normal, labels),
        "head/affine/SoftmaxCrossEntropy reads a single label in each batch: check the labels",
    ),
    "softmax_over_a_map": (
        over_maps(-1),
        (normal, lambda rng: rng.integers(0, 3, (ROWS, 1))),
        over_maps(1),
        "head/conv/LogSoftmax normalises over axis -1, where head/conv has channels in axis 1",
    ),
    "a_constant_below_the_format": (
        log_of_softmax(1e-9),
        (normal, labels),
        log_of_softmax(2.0**-14),
        "head/affine/AddScalar does not keep head/affine/Log from 0: 1e-09 is 0 in float16: use",
    ),
    "a_column_below_the_format": (
        weighted,
        (normal, lambda rng: COLUMNS * (1.0 + rng.random((ROWS, 16)))),
        (normal, lambda rng: 1.0 + rng.random((ROWS, 16))),
        "Of the input of shape (32, 16), column 3 of its last axis becomes 0 in float16",
    ),
}


def notes_on(loss: Callable[..., nn.Variable], draws: Tuple[Draw, Draw]) -> str:
    nn.clear_parameters()
    nn.seed(1)
    rng = np.random.default_rng(0)
    x, t = (nn.Variable(draw(rng).shape) for draw in draws)

    def feed() -> None:
        x.d, t.d = (draw(rng) for draw in draws)

    return "\n".join(diagnose(loss(x, t), feeder=feed, batches=2).as_dict()["notes"])


@pytest.mark.parametrize("name", NOTED)
def test_inputs_that_no_layer_can_learn_from_are_noted(name: str) -> None:
    loss, draws, other, told = NOTED[name]
    assert told in notes_on(loss, draws)
    mended = notes_on(other, draws) if callable(other) else notes_on(loss, other)
    inside = "Numbers between the steps of lstm stay in fp32 here: they are not judged."
    assert mended == inside * (loss is recurrent)


@pytest.mark.parametrize("missing", [("no_scale",), ("no_bias",), ("no_scale", "no_bias")])
def test_statistics_are_read_of_normalizations_with_fewer_inputs(missing: Tuple[str, ...]) -> None:
    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        options = dict.fromkeys(missing, True)
        return classification(PF.batch_normalization(x, batch_stat=False, name="bn", **options), t)

    assert "as at the start, are used by bn/bn" in notes_on(loss, (normal, labels))


@pytest.mark.parametrize("loss", [contrast, pairs])
def test_labels_and_softmaxes_of_contrasts_are_sound(loss: Callable[..., nn.Variable]) -> None:
    is_contrast = loss is contrast
    draws = (
        normal,
        (lambda rng: np.zeros((ROWS, 1))) if is_contrast else (lambda rng: np.arange(ROWS)[:, None]),
    )
    assert notes_on(loss, draws) == ""
