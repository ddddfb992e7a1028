# SPDX-License-Identifier: Apache-2.0
"""Networks that are not finite somewhere, or whose gradient ends somewhere; with True they are mended."""

from __future__ import annotations

from typing import Callable, List

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import DynamicLossScalingUpdater, FormatEmulation
from nnabla_adaloss.diagnosis import remedies
from tests.worlds.trainings import updater_of

from .nets import Built, affine, classes, cross_entropy, feeder, hidden, inputs, network, trouble

IMAGES = (8, 3, 8, 8)
OR_LEAKY, OR_BOUND = "{}, or use F.leaky_relu".format, ("{}, or " + remedies.BOUND).format


def conv(x: nn.Variable, name: str) -> nn.Variable:
    return PF.convolution(x, 8, (3, 3), pad=(1, 1), name=name, rng=np.random.RandomState(len(name)))


def heads(x: nn.Variable, factor: float = 1.0) -> List[nn.Variable]:
    """Queries, keys and values of four places."""
    return [F.reshape(affine(x, 32, n, f), (32, 4, 8)) for n, f in (("q", factor), ("k", factor), ("v", 1.0))]


def trained(built: Built, solver: S.Solver, parameters: object = None) -> Built:
    return updater_of(*built, solver, parameters), None


# Not finite, or beyond the format.


@trouble(
    "overflow",
    "fc2/affine",
    "the weight fc2/affine/W, at a learning rate of 10000, makes numbers",
    remedy=remedies.SMALLER_STEPS,
)
def weights_of_large_steps(mended: bool) -> Built:
    rate = 1e-3 if mended else 1e4
    built = network(lambda x: F.relu(affine(hidden(x), 16, "fc2")))
    W = nn.get_parameters()["fc2/affine/W"]
    W.d += 3.0 * rate * np.sign(W.d)
    return trained(built, S.Adam(rate))


@trouble(
    "no_float_tail", "fc1/affine/MulScalar", "beyond float16, which ends at 65504, as it reads", fatal=False
)
def factor_beyond_the_format(mended: bool) -> Built:
    """nnabla's updater has no float tail, in which the factors would cancel."""
    loss, feed = network(lambda x: hidden(x) * 1e5 / 1e5)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    emulation = FormatEmulation(loss, "float16", float_tail=mended)
    return DynamicLossScalingUpdater(solver, emulation, feed, scale=8.0), None


def of_data(spoil: Callable[[nn.Variable, nn.Variable], None]) -> Callable[[bool], Built]:
    """A sound network whose data is spoiled."""
    return lambda mended: network() if mended else network(spoil=spoil)


@trouble("data_not_finite", "fc1/affine", "the input of shape (32, 16), which holds 1 NaN")
@of_data
def nan_in_data(x: nn.Variable, t: nn.Variable) -> None:
    x.d[1, 2] = np.nan


@trouble("data_not_finite", "recurrent/lstm", "which holds 1 NaN")
def nan_before_a_recurrence(mended: bool) -> Built:
    """Nothing reads its last states."""

    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d[1, 2, 0] = 0.0 if mended else np.nan

    def layers(x: nn.Variable) -> nn.Variable:
        h, c = (F.constant(0.0, (1, 1, 4, 8)) for _ in range(2))
        return PF.lstm(x, h, c, name="recurrent")[0]

    return network(lambda x: F.reshape(layers(x), (5, 32)), spoil=spoil, shape=(5, 4, 6))


@trouble("data_not_finite", "head/affine/SoftmaxCrossEntropy", "which holds 1 NaN", fatal=False)
@of_data
def nan_in_labels(x: nn.Variable, t: nn.Variable) -> None:
    t.d = np.where(np.arange(32)[:, None] == 3, np.nan, t.d)


@trouble("beyond_format", "fc1/affine", "beyond float16, which ends at 65504")
def column_of_timestamps(mended: bool) -> Built:
    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:, 0] *= 1.0 if mended else 1e8

    return network(lambda x: F.relu(PF.batch_normalization(affine(x, 16, "fc1"), name="bn")), spoil=spoil)


@trouble("weight_not_finite", "conv02/conv", parameters=("conv02/conv/W",))
def infinity_in_a_kernel(mended: bool) -> Built:
    built = network(lambda x: F.relu(conv(F.relu(conv(x, "conv1")), "conv02")), shape=IMAGES)
    if not mended:
        nn.get_parameters()["conv02/conv/W"].d[0, 0, 1, 1] = np.inf
    return built


@trouble("weight_not_finite", "bn/bn", parameters=("bn/bn/mean",))
def statistics_that_are_nan(mended: bool) -> Built:
    """A normalization that uses what an earlier training has left."""
    built = network(
        lambda x: PF.batch_normalization(conv(x, "conv1"), batch_stat=False, name="bn"), shape=IMAGES
    )
    if not mended:
        nn.get_parameters(grad_only=False)["bn/bn/mean"].d[0, 1] = np.nan
    return built


@trouble("lost_constant", "fc1/affine/MaximumScalar", "1e-08 is 0 in float16", remedy=remedies.HELD)
def epsilon_that_the_format_does_not_hold(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        norm = F.maximum_scalar(F.sum(x**2, axis=1, keepdims=True), 1e-3 if mended else 1e-8)
        return hidden(x / norm)

    def padding(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:4] = 0.0

    return network(layers, spoil=padding)


@trouble("not_finite", "q/affine/Div2", "divides by 32 zeros from the input of shape (32, 4, 8) on")
def cosine_of_padding(mended: bool) -> Built:
    """Attention by cosines; the last place of some samples is padding."""

    def layers(x: nn.Variable) -> nn.Variable:
        q, k = (PF.affine(x, 8, 2, name=n, rng=np.random.RandomState(1)) for n in "qk")
        length = F.sum(q**2, axis=2, keepdims=True)
        q = q / (F.maximum_scalar(length, 2**-10) if mended else length)
        return F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), x)

    def padding(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:, 3] = 0.0

    return network(layers, spoil=padding, shape=(32, 4, 8))


@trouble(
    "not_finite", "head/affine/Log", "; the input of shape (32, 16) reaches", remedy=remedies.NORMALISE_DATA
)
def log_of_what_raw_counts_saturate(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return -F.mean(F.log(1.0 - F.sigmoid(affine(h, 1, "head"))))

    def counts(x: nn.Variable, t: nn.Variable) -> None:
        x.d = np.abs(x.d) * (1.0 if mended else 1000.0)

    return network(lambda x: F.relu(affine(x, 16, "fc1")), loss, counts)


@trouble("lost_constant", "fc1/affine/AddScalar#2", "1e-30 is 0", remedy=remedies.LOG_SOFTMAX)
def sum_of_exponentials_below_an_epsilon(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        near = F.mean(F.exp(-(h**2) - (0.0 if mended else 25.0)), axis=1)
        return -F.mean(F.log(near + (1e-4 if mended else 1e-30)))

    return network(loss=loss)


@trouble("not_finite", "fc1/affine/Div2", "4 NaNs", remedy=remedies.ZERO_DATA)
def nan_behind_a_relu(mended: bool) -> Built:
    """Means over no place, of which a ReLU turns the first into 0."""
    mask = nn.Variable((32, 16))

    def mean(h: nn.Variable) -> nn.Variable:
        return F.sum(h * mask, axis=1, keepdims=True) / F.sum(mask, axis=1, keepdims=True)

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        mask.d = np.arange(32)[:, None] >= (0 if mended else 4)

    return network(lambda x: affine(mean(F.relu(affine(mean(x), 16, "fc1"))), 16, "fc2"), spoil=fill)


@trouble("backward_not_finite", "p", "numbers below 0", remedy=remedies.ABOVE)
def generalized_mean(mended: bool) -> Built:
    """The exponent is trained."""

    def layers(x: nn.Variable) -> nn.Variable:
        p = nn.parameter.get_parameter_or_create("p", (1, 1), np.full((1, 1), 2.0))
        h = affine(x, 16, "fc1")
        return F.pow2(F.maximum_scalar(h, 2**-14) if mended else h, F.broadcast(p, h.shape))

    return network(layers)


@trouble(
    "overflow", "temperature/Exp", "the parameter temperature reaches 11.3", remedy=remedies.SMALLER_START
)
def temperature_that_is_too_large(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        start = np.full((1, 1), 1.3 if mended else 11.3)
        h = hidden(x)
        return h * F.broadcast(
            F.exp(nn.parameter.get_parameter_or_create("temperature", (1, 1), start)), h.shape
        )

    return network(layers)


@trouble(
    "not_finite", "head/affine/Log", "reads 80 zeros from the output of head/affine/ReLU on, in fp32 too"
)
def log_of_zero(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = F.relu(affine(h, 5, "head"))
        return -F.mean(F.one_hot(t, (5,)) * F.log(F.maximum_scalar(y, 2**-14) if mended else y))

    return network(loss=loss)


@trouble("not_finite", "head/affine/Log", "numbers below 0 from the output of head/affine, in fp32 too")
def log_of_numbers_below_zero(mended: bool) -> Built:
    return network(
        loss=lambda h, t: -F.mean(F.log(affine(h, 5, "head") * 0.1 + 1.0 if mended else affine(h, 5, "head")))
    )


@trouble("not_finite", "d2/affine/Log", "become 0 in float16")
def sure_discriminator(mended: bool) -> Built:
    """The generator's loss of the first paper."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(F.leaky_relu(affine(h, 16, "d1")), 1, "d2", bias=-9.0 if mended else 9.0)
        return F.mean(F.log(1.0 - F.sigmoid(y)))

    return network(lambda z: affine(F.relu(affine(z, 16, "g1")), 16, "g2"), loss)


@trouble("not_finite", "head/affine/Mul2", "0 times")
def infinite_mask_times_zero(mended: bool) -> Built:
    """Scores of impossible classes are minus infinity, and their labels 0."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        mask = np.array([[0, 0, 0, 0, -1e4 if mended else -np.inf]], np.float32)
        scores = affine(h, 5, "head") + F.broadcast(nn.Variable.from_numpy_array(mask), (32, 5))
        return -F.mean(F.sum(F.one_hot(t, (5,)) * F.log_softmax(scores), axis=1))

    def possible(x: nn.Variable, t: nn.Variable) -> None:
        t.d = t.d % 4

    return network(loss=loss, spoil=possible)


@trouble("backward_not_finite", "fc1/affine/PowScalar", "its gradient is not finite, as it reads 256 zeros")
def root_of_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        every_second = nn.Variable.from_numpy_array(np.arange(32 * 16).reshape(32, 16) % 2)
        h = F.abs(affine(x, 16, "fc1") * every_second)
        return F.tanh((h + 2**-8 if mended else h) ** 0.5)

    return network(layers)


@trouble("backward_not_finite", "fc1/affine/PowScalar#2", "as it reads 32 zeros")
def root_beside_another_use(mended: bool) -> Built:
    """What else reads the same hands on what the root has spoiled."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = hidden(x)
        distance = F.sum((h - h * 1.0) ** 2, axis=1, keepdims=True)
        root = (distance + 2**-8 if mended else distance) ** 0.5
        return F.broadcast(root, h.shape) + affine(h, 16, "fc2")

    return network(layers)


@trouble("overflow", "sigma/affine/Exp", "reads numbers up to")
def variance_of_a_vae(mended: bool) -> Built:
    """The loss is finite in spite of it."""

    def layers(x: nn.Variable) -> nn.Variable:
        mu, log_variance = affine(hidden(x), 4, "mu"), affine(hidden(x), 4, "sigma", 0.1 if mended else 12.0)
        return F.tanh(mu + F.exp(log_variance) * F.randn(shape=mu.shape))

    return network(layers)


@trouble("overflow", "head/affine/Exp", remedy=remedies.SMALLER_START, parameters=("head/affine/W",))
def exponential(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h, 1, "head", factor=8.0)
        y = F.minimum_scalar(y, 5.0) if mended else y
        return F.mean(F.exp(y) - t * y)

    return network(loss=loss)


@trouble("overflow", "conv/conv/Sum", "adds up 576 numbers of up to")
def sum_of_a_map(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(PF.convolution(x, 4, (3, 3), name="conv", rng=np.random.RandomState(0)))
        return F.mean(h, axis=(2, 3)) if mended else F.sum(h, axis=(2, 3))

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return cross_entropy(PF.batch_normalization(affine(h, 5, "head"), name="bn", batch_stat=True), t)

    def large(x: nn.Variable, t: nn.Variable) -> None:
        x.d = 400.0 * np.abs(x.d)

    return network(layers, loss, large, (4, 1, 26, 26))


@trouble("overflow", "rnn/affine#16", "is applied 16 times", parameters=("rnn/affine/W",))
def recurrence_that_grows(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for _ in range(20):
            x = F.relu(PF.affine(x, 16, name="rnn", w_init=np.eye(16) * (1.0 if mended else 1.9)))
        return x

    return network(layers)


@trouble("overflow", "fc3/affine", "numbers grow from layer to layer, ")
def layers_that_grow(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(6):
            x = F.relu(affine(x, 16, f"fc{index}", 1.0 if mended else 20.0))
        return x

    return network(layers)


@trouble("overflow", "fc3/affine/SquaredError", parameters=("fc2/affine/W",), fatal=False)
def a_weight_behind_the_loss(mended: bool) -> Built:
    """What leaves the range first is the loss, and it is not to blame; its gradients fit with a scale."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(hidden(x), 16, "fc2", 1.0 if mended else 1e3)
        return affine(F.tanh(h) if mended else h, 1, "fc3")

    return network(layers, lambda y, t: F.mean(F.squared_error(y, t)))


@trouble("overflow", "k/affine/BatchMatmul", "it computes numbers up to")
def scores_divided_too_late(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = heads(x, 100.0)
        early, late = (1e-4, 1.0) if mended else (1.0, 1e-4)
        return F.batch_matmul(F.softmax(F.batch_matmul(q * early, k, transpose_b=True) * late), v)

    return network(layers)


@trouble(
    "closed_row", "q/affine/Softmax", "as the output of head/affine/MulScalar reaches 3.4e+38, beyond float16"
)
def mask_by_a_factor_beyond_the_format(mended: bool) -> Built:
    """The last sentence is empty: all its places are padding."""
    padding = nn.Variable((32, 4, 4))

    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = heads(x)
        scores = F.batch_matmul(q, k, transpose_b=True)
        return F.batch_matmul(F.softmax(scores + padding * (-1e3 if mended else -3.4e38)), v)

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        padding.d = np.arange(32)[:, None, None] == 31

    return network(layers, spoil=fill)


@trouble("closed_row", "q/affine/Softmax", "as the input of shape (1, 4, 4) reaches 1e+09, beyond float16")
def mask_beyond_the_format(mended: bool) -> Built:
    """Rows of padding: uniform in fp32, nothing but minus infinity in float16."""
    mask = nn.Variable((1, 4, 4))
    mask.d = np.where(np.arange(4)[:, None] == 3, -1e9, 0.0)
    mask.d[0, 3, 3] = 0.0 if mended else -1e9

    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = heads(x)
        scores = F.batch_matmul(q, k, transpose_b=True)
        return F.batch_matmul(F.softmax(scores + F.broadcast(mask, scores.shape)), v)

    return network(layers)


@trouble("precision", "fc1/affine/Sub2", "the difference of numbers up to 3.66e+03")
def variance_of_large_numbers(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        z = x + (0.0 if mended else 60.0)
        v = F.mean(z**2, axis=1, keepdims=True) - F.mean(z, axis=1, keepdims=True) ** 2
        return hidden(F.concatenate(v, x * 0.01))

    return network(layers)


# Where the gradient ends.


@trouble("dead_relu", "fc2/affine/ReLU", "fc2/affine/b reaches -100", remedy=OR_LEAKY(remedies.SMALLER_BIAS))
def dead_relu(mended: bool) -> Built:
    return network(lambda x: F.relu(affine(hidden(x), 16, "fc2", bias=0.0 if mended else -100.0)))


@trouble("dead_relu", "b0/affine/ReLU", "; likewise b1/affine/ReLU and b2/affine/ReLU", fatal=False)
def dead_branches(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        return sum((F.relu(affine(h, 16, f"b{n}", bias=0.0 if mended else -100.0)) for n in range(3)), h)

    return network(layers)


@trouble("dead_relu", "branch/affine/ReLU", fatal=False, remedy=OR_LEAKY(remedies.SMALLER_BIAS))
def dead_branch(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        return h + F.relu(affine(h, 16, "branch", bias=0.0 if mended else -100.0))

    return network(layers)


@trouble("saturated", "gate/affine/Sigmoid", fatal=False, parameters=("gate/affine/W",))
def mostly_flat_sigmoid(mended: bool) -> Built:
    return network(lambda x: F.sigmoid(affine(x, 16, "gate", 1.0 if mended else 20.0)))


@trouble("saturated", "rnn/affine/Tanh", fatal=False, parameters=("rnn/affine/W",))
def saturated_recurrence(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for _ in range(3):
            x = F.tanh(affine(x, 16, "rnn", 1.0 if mended else 12.0))
        return x

    return network(layers)


@trouble("saturated", "q/affine/Softmax", "of its rows are 1 in one place", fatal=False)
def mostly_flat_softmax(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = heads(x, 1.0 if mended else 4.0)
        return F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v)

    return network(layers)


@trouble(
    "saturated",
    "fc1/affine/MinimumScalar",
    "as it reads numbers around 20, with the constant 1",
    remedy=OR_BOUND(remedies.SMALLER_BIAS),
    parameters=("fc1/affine/b",),
)
def clipped_away(mended: bool) -> Built:
    bias = 0.0 if mended else 20.0
    return network(lambda x: F.clip_by_value(affine(x, 16, "fc1", 0.5, bias), -1.0, 1.0))


@trouble("constant_softmax", "scores/affine/Softmax", fatal=False, remedy=remedies.SOFTMAX_AXIS)
def softmax_over_an_axis_of_one(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        places = F.reshape(affine(x, 32, "places"), (32, 4, 8))
        scores = F.reshape(affine(F.tanh(affine(x, 8, "fc")), 4, "scores"), (32, 4, 1))
        return F.sum(F.softmax(scores, axis=1 if mended else 2) * places, axis=1)

    return network(layers)


@trouble("constant_input", "bn/bn", "one number at a time")
def normalization_of_one_number(mended: bool) -> Built:
    """Each channel has one number, as the batch is one sample."""
    shape = (8 if mended else 1, 16)
    return network(lambda x: F.tanh(PF.batch_normalization(affine(x, 16, "fc1"), name="bn")), shape=shape)


@trouble("zero_factor", "bn/bn", fatal=False, remedy=remedies.GAMMA, parameters=("bn/bn/gamma",))
def frozen_gamma_of_zero(mended: bool) -> Built:
    """A branch that starts from 0, and that nothing can move."""
    init = {"gamma": np.full((1, 8, 1, 1), 1.0 if mended else 0.0), "beta": np.zeros((1, 8, 1, 1))}

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(conv(x, "stem"))
        branch = PF.batch_normalization(conv(h, "branch"), name="bn", param_init=init, fix_parameters=True)
        return F.relu(h + branch)

    return trained(network(layers, shape=IMAGES), S.Sgd(0.1))


@trouble("zero_factor", "side/affine/MulScalar", "loss weight of 0", fatal=False)
def loss_weight_of_zero(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return classes(h, t) + F.mean(affine(h, 1, "side") ** 2) * (0.1 if mended else 0.0)

    return network(loss=loss)


@trouble("zero_factor", "side/affine/Mul2", fatal=False, remedy=remedies.ZEROS)
def inverted_mask(mended: bool) -> Built:
    mask = nn.Variable((32, 16))

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return classes(h, t) + F.mean(affine(h, 16, "side") ** 2 * mask)

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        mask.d = 1.0 if mended else 0.0

    return network(loss=loss, spoil=fill)


@trouble("zero_weights", "a/affine", others=("b/affine",), parameters=("a/affine/W",))
def two_factors_of_zero(mended: bool) -> Built:
    """Both factors of a bilinear form start from 0: neither gets a gradient."""

    def layers(x: nn.Variable) -> nn.Variable:
        a, b = (affine(x, 16, name, 1.0 if mended else 0.0) for name in "ab")
        return F.sum(a * b, axis=1, keepdims=True)

    return network(layers, lambda y, t: F.mean(F.squared_error(y, t)))


@trouble(
    "zero_weights", "fc2/affine", remedy=remedies.ONE_FACTOR, parameters=("fc2/affine/W", "fc3/affine/W")
)
def two_layers_of_zeros(mended: bool) -> Built:
    factor = 1.0 if mended else 0.0
    return network(lambda x: F.tanh(affine(F.tanh(affine(hidden(x), 16, "fc2", factor)), 16, "fc3", factor)))


@trouble("small_factors", "fc1/affine/MulScalar#2", "which is 1e-40, by 1e-20, which gives 0")
def product_of_factors_in_fp32(mended: bool) -> Built:
    def loss(y: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = F.mean(y**2)
        for _ in range(0 if mended else 4):
            y = y * 1e-20
        return y + F.mean(t)

    return network(lambda x: affine(x, 16, "fc1"), loss)


@trouble("underflow", "fc1/affine/MulScalar#3", "of which 100% become 0", fatal=False)
def product_of_factors_as_stored(mended: bool) -> Built:
    return network(lambda x: hidden(x) if mended else hidden(x) * 1e-3 * 2e-3 * 1e-3)


@trouble("underflow", "head/affine/Mul2", "reads the input of shape (32, 1), of whose numbers 100% become 0")
def elementwise_weights(mended: bool) -> Built:
    w = nn.Variable((32, 1))

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return F.mean(F.squared_error(affine(h, 1, "head"), t) * w)

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        w.d = np.full(w.shape, 1.0 if mended else 1e-9)

    return network(loss=loss, spoil=fill)


@trouble("underflow", "fc1/affine/Slice", "reads the input of shape (32, 16)", remedy=remedies.SCALE_DATA)
def data_too_small_for_the_format(mended: bool) -> Built:
    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d *= 1.0 if mended else 1e-9

    def layers(x: nn.Variable) -> nn.Variable:
        return affine(F.tanh(x[:, :8] * (1.0 if mended else 1e9)), 16, "fc1")

    return network(layers, spoil=spoil)


@trouble("underflow", "fc1/affine/Prod", remedy=remedies.LOGARITHMS)
def product_of_probabilities(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        p = F.reshape(F.sigmoid(affine(x, 48, "fc1") - 2.0), (32, 4, 12))
        return F.sum(F.log(p), axis=2) if mended else F.prod(p, axis=2)

    return network(layers)


@trouble("precision", "fc1/affine/Sin", "as it reads numbers up to", remedy=remedies.PERIOD)
def phase_of_many_periods(mended: bool) -> Built:
    rng = np.random.default_rng(1)

    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d = rng.integers(0, 60000, x.shape) % (60 if mended else 60000)

    return network(lambda x: affine(F.sin(x * (2.0 * np.pi / 60.0)), 16, "fc1"), spoil=spoil)


@trouble("rounding_noise", "head/affine", "Softmax hands none on", remedy=remedies.MEAN_OF_SOFTMAX)
def mean_of_a_softmax(mended: bool) -> Built:
    return network(loss=lambda h, t: F.mean(F.softmax(affine(h, 5, "head")) ** (2 if mended else 1)))


@trouble("precision", "fc1/affine/Log", remedy=remedies.IN_FEEDER)
def returns_of_prices(mended: bool) -> Built:
    """Changes of a thousandth, of which prices as stored keep no digit."""

    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d = np.exp(np.cumsum(0.3 * x.d if mended else 0.0003 * x.d, axis=1)) * 120.0

    def layers(x: nn.Variable) -> nn.Variable:
        returns = F.log(x[:, 1:] / x[:, :-1]) * (1.0 if mended else 1000.0)
        return hidden(returns)

    return network(layers, spoil=spoil)


@trouble("not_finite", "fc1/affine/Log", "from the output of fc1/affine/Exp on", remedy=remedies.LOG_SOFTMAX)
def log_of_a_sum_of_exponentials(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return -F.mean(F.log(F.sum(F.exp(-(h**2) - (0.0 if mended else 25.0)), axis=1)))

    return network(loss=loss)


@trouble(
    "not_finite",
    "head/affine/Log",
    "32 numbers that become 0",
    remedy=f"multiply what head/affine/SquaredError reads by a constant first, and {remedies.LOG}",
)
def log_of_errors_in_small_units(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        unit = 1.0 if mended else 1e-5
        error = F.squared_error(affine(h, 1, "head") * unit, (t + 2.0) * unit)
        return F.mean(F.log(F.maximum_scalar(error, 1e-4) if mended else error))

    return network(loss=loss)


@trouble("backward_not_finite", "last/PowScalar#2", "from the parameter last on", remedy=remedies.AWAY)
def root_of_weights_that_start_from_zero(mended: bool) -> Built:
    """They get a gradient of their own."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        last = nn.parameter.get_parameter_or_create("last", (16, 5), I.ConstantInitializer(0.0))
        return cross_entropy(F.affine(h, last), t) + 0.01 * F.sum(
            (last**2 + (1e-2 if mended else 0.0)) ** 0.5
        )

    return network(loss=loss)


@trouble("saturated", "fc1/affine/MinimumScalar", "with the constant -10", remedy=remedies.BOUND)
def bound_below_all_numbers(mended: bool) -> Built:
    return network(lambda x: F.minimum_scalar(affine(x, 16, "fc1"), 1.0 if mended else -10.0))


@trouble("saturated", "fc1/affine/MinimumScalar", "with the constant -10", remedy=remedies.BOUND, fatal=False)
def bound_below_all_numbers_of_a_small_parameter(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        start = nn.parameter.get_parameter_or_create("start", (1, 16), I.ConstantInitializer(0.01))
        return x * F.minimum_scalar(
            affine(F.broadcast(start, (32, 16)), 16, "fc1", 2.0), 1.0 if mended else -10.0
        )

    return network(layers)


@trouble("rounding_noise", "att2/affine", fatal=False, remedy=remedies.MEAN_OF_SOFTMAX)
def attention_without_values(mended: bool) -> Built:
    """The errors of the bias att2/affine/b are equal in both passes, by chance."""

    def layers(x: nn.Variable) -> nn.Variable:
        rng = np.random.RandomState(37)
        h = F.tanh(PF.affine(x, 16, 2, name="att1", rng=rng))
        weights = F.softmax(PF.affine(h, 1, 2, name="att2", rng=rng), axis=1)
        values = weights * x[:, :, :1] if mended else weights
        return affine(F.sum(values, axis=1), 1, "out")

    return network(layers, lambda y, t: F.mean(F.squared_error(y, t)), shape=(32, 10, 8))


@trouble(
    "rounding_noise",
    "head/affine/Exp",
    ": its parts cancel in head/affine/Broadcast",
    fatal=False,
    remedy=remedies.NOT_CONSTANT,
)
def scale_that_a_norm_divides_out(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        scale = nn.parameter.get_parameter_or_create("scale", (1, 1), I.ConstantInitializer(0.5))
        h, factor = affine(x, 16, "fc1"), F.broadcast(F.exp(scale), (32, 16))
        return factor * norm(h) if mended else norm(factor * h)

    def norm(h: nn.Variable) -> nn.Variable:
        return h / F.sum(h**2, axis=1, keepdims=True) ** 0.5

    return network(layers)


@trouble("underflow", "fc1/affine/PowScalar", remedy=remedies.MULTIPLY_FIRST.format("it"))
def logarithm_of_one_and_a_power(mended: bool) -> Built:
    """Logarithm and sum are exact; the squares are 0."""
    unit = 1.0 if mended else 1e-5

    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d *= unit

    return network(lambda x: affine(F.log(x**2 * unit**-2 + 1.0), 16, "fc1"), spoil=spoil)


@trouble("weight_not_finite", "table", parameters=("table/W",), remedy=remedies.REPAIR)
def infinity_in_a_frozen_table(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        table = nn.parameter.get_parameter_or_create("table/W", (32, 16), I.ConstantInitializer(1.0), False)
        table.d[2, 3] = 1.0 if mended else np.inf
        return hidden(x + table)

    return network(layers)


@trouble(
    "rounding_noise",
    "time/affine",
    ": conv/conv/InstanceNormalization removes what this layer adds",
    fatal=False,
    remedy=remedies.CANCELS,
)
def time_that_a_normalization_removes(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        time = F.broadcast(F.reshape(affine(x[:, 0, 0], 8, "time"), (8, 8, 1, 1)), (8, 8, 8, 8))
        h = F.instance_normalization(conv(x, "conv") + time * (x[:, :1] if mended else 1.0), None, None)
        return affine(F.relu(h), 5, "fc")

    return network(layers, cross_entropy, shape=IMAGES)


@trouble("rounding_noise", "bn/bn", "are equal", fatal=False, remedy=remedies.CONSTANT_INPUT)
def batch_of_one_sample(mended: bool) -> Built:
    def repeated(x: nn.Variable, t: nn.Variable) -> None:
        x.d = x.d if mended else x.d[:1]

    layers = lambda x: F.tanh(PF.batch_normalization(affine(x, 16, "fc1"), name="bn"))  # noqa: E731
    return network(layers, spoil=repeated)


@trouble("constant_input", "bn/bn", "two numbers at a time", remedy=remedies.SINGLE_NUMBERS)
def batch_of_two_samples(mended: bool) -> Built:
    layers = lambda x: F.tanh(PF.batch_normalization(affine(x, 16, "fc1"), name="bn"))  # noqa: E731
    return network(layers, shape=(8 if mended else 2, 16))


@trouble("saturated", "fc1/affine/Erf", "outputs are where", fatal=False, remedy=remedies.NORMALISE_DATA)
def erf_of_raw_data(mended: bool) -> Built:
    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d *= 1.0 if mended else 300.0

    return network(lambda x: F.erf(affine(x, 16, "fc1")), spoil=spoil)


@trouble(
    "overflow",
    "fc1/affine/PowScalar",
    "divides by numbers down to",
    remedy=remedies.MULTIPLY_FIRST.format("it"),
)
def repulsion(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        distance = 0.3 + F.sigmoid(affine(x, 16, "fc1"))
        return F.log(1.0 + (distance / 0.3 if mended else distance) ** -12)

    return network(layers)


@trouble("dead_relu", "shift/ReLU", "; the bias shift reaches -1", remedy=OR_LEAKY(remedies.SMALLER_BIAS))
def shift_below_a_scale_of_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        scale, shift = (
            nn.parameter.get_parameter_or_create(name, (1, 16), I.ConstantInitializer(start))
            for name, start in (("scale", float(mended)), ("shift", 0.1 if mended else -1.0))
        )
        return F.relu(affine(x, 16, "fc1") * scale + shift)

    return network(layers)


@trouble(
    "not_finite",
    "mix/affine/Div2",
    "; the bias mix/affine/b reaches -200",
    remedy=remedies.SMALLER_BIAS,
    others=("mix/affine/SoftPlus",),
)
def shares_of_nothing(mended: bool) -> Built:
    """In fp32, too."""

    def layers(x: nn.Variable) -> nn.Variable:
        shares = F.softplus(affine(x, 16, "mix", bias=0.0 if mended else -200.0))
        return x * shares / F.sum(shares, axis=1, keepdims=True)

    return network(layers)


@trouble("overflow", "fc1/affine/RDivScalar", remedy=remedies.LARGER_UNITS.format("fc1/affine/MulScalar"))
def periods_of_small_frequencies(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        unit = 1.0 if mended else 1e-6
        return 1.0 / ((1.0 + F.sigmoid(affine(x, 16, "fc1"))) * unit) * unit

    return network(layers)


@trouble(
    "constant_softmax", "fc1/affine/Softmax", "a mask leaves it a single place", remedy=remedies.CHECK_MASK
)
def window_of_one_place(mended: bool) -> Built:
    mask = nn.Variable.from_numpy_array(np.tile(-1e4 * (1.0 - mended) * (1.0 - np.eye(16)), (2, 1)))
    return network(lambda x: F.softmax(affine(x, 16, "fc1") + mask, axis=1))


@trouble("small_steps", "head/affine/Broadcast", fatal=False, remedy=remedies.PROPORTIONAL)
def steps_in_proportion_to_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        gate = nn.parameter.get_parameter_or_create("gate", (1, 1), I.ConstantInitializer(float(mended)))
        return hidden(x) + F.broadcast(gate, (32, 16)) * x

    return trained(network(layers), S.Lamb(1e-2))


@trouble(
    "epsilon", "fc1/affine", "leaves", fatal=False, remedy=f"{remedies.LARGER_FACTOR}, or {remedies.EPSILON}"
)
def factor_that_hides_a_branch(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        return affine(x, 16, "fc2") + hidden(x) * (1.0 if mended else 1e-9)

    return trained(network(layers), S.Adam(1e-3))


@trouble("saturated", "fc1/affine/LogSigmoid", "; the bias fc1/affine/b", remedy=remedies.SMALLER_BIAS)
def log_sigmoid_of_a_large_bias(mended: bool) -> Built:
    return network(lambda x: F.log_sigmoid(affine(x, 16, "fc1", bias=0.0 if mended else 200.0)))


@trouble("zero_weights", "factors/embed/PowScalar", "it squares the parameter factors/embed/W", fatal=False)
def factors_that_start_from_zero(mended: bool) -> Built:
    """Of a factorization machine, whose gradient is a multiple of them."""
    x, t = inputs()
    ids, start = nn.Variable((32, 4)), I.NormalInitializer(0.1) if mended else I.ConstantInitializer(0.0)
    factors = PF.embed(ids, 20, 16, initializer=start, name="factors")
    pairs = F.sum(factors, axis=1) ** 2 - F.sum(factors**2, axis=1)
    loss = cross_entropy(affine(hidden(x) + pairs, 5, "head"), t)
    return loss, feeder(x, t, lambda: setattr(ids, "d", np.arange(128).reshape(32, 4) % 20))


@trouble("zero_factor", "user/embed/Mul2", "the parameter user/embed/W, which", fatal=False)
def tables_of_zeros(mended: bool) -> Built:
    x, t = inputs()
    ids, start = nn.Variable((32,)), I.NormalInitializer(0.1) if mended else I.ConstantInitializer(0.0)
    both = [PF.embed(ids, 5, 16, initializer=start, name=name) for name in ("user", "item")]
    loss = cross_entropy(affine(hidden(x) + both[0] * both[1], 5, "head"), t)
    return loss, feeder(x, t, lambda: setattr(ids, "d", np.arange(32) % 5))


@trouble("not_finite", "beta/Log", "1 number below 0 from the parameter beta", remedy=remedies.ABOVE)
def temperature_below_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        beta = nn.parameter.get_parameter_or_create(
            "beta", (1, 1), I.ConstantInitializer(0.5 if mended else -0.1)
        )
        return hidden(x) * F.log(beta)

    return network(layers)


@trouble("precision", "fc1/affine", "up to 3e+04 from the input", remedy=remedies.NORMALISE_DATA)
def contrasts_of_timestamps(mended: bool) -> Built:
    """Weights that add up to 0, of numbers that float16 holds to a multiple of 16."""

    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d += 0.0 if mended else 3e4

    weights = np.random.default_rng(2).standard_normal((16, 16))
    weights -= weights.mean(axis=0)
    return network(
        lambda x: F.tanh(PF.affine(x, 16, name="fc1", w_init=weights, with_bias=False)), spoil=spoil
    )


@trouble("solver", "RMSprop", "its decay is 1", remedy=remedies.SETTINGS)
def steps_without_squares(mended: bool) -> Built:
    return trained(network(), S.RMSprop(1e-3, decay=0.9 if mended else 1.0))


@trouble("solver", "Sgd", "at a learning rate of 10000", remedy=remedies.SMALLER_STEPS)
def steps_far_beyond_the_weights(mended: bool) -> Built:
    return trained(network(), S.Sgd(0.1 if mended else 1e4))


@trouble("solver", "Adam", "its beta1 is 1", remedy=remedies.SETTINGS)
def steps_that_divide_by_zero(mended: bool) -> Built:
    return trained(network(), S.Adam(1e-3, beta1=0.9 if mended else 1.0))


@trouble("small_steps", "fc1/affine", "the steps that Adam makes of it", remedy=remedies.LARGER_STEPS)
def steps_that_are_always_zero(mended: bool) -> Built:
    return trained(network(), S.Adam(1e-3 if mended else 1e-12))


@trouble(
    "saturated", "fc1/affine/ELU", "; the input of shape (32, 16) reaches", remedy=remedies.NORMALISE_DATA
)
def elu_of_decibels(mended: bool) -> Built:
    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d = x.d if mended else 100.0 + 10.0 * np.abs(x.d)

    def layers(x: nn.Variable) -> nn.Variable:
        return F.elu(PF.affine(x, 16, name="fc1", w_init=I.UniformInitializer((-0.3, -0.1 + 0.4 * mended))))

    return network(layers, spoil=spoil)


@trouble("no_gradient", "fc1/affine/ClipGradByValue", remedy=remedies.CLIP_NORM)
def gradient_clipped_to_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "fc1")
        least, most = (F.constant(sign * float(mended), h.shape) for sign in (-1, 1))
        return F.clip_grad_by_value(h, least, most)

    return network(layers)


@trouble(
    "clipped",
    "fc1/affine/ClipGradByNorm",
    "it leaves",
    fatal=False,
    remedy=remedies.CLIP_LESS,
    others=("fc1/affine",),
)
def norm_clipped_in_the_graph(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        return F.clip_grad_by_norm(affine(x, 16, "fc1"), 1.0 if mended else 1e-11)

    return trained(network(layers), S.Adam(1e-3))


@trouble("dead_relu", "far/conv/ReLU", "from far/conv/Slice on", fatal=False, remedy=remedies.WHY_ZERO)
def crop_of_the_padding(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        far = F.pad(x, (0, 16))[:, :, :, 1 if mended else 9 : 9 if mended else 17]
        return affine(F.relu(conv(far, "far")), 5, "fc") + affine(x, 5, "near")

    return network(layers, cross_entropy, shape=IMAGES)


@trouble("no_gradient", "fc1/affine/PowScalar", "numbers at which one arrives are 0", remedy=remedies.SELF)
def nearest_is_itself(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        rows, columns = (F.broadcast(F.reshape(h, s), (32, 32, 16)) for s in ((32, 1, 16), (1, 32, 16)))
        distances = F.sum((rows - columns) ** 2, axis=2)
        itself = nn.Variable.from_numpy_array(1e3 * np.eye(32))
        nearest = F.min(distances + itself if mended else distances, axis=1)
        return F.mean(F.exp(-nearest))

    return network(loss=loss)


@trouble(
    "not_finite", "fc1/affine/Log", remedy=remedies.LARGER_UNITS.format("fc1/affine/RPowScalar"), fatal=True
)
def logarithm_of_concentrations(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        unit = 0.0 if mended else 7.0
        return F.log(F.r_pow_scalar(affine(x, 16, "fc1") * 0.2 + unit, 0.1))

    return network(layers)


@trouble("zero_factor", "fc1/affine/Mul2", "computed of numbers around 1.91, with the constant -1")
def mask_that_never_holds(mended: bool) -> Built:
    x, t = inputs()
    is_chosen = F.broadcast(F.equal_scalar(t, 1.0 if mended else -1.0), (32, 16))
    loss = cross_entropy(affine(hidden(x) * is_chosen, 5, "head"), t)
    return loss, feeder(x, t, lambda: setattr(t, "d", np.arange(32)[:, None] % 5))


@trouble(
    "rounding_noise",
    "conv/conv/Mean",
    "it computes nothing but rounding errors, in fp32 too",
    fatal=False,
    remedy=remedies.MEAN_OF_NORMALIZED,
)
def means_of_normalized_maps(mended: bool) -> Built:
    """They are next to 0, so that the weights behind get rounding errors, too, but the bias does not."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.instance_normalization(conv(x, "conv"), None, None)
        return affine(F.mean(F.relu(h) if mended else h, axis=(2, 3)), 5, "fc")

    return network(layers, cross_entropy, shape=IMAGES)


@trouble("precision", "fc1/affine/Sub2", remedy=remedies.VARIANCE)
def variance_of_data_by_hand(mended: bool) -> Built:
    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d = x.d + 100.0

    def layers(x: nn.Variable) -> nn.Variable:
        mean = F.mean(x, axis=1, keepdims=True)
        by_hand = F.mean(x**2, axis=1, keepdims=True) - mean**2
        return hidden(F.mean((x - mean) ** 2, axis=1, keepdims=True) if mended else by_hand)

    return network(layers, spoil=spoil)


@trouble("no_backward", "gate/affine/GreaterScalar", remedy=remedies.NO_BACKWARD)
def hard_gate(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        y = affine(x, 16, "gate")
        return hidden(x) * (F.sigmoid(y) if mended else F.greater_scalar(y, 0.0))

    return network(layers)


@trouble("no_backward", "head/affine/Max", remedy=remedies.NO_DERIVATIVE)
def places_of_maxima(mended: bool) -> Built:
    """nnabla hands a gradient on from the numbers of places."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h, 5, "head")
        return F.mean(F.squared_error(F.max(y, axis=1, keepdims=True, only_index=not mended), t))

    return network(loss=loss)


@trouble("no_backward", "side/affine/Sort", fatal=False, remedy=remedies.NO_DERIVATIVE)
def ranks_beside_classes(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        ranks = F.sort(affine(h, 5, "side"), only_index=not mended)
        return classes(h, t) + F.mean(ranks**2)

    return network(loss=loss)


@trouble("constant_softmax", "head/affine/SoftmaxCrossEntropy", remedy=remedies.SOFTMAX_AXIS)
def one_class(mended: bool) -> Built:
    size = 5 if mended else 1

    def first(x: nn.Variable, t: nn.Variable) -> None:
        t.d = t.d % size

    return network(loss=lambda h, t: cross_entropy(affine(h, size, "head"), t), spoil=first)


@trouble("unfed", "fc1/affine", remedy=remedies.FILL)
def never_fed(mended: bool) -> Built:
    """The feeder fills variables of another build."""
    loss, feed = network()
    return loss, feed if mended else feeder(*inputs())


@trouble("unfed", "head/affine", remedy=remedies.FORWARD)
def unlinked_trunk(mended: bool) -> Built:
    return network(lambda x: hidden(x) if mended else hidden(x).get_unlinked_variable())


@trouble(
    "untrained",
    "fc1/affine/Tanh",
    "has need_grad=False",
    fatal=False,
    remedy=remedies.UNCUT,
    parameters=("fc1/affine/W", "fc1/affine/b"),
)
def cut_in_the_middle(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = hidden(x)
        h.need_grad = mended
        return F.tanh(affine(h, 16, "fc2"))

    return trained(network(layers), S.Sgd(0.1))


@trouble("untrained", "fc1/affine/Tanh", "has need_grad=False", remedy=remedies.UNCUT)
def generator_cut_off(mended: bool) -> Built:
    """The step of a generator, with what it makes cut off as in the discriminator's."""

    def layers(x: nn.Variable) -> nn.Variable:
        fake = hidden(x)
        fake.need_grad = mended
        return F.leaky_relu(affine(fake, 16, "discriminator"))

    built = network(layers)
    own = {name: v for name, v in nn.get_parameters().items() if name.startswith("fc1/")}
    return trained(built, S.Adam(1e-3), own)


@trouble("untrained", "fc1/affine/Tanh", "has need_grad=False", fatal=False, remedy=remedies.CUT_COPY)
def target_that_is_also_predicted_from(mended: bool) -> Built:
    """Two views of a sample: cutting the target off cuts the predictor off, too."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        target = F.identity(h) if mended else h
        target.need_grad = False
        return F.mean(F.squared_error(affine(h, 16, "predictor"), target))

    return trained(network(loss=loss), S.Sgd(0.1))


@trouble("untrained", "head/affine", "has need_grad=False", remedy=remedies.UNCUT)
def cut_off_altogether(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h, 5, "head")
        y.need_grad = mended
        return cross_entropy(y, t)

    return network(loss=loss)


@trouble("on_gradients", "on_gradients", remedy=remedies.CLIP_NORM)
def gradients_scaled_by_zero(mended: bool) -> Built:
    loss, feed = network()
    return updater_of(loss, feed, S.Sgd(0.1), on_gradients=lambda s: s.scale_grad(float(mended))), None


@trouble("on_gradients", "on_gradients", remedy=remedies.CHECK_DIVISION)
def gradients_divided_by_zero(mended: bool) -> Built:
    loss, feed = network()
    factor = 1.0 if mended else float("inf")
    return updater_of(loss, feed, S.Sgd(0.1), on_gradients=lambda s: s.scale_grad(factor)), None


@trouble(
    "untrained",
    "fc1/affine",
    remedy=remedies.OTHERS,
    parameters=("fc1/affine/W", "fc1/affine/b", "head/affine/W", "head/affine/b"),
)
def parameters_of_another_build(mended: bool) -> Built:
    built, parameters = network(), nn.get_parameters()
    if not mended:
        nn.clear_parameters()
        network()
        parameters = nn.get_parameters()
    return trained(built, S.Sgd(0.1), parameters)


class NnablasUpdater:
    """What of nnabla's updater is looked at; it takes a solver without parameters."""

    def __init__(self, solver: S.Solver, built: Built) -> None:
        self.solver = solver
        self.loss, self.data_feeder = built


@trouble("learning_rate", "Sgd", "its learning rate is 0", remedy=remedies.RATE)
def learning_rate_of_zero(mended: bool) -> Built:
    return trained(network(), S.Sgd(0.1 * mended))


@trouble("empty_solver", "The solver", "has no parameters")
def solver_without_parameters(mended: bool) -> Built:
    built, solver = network(), S.Sgd(0.1)
    if mended:
        solver.set_parameters(nn.get_parameters())
    return NnablasUpdater(solver, built), None


@trouble("epsilon", "fc1/affine", "below the solver's epsilon of 1e-08 (as that of head/affine)")
def epsilon_of_adam(mended: bool) -> Built:
    loss, feed = network()
    return trained((loss * 1e-10, feed), S.Adam(1e-3, eps=1e-20 if mended else 1e-8))


@trouble("epsilon", "side/affine", "below the solver's epsilon of 1e-08", fatal=False)
def epsilon_of_one_head(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return classes(h, t) + (1e-2 if mended else 1e-9) * F.mean(affine(h, 16, "side") ** 2)

    return trained(network(loss=loss), S.Adam(1e-3))


# What is not what it seems.


@trouble("overflow", "fc1/affine/PowScalar", parameters=("fc1/affine/b",))
def bias_that_leaves_the_range(mended: bool) -> Built:
    return network(
        lambda x: F.pow_scalar(affine(x, 16, "fc1", 0.1, bias=1.0 if mended else 20.0), 4.0) * 1e-5
    )


@trouble(
    "precision", "fc1/affine/Log", "numbers up to 1 that it reads from fc1/affine/AddScalar", fatal=False
)
def logarithm_of_nearly_one(mended: bool) -> Built:
    return network(lambda x: F.log(F.sigmoid(affine(x, 16, "fc1")) * (0.1 if mended else 1e-4) + 1.0) * 1e3)


@trouble("not_finite", "head/affine/PowScalar#3", "in fp32 none: head/affine/Sub2 subtracts numbers up to")
def variance_by_the_difference_of_squares(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        x = 0.3 * x + (1.0 if mended else 100.0)
        variance = F.mean(x**2, axis=1, keepdims=True) - F.mean(x, axis=1, keepdims=True) ** 2
        return F.pow_scalar(variance + 1e-3, 0.5) + 0.0 * x

    return network(layers)


# The cause before its consequences.


@trouble("dead_relu", "fc2/affine/ReLU")
def dead_relu_before_others(mended: bool) -> Built:
    """The following ones read zeros, and have biases of 0."""

    def layers(x: nn.Variable) -> nn.Variable:
        for index, bias in enumerate((0.0, 0.0, 0.0 if mended else -100.0, 0.0, 0.0)):
            x = F.relu(affine(x, 16, f"fc{index}", bias=bias))
        return x

    return network(layers)


@trouble("dead_relu", "fc1/affine/ReLU", others=("fc3/affine/ReLU",))
def two_dead_relus(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(5):
            x = F.relu(affine(x, 16, f"fc{index}", bias=-100.0 * (index in (1, 3) and not mended)))
        return x

    return network(layers)


@trouble("dead_relu", "gate/affine/ReLU", fatal=False)
def factor_of_a_dead_relu(mended: bool) -> Built:
    """The product is where the gradient ends, and not why."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        gate = F.relu(affine(x, 16, "gate", bias=0.0 if mended else -100.0))
        return h + F.tanh(affine(h, 16, "inner")) * gate

    return network(layers)


@trouble(
    "zero_factor",
    "inner/affine/Mul2",
    fatal=False,
    remedy=remedies.TRAIN,
    parameters=("inner/affine/alpha",),
)
def gate_of_zero_that_is_fixed(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        alpha = nn.parameter.get_parameter_or_create(
            "inner/affine/alpha", (1, 1), np.zeros((1, 1)), need_grad=mended
        )
        return h + affine(F.tanh(h), 16, "inner") * F.broadcast(alpha, h.shape)

    return network(layers)


@trouble("not_finite", "head/affine/Log", others=("side/affine/ReLU",))
def log_of_zero_beside_a_dead_relu(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = F.softmax(affine(h, 5, "head") * (1.0 if mended else 3000.0))
        side = F.relu(affine(h, 16, "side", bias=0.0 if mended else -100.0))
        return -F.mean(F.one_hot(t, (5,)) * F.log(y)) + F.mean(affine(side, 1, "out") ** 2)

    return network(loss=loss)


@trouble("not_finite", "a/affine/Log", others=("b/affine/RDivScalar",))
def two_heads_that_are_not_finite(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        a, b = (F.relu(affine(h, 5, name)) + (0.1 if mended else 0.0) for name in "ab")
        return -F.mean(F.log(a)) + F.mean(1.0 / b)

    return network(loss=loss)


@trouble("overflow", "bn/bn/Exp", "the factor 30 of", remedy=remedies.SMALLER_FACTOR)
def factor_before_an_exponential(mended: bool) -> Built:
    """The parameters that are near are a normalization's, and beta is 0."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = PF.batch_normalization(affine(h, 5, "head"), name="bn")
        return F.mean(F.exp(y * (1.0 if mended else 30.0)))

    return network(loss=loss)


def exponential_of_a_normalization(mended: bool, factor: float, gamma: float) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        init = {"gamma": np.full((1, 8), 1.0 if mended else gamma), "beta": np.zeros((1, 8))}
        y = F.sigmoid(affine(h, 8, "head")) * factor
        y = PF.batch_normalization(y, eps=1e-5 if mended else 1e-20, name="bn", param_init=init)
        return F.mean(F.exp(y if mended else y * 4.0))

    return network(loss=loss)


@trouble("overflow", "bn/bn/Exp", parameters=("bn/bn/gamma",))
def gamma_before_an_exponential(mended: bool) -> Built:
    return exponential_of_a_normalization(mended, 1.0, 7.0)


@trouble("overflow", "bn/bn/Exp", "the division by a small deviation in bn/bn")
def small_deviation_before_an_exponential(mended: bool) -> Built:
    return exponential_of_a_normalization(mended, 1e-3, 2.0)


@trouble("not_finite", "head/affine/Mul2", "0 times", remedy=remedies.MASK)
def masked_places_times_the_mask(mended: bool) -> Built:
    """The constant is right: it is the product that makes NaN of it."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y, mask = affine(h, 5, "head"), F.one_hot(t, (5,))
        scores = F.where(mask, y, F.constant(0.0 if mended else -np.inf, y.shape))
        return F.mean(scores * mask)

    return network(loss=loss)


@trouble("not_finite", "MulScalar", remedy=remedies.MASK)
def mask_times_infinity(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y, mask = affine(h, 5, "head"), F.one_hot(t, (5,))
        scores = F.softmax(y + (1.0 - mask) * (-1e4 if mended else -np.inf))
        return F.mean(F.squared_error(scores, 0.5 * mask)) + classes(h, t)

    return network(loss=loss)


def one_number(mended: bool, normalization: Callable[..., nn.Variable]) -> Built:
    """A normalization of maps, which are of one place unless mended."""
    size = 3 if mended else 1

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.max_pooling(conv(x, "c1"), (8 // size, 8 // size))
        return F.tanh(normalization(conv(h, "c2")) + h * 0.1)

    return network(layers, shape=IMAGES)


@trouble(
    "constant_input",
    "n/instance_normalization",
    "one number at a time",
    fatal=False,
    remedy=remedies.SINGLE_NUMBERS,
)
def instance_normalization_of_one_number(mended: bool) -> Built:
    return one_number(mended, lambda h: PF.instance_normalization(h, name="n"))


@trouble(
    "constant_input",
    "n/group_normalization",
    "one number at a time",
    fatal=False,
    remedy=remedies.SINGLE_NUMBERS,
)
def group_normalization_of_one_number(mended: bool) -> Built:
    return one_number(mended, lambda h: PF.group_normalization(h, 8, name="n"))


@trouble(
    "constant_input",
    "n/layer_normalization",
    "one number at a time",
    fatal=False,
    remedy=remedies.SINGLE_NUMBERS,
)
def layer_normalization_of_one_number(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16 if mended else 1, "fc1")
        return affine(F.tanh(PF.layer_normalization(h, name="n")), 16, "fc2") + affine(x, 16, "skip")

    return network(layers)


# Remedies that fit.


@trouble("not_finite", "head/affine/ACos", remedy=remedies.BELOW_ONE)
def angle_of_a_cosine_beyond_one(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h, 5, "head")
        cosine = F.sum(y * y, axis=1) / (F.sum(y * y, axis=1) + 2**-10) * (0.9 if mended else 1.001)
        return F.mean(F.acos(cosine)) + classes(h, t)

    return network(loss=loss)


@trouble("backward_not_finite", "head/affine/ASin", remedy=remedies.BELOW_ONE)
def angle_of_one(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = F.tanh(affine(h, 5, "head", 1.0 if mended else 20.0))
        return F.mean(F.asin(y * 0.9 if mended else y))

    return network(loss=loss)


@trouble("backward_not_finite", "fc1/affine/Norm", remedy=remedies.INSIDE_ROOT)
def norm_of_zero_rows(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return F.mean(F.norm(h + 2**-8 if mended else h, p=2, axis=1)) + classes(h, t)

    def padding(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:4] = 0.0

    return network(loss=loss, spoil=padding)


@trouble("not_finite", "head/affine/Log", remedy=remedies.ABOVE)
def logarithm_of_scores(mended: bool) -> Built:
    return network(
        loss=lambda h, t: F.mean(F.log(F.exp(affine(h, 5, "head")) if mended else affine(h, 5, "head")))
    )


def by_hand(h: nn.Variable, size: float) -> nn.Variable:
    return F.exp(affine(h, 5, "head", size))


@trouble("overflow", "head/affine/Exp", remedy=remedies.SOFTMAX)
def softmax_by_hand(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = by_hand(h, 1.0 if mended else 16.0)
        share = y / F.broadcast(F.sum(y, axis=1, keepdims=True), y.shape)
        return F.mean(F.squared_error(share, F.one_hot(t, (5,))))

    return network(loss=loss)


@trouble("overflow", "head/affine/Exp", remedy=remedies.LOG_SOFTMAX)
def logarithm_of_a_sum_of_exponentials(mended: bool) -> Built:
    return network(loss=lambda h, t: F.mean(F.log(F.sum(by_hand(h, 1.0 if mended else 16.0), axis=1))))


@trouble("lost_constant", "head/affine/AddScalar", remedy=remedies.HELD_IN_LOG)
def epsilon_of_a_logarithm(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        p = F.softmax(affine(h, 5, "head", 1.0 if mended else 40.0))
        return -F.mean(F.one_hot(t, (5,)) * F.log(p + (2**-14 if mended else 1e-20)))

    return network(loss=loss)


# Numbers that become 0 before a logarithm, far from it.


@trouble("lost_constant", "fc1/affine/AddScalar", "become 0 in float16 from the output of fc1/affine/Mul2 on")
def squares_under_a_logarithm(mended: bool) -> Built:
    """Energies of a quiet signal; a larger constant alone would be all that is left of them."""

    def layers(x: nn.Variable) -> nn.Variable:
        bands = affine(x * (1.0 if mended else 2**-14), 16, "fc1")
        return affine(F.log(bands * bands + (2**-14 if mended else 1e-9)), 16, "fc2")

    return network(layers)


@trouble("lost_constant", "fc1/affine/AddScalar", "become 0 in float16 from the output of fc1/affine/Mul2 on")
def squares_of_data_with_a_quiet_column(mended: bool) -> Built:
    """A few of the data become 0, too, which is not why most squares do."""

    def quiet(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:, 0] *= 1.0 if mended else 1e-9

    def layers(x: nn.Variable) -> nn.Variable:
        bands = affine(x * (1.0 if mended else 2**-14), 16, "fc1")
        return affine(F.log(bands * bands + (2**-14 if mended else 1e-9)), 16, "fc2")

    return network(layers, spoil=quiet)


@trouble(
    "lost_constant", "fc1/affine/AddScalar", "become 0 in float16 from the output of fc1/affine/PowScalar on"
)
def mean_of_squares_under_a_logarithm(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        power = F.mean(affine(x * (1.0 if mended else 2**-14), 16, "fc1") ** 2, axis=1, keepdims=True)
        return affine(F.log(power + (2**-14 if mended else 1e-9)), 16, "fc2")

    return network(layers)


@trouble("not_finite", "head/affine/Log", "from the output of head/affine/Mul2#4 on", remedy=remedies.CHAIN)
def likelihood_of_unlikely_observations(mended: bool) -> Built:
    """Likelihood of six independent observations, each of which the network thinks unlikely."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        p = F.sigmoid(affine(h, 6, "head", 0.3, bias=1.0 if mended else -3.5))
        likelihood = p[:, 0]
        for index in range(1, 6):
            likelihood = likelihood * p[:, index]
        return -F.mean(F.log(likelihood))

    return network(loss=loss)


@trouble("overflow", "critic/affine/CumSum", "the factor 20000 of", remedy=remedies.SMALLER_FACTOR)
def returns_that_are_scaled_late(mended: bool) -> Built:
    """Rewards are added up over time, then scaled."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        rewards = F.abs(affine(h, 64, "critic")) * (1.0 if mended else 2e4)
        returns = F.reshape(F.cumsum(rewards, axis=1), (32, 64)) * 1e-4
        return F.mean(F.squared_error(F.reshape(returns, (32 * 64, 1)), F.constant(0.5, (32 * 64, 1))))

    return network(loss=loss)


@trouble("not_finite", "mix/Log", "below 0 from the output of mix/BatchDet", remedy=remedies.ABSOLUTE)
def logarithm_of_a_negative_determinant(mended: bool) -> Built:
    """A flow's invertible mixing of two channels."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        with nn.parameter_scope("mix"):
            mix = nn.parameter.get_parameter_or_create("W", initializer=np.array([[[0.0, 1.0], [1.0, 0.5]]]))
        y = F.reshape(F.affine(F.reshape(h, (256, 2)), F.reshape(mix, (2, 2))), (32, 16))
        determinant = F.batch_det(mix)
        return classes(y, t) - 0.01 * F.mean(F.log(F.abs(determinant) if mended else determinant))

    return network(loss=loss)


@trouble("beyond_format", "fc1/affine/MulScalar", "which reaches 7.99e+04, beyond float16")
def seconds_of_the_day_as_integers(mended: bool) -> Built:
    """Integers are numbers, too."""
    seconds = nn.Variable((32, 1))

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        seconds.d = np.arange(32)[:, None] * (577 if mended else 2577)

    def layers(x: nn.Variable) -> nn.Variable:
        phase = seconds / 86400 * (2 * np.pi)
        return F.tanh(affine(F.concatenate(F.sin(phase), F.cos(phase), x), 16, "fc1"))

    return network(layers, spoil=fill)


@trouble("fractional_index", "item/embed", "of which 32 are not whole numbers", fatal=False)
def identifiers_that_were_normalized(mended: bool) -> Built:
    item = nn.Variable((32,))

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        item.d = np.arange(32) if mended else np.arange(32) / 32 + 0.01

    return network(lambda x: hidden(x) + PF.embed(item, 32, 16, name="item"), spoil=fill)


@trouble("rounded_index", "pair/embed", "of which", remedy=remedies.FEED_INDICES)
def rows_computed_from_two_numbers(mended: bool) -> Built:
    site, advert = nn.Variable((32,)), nn.Variable((32,))
    rows = 20 if mended else 400

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        site.d, advert.d = np.arange(32) % rows, np.arange(32) * 7 % rows

    def layers(x: nn.Variable) -> nn.Variable:
        return hidden(x) + PF.embed(site * rows + advert, rows * rows, 16, name="pair")

    return network(layers, spoil=fill)


@trouble("absorbed", "step0/affine/Add2", "19 sums behind it", remedy=remedies.SMALL_TERMS)
def many_small_steps(mended: bool) -> Built:
    """A path in 20 steps, each below half the last bit of a position; mended, it begins at 0."""
    start = 0.0 if mended else 3.0

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        position = F.constant(start, h.shape)
        for number in range(20):
            position = position + F.tanh(affine(h, 16, f"step{number}")) * 3e-4
        return F.mean((position - start) ** 2) * 1e4

    return network(loss=loss)


@trouble("not_finite", "p/affine/Log", "from the output of p/affine/Mul2", remedy=remedies.CHAIN)
def likelihood_of_a_sequence(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        p = product = F.sigmoid(affine(h, 16, "p", bias=-5.0))
        for _ in range(0 if mended else 40):
            product = product * p
        return -F.mean(F.log(product))

    return network(loss=loss)


@trouble(
    "not_finite",
    "rate/affine/Exp",
    "the input of shape (32, 16) reaches",
    remedy=f"{remedies.NORMALISE_DATA}, or {remedies.BOUND_EXP}",
)
def rates_of_raw_data(mended: bool) -> Built:
    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d = np.abs(x.d) * (1.0 if mended else 3e4)

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        rate = affine(h, 1, "rate")
        return F.mean(F.exp(rate) - t * rate)

    return network(lambda x: F.relu(affine(x, 16, "fc1")), loss, spoil)


@trouble("zero_loss", "head/affine/SoftmaxCrossEntropy", "the factor 100000 of", remedy=remedies.SATURATED)
def tiny_temperature(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        scores = affine(h, 5, "head") + F.one_hot(t, (5,)) * (0.0 if mended else 8.0)
        return cross_entropy(scores / (1.0 if mended else 1e-5), t)

    return network(loss=loss)


@trouble("zero_loss", "head/affine/ReLU", "as it reads numbers around", remedy=remedies.MARGIN)
def margin_that_all_samples_keep(mended: bool) -> Built:
    return network(loss=lambda h, t: F.mean(F.relu((1.0 if mended else -99.0) + affine(h, 1, "head"))))


@trouble("zero_loss", "fc1/affine/SquaredError", "equal numbers", remedy=remedies.DIFFERENT)
def teacher_with_the_students_parameters(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        return F.squared_error(
            F.tanh(affine(x, 16, "fc1")), F.tanh(affine(x, 16, "fc2" if mended else "fc1"))
        )

    return network(layers, lambda errors, t: F.mean(errors))


@trouble("backward_not_finite", "fc1/affine/ATan2", remedy=remedies.ARCTANGENT)
def phase_of_silence(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        imaginary = PF.affine(x, 16, name="fc1", with_bias=False)
        real = PF.affine(x, 16, name="fc2", with_bias=False)
        return affine(F.atan2(imaginary, real + (2.0**-7 if mended else 0.0)), 16, "fc3")

    def silence(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:4] = 0.0

    return network(layers, spoil=silence)


@trouble("backward_not_finite", "fc1/affine/Norm", remedy=remedies.INSIDE_ROOT, parameters=("fc1/affine/W",))
def norm_of_weights_that_start_from_zero(mended: bool) -> Built:
    """The weights have another reader, which is not at fault."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        w = nn.get_parameters()["fc1/affine/W"]
        return classes(h, t) + 1e-3 * F.norm(w + 0.1 if mended else w)

    return network(lambda x: PF.affine(x, 16, name="fc1", w_init=I.ConstantInitializer(0.0)), loss)


@trouble("not_finite", "head/affine/Log", remedy=remedies.CHOOSE_BEFORE)
def logarithm_before_a_choice(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        known = nn.Variable.from_numpy_array(np.arange(160).reshape(32, 5) % 3)
        rate, one = affine(h, 5, "head") ** 2 * known, F.constant(1.0, (32, 5))
        is_positive = F.greater_scalar(rate, 0.0)
        is_positive.need_grad = False
        log = F.log(F.where(is_positive, rate, one)) if mended else F.where(is_positive, F.log(rate), one)
        return F.mean(rate - F.one_hot(t, (5,)) * log)

    return network(loss=loss)


@trouble("zero_factor", "fc1/affine/Prod", "several zeros", remedy=remedies.FACTORS)
def product_of_masked_factors(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        factors = F.reshape(F.relu(affine(x, 64, "fc1") + (4.0 if mended else -0.3)), (32, 4, 16))
        return affine(F.prod(factors * (0.3 if mended else 1.0), axis=2), 16, "fc2")

    return network(layers)


@trouble(
    "saturated", "fc1/affine/FixedPointQuantize", "reaches 5e+03", remedy=OR_BOUND(remedies.NORMALISE_DATA)
)
def quantizer_of_raw_data(mended: bool) -> Built:
    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d = np.abs(np.tanh(x.d)) * 0.3 if mended else np.full(x.shape, 5e3)

    def layers(x: nn.Variable) -> nn.Variable:
        return affine(F.fixed_point_quantize(affine(x, 16, "fc1"), n=8, delta=2**-8), 16, "fc2")

    return network(layers, spoil=spoil)


@trouble("overflow", "head/affine/Exp", remedy=remedies.SOFTPLUS)
def softplus_by_hand(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h, 5, "head", 1.0 if mended else 20.0)
        return F.mean(F.log(1.0 + F.exp(y)))

    return network(loss=loss)


@trouble(
    "not_finite",
    "levels/affine/Div2",
    "MulScalar on",
    remedy=f"{remedies.UNITS}: 1.4e-12 in head/affine/MulScalar",
)
def energies_in_joules(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        unit = 1.0 if mended else 1.4e-12
        warm = F.sigmoid(affine(h, 5, "head")) * unit
        return F.mean(F.sigmoid(affine(h, 5, "levels")) * unit / warm)

    return network(loss=loss)


@trouble("zero_variance", "bn/bn", "0 or less in 3 of 16 channels", remedy=remedies.STATISTICS)
def negative_running_variances(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = PF.batch_normalization(affine(x, 16, "fc1"), name="bn", batch_stat=False)
        nn.get_parameters(grad_only=False)["bn/bn/var"].d = np.arange(16) + (1.0 if mended else -2.0)
        return F.tanh(h)

    return network(layers)


@trouble("dead_relu", "bank/affine/ReLU", "the input of shape (32, 16) reaches")
def dead_of_raw_data(mended: bool) -> Built:
    """Decibels: no bias is at fault."""

    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d = x.d if mended else -80.0 - np.abs(x.d)

    def layers(x: nn.Variable) -> nn.Variable:
        return F.relu(PF.affine(x, 16, name="bank", w_init=I.UniformInitializer((0.0, 0.3))))

    return network(layers, spoil=spoil)


@trouble("precision", "fc1/affine/Sin", "an error of 40%", fatal=False, remedy=remedies.PERIOD)
def phases_of_thousands_of_radians(mended: bool) -> Built:
    """It still trains, with a third of errors."""
    size = 1.0 if mended else 2000.0

    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d = np.abs(x.d) * size

    def layers(x: nn.Variable) -> nn.Variable:
        return F.tanh(affine(F.concatenate(F.sin(x), x * (0.5 / size), axis=1), 16, "fc1"))

    return network(layers, spoil=spoil)


@trouble(
    "not_finite",
    "items/affine/Div2",
    "by 64 zeros from the input of shape (32, 16) on",
    remedy=remedies.ZERO_DATA,
)
def mean_over_nothing_of_raw_numbers(mended: bool) -> Built:
    """The data are numbers of items, whose size is no fault."""

    def numbers(x: nn.Variable, t: nn.Variable) -> None:
        x.d = np.floor(np.abs(x.d) * 100.0)
        x.d[:4] = 0.0

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x / 100.0, 16, "items"))
        count = F.minimum_scalar(F.sum(x, axis=1, keepdims=True), 9.0)
        return h / F.broadcast(count + 1.0 if mended else count, h.shape)

    return network(layers, spoil=numbers)


@trouble("backward_not_finite", "w/PowScalar", "as it reads 8 zeros", remedy=remedies.AWAY, parameters=("w",))
def root_of_a_parameter(mended: bool) -> Built:
    """The last function of backward breaks the gradient."""
    w = nn.parameter.get_parameter_or_create("w", (16,), I.ConstantInitializer(1.0))
    w.d = np.arange(16) % 2 + (1.0 if mended else 0.0)
    return network(lambda x: hidden(x) * F.broadcast(F.reshape(w**0.5, (1, 16)), (32, 16)))


# A scale brings gradients to the solver, which must use them.


@trouble(
    "small_steps",
    "constant/MulScalar",
    "the steps that Adam makes of it, at a learning rate of 0.0001, are below the last bit",
    fatal=False,
    remedy=remedies.LARGER_STEPS,
)
def steps_of_adam_below_the_last_bit(mended: bool) -> Built:
    """A constant of physics that is fitted: fp32 holds it in steps of 2**-9."""
    size = 30.0 if mended else 30000.0

    def layers(x: nn.Variable) -> nn.Variable:
        constant = nn.parameter.get_parameter_or_create("constant", (1,), I.ConstantInitializer(size))
        return hidden(x) * F.broadcast(F.reshape(constant / size, (1, 1)), (32, 16))

    return trained(network(layers), S.Adam(1e-4))


@trouble("weight_decay", "fc1/affine", "the weights only shrink")
def weight_decay_beside_a_loss_weight(mended: bool) -> Built:
    loss, feed = network()
    solver = S.Adam(1e-3, eps=1e-30)
    return updater_of(loss * 1e-6, feed, solver, weight_decay=1e-10 if mended else 1e-4), None


@trouble("small_steps", "fc1/affine", remedy=remedies.LEARNING_RATE)
def steps_below_the_last_bit(mended: bool) -> Built:
    loss, feed = network()
    return trained((loss * 1e-9, feed), S.Sgd(1e8 if mended else 0.1))


@trouble("small_steps", "side/affine", fatal=False, remedy=remedies.LEARNING_RATE)
def small_steps_of_one_head(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return classes(h, t) + (1.0 if mended else 1e-10) * F.mean(affine(h, 16, "side") ** 2)

    return trained(network(loss=loss), S.Momentum(0.01))


@trouble(
    "underflow",
    "block0",
    fatal=False,
    remedy=remedies.LARGER,
    parameters=("block0/scale", "block1/scale", "block2/scale"),
)
def layer_scales_of_zero_as_stored(mended: bool) -> Built:
    """The scale is the first factor, and is named with its own block, not with the next one's."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        for index in range(3):
            init = np.full((1, 16), 1e-2 if mended else 1e-9)
            scale = nn.parameter.get_parameter_or_create(f"block{index}/scale", (1, 16), init)
            h = h + F.broadcast(scale, h.shape) * affine(
                F.tanh(affine(h, 16, f"in{index}")), 16, f"out{index}"
            )
        return h

    return network(layers)


@trouble("underflow", "gamma", fatal=False, remedy=remedies.LARGER, parameters=("gamma",))
def layer_scale_that_the_format_does_not_hold(mended: bool) -> Built:
    """The branch adds nothing to speak of, and gets no gradient as stored."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        init = np.full((1, 16), 1e-2 if mended else 1e-8)
        gamma = nn.parameter.get_parameter_or_create("gamma", (1, 16), init)
        return h + affine(F.tanh(affine(h, 16, "fc1")), 16, "inner") * gamma

    return network(layers)


@trouble("lost_constant", "fc1/affine/AddScalar", remedy=remedies.HELD)
def epsilon_under_a_root(mended: bool) -> Built:
    """Normalization by the root mean square of rows, some of which are 0."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "fc1")
        root = (F.mean(h**2, axis=1, keepdims=True) + (2**-14 if mended else 1e-12)) ** 0.5
        return affine(h / F.broadcast(root, h.shape), 16, "fc2")

    def padding(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:4] = 0.0

    return network(layers, spoil=padding)


@trouble("lost_constant", "fc1/affine/AddScalar", remedy=remedies.HELD)
def epsilon_of_a_reciprocal_root(mended: bool) -> Built:
    """As stored, it is a power of 0; in fp32, a number beyond the format."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "fc1")
        mean = F.mean(h**2, axis=1, keepdims=True) + (2**-14 if mended else 1e-12)
        return affine(h * F.broadcast(mean**-0.5, h.shape), 16, "fc2")

    def padding(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:4] = 0.0

    return network(layers, spoil=padding)


def frozen_statistics(mended: bool, after: Callable[[nn.Variable], nn.Variable], eps: float) -> Built:
    """A normalization with running statistics that no batch has updated."""

    def layers(x: nn.Variable) -> nn.Variable:
        init = {"mean": np.zeros((1, 8, 1, 1)), "var": np.full((1, 8, 1, 1), 1.0 if mended else 0.0)}
        h = conv(x, "c1")
        return after(PF.batch_normalization(h, batch_stat=False, eps=eps, name="bn", param_init=init))

    return network(layers, shape=IMAGES)


@trouble("zero_variance", "bn/bn", remedy=remedies.STATISTICS, parameters=("bn/bn/var",))
def running_variance_of_zero(mended: bool) -> Built:
    return frozen_statistics(mended, F.relu, 1e-12)


@trouble("zero_variance", "bn/bn", remedy=remedies.STATISTICS, parameters=("bn/bn/var",))
def running_variance_of_zero_before_a_square(mended: bool) -> Built:
    """The format is left behind the normalization."""
    return frozen_statistics(mended, lambda h: F.relu(conv(h * h, "c2")), 1e-5)


@trouble("saturated", "fc1/affine/Tanh", remedy=remedies.SMALLER_BIAS, parameters=("fc1/affine/b",))
def bias_that_saturates(mended: bool) -> Built:
    return network(lambda x: F.tanh(affine(x, 16, "fc1", bias=0.0 if mended else 1e5)))


@trouble("beyond_format", "fc1/affine", parameters=("fc1/affine/b",))
def bias_beyond_the_format(mended: bool) -> Built:
    return network(lambda x: F.relu(affine(x, 16, "fc1", bias=0.0 if mended else 1e5)))


@trouble("backward_not_finite", "gem", remedy=remedies.AWAY, parameters=("gem/p",))
def exponent_of_zeros(mended: bool) -> Built:
    """Only the exponent's gradient is not finite: it has the logarithm of 0 in it."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(conv(x, "c1"))
        h = h + 2**-8 if mended else h
        p = nn.parameter.get_parameter_or_create("gem/p", (1, 1, 1, 1), np.full((1, 1, 1, 1), 3.0))
        return F.mean(F.pow2(h, F.broadcast(p, h.shape)), axis=(2, 3))

    return network(layers, shape=IMAGES)


@trouble(
    "untrained",
    "g2/affine",
    "is unlinked where d/affine reads it",
    remedy=remedies.UNCUT,
    parameters=("g1/affine/W", "g1/affine/b", "g2/affine/W", "g2/affine/b"),
)
def generator_of_an_unlinked_fake(mended: bool) -> Built:
    """The feeder computes it, as in the discriminator's step."""
    z = nn.Variable((32, 16))
    fake = affine(F.tanh(affine(z, 16, "g1")), 16, "g2")
    own = nn.get_parameters()
    read = fake if mended else fake.get_unlinked_variable()
    loss = F.mean(F.sigmoid_cross_entropy(affine(read, 1, "d"), F.constant(1.0, (32, 1))))
    rng = np.random.default_rng(0)

    def feed() -> None:
        z.d = rng.standard_normal(z.shape)
        fake.forward()

    return trained((loss, feed), S.Adam(1e-3), own)


@trouble(
    "untrained",
    "fc5/affine/Tanh",
    fatal=False,
    parameters=tuple(f"fc{index}/affine/{letter}" for index in range(6) for letter in "Wb"),
)
def cut_behind_many_layers(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(6):
            x = F.tanh(affine(x, 16, f"fc{index}"))
        x.need_grad = mended
        return affine(x, 16, "last")

    return trained(network(layers), S.Sgd(0.1))


@trouble("zero_factor", "fc1/affine/Mul2", remedy=remedies.FILL)
def mask_that_nobody_fills(mended: bool) -> Built:
    mask = nn.Variable((32, 16))

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        if mended:
            mask.d = 1.0

    return network(lambda x: affine(hidden(x) * mask, 16, "fc2"), spoil=fill)


@trouble("zero_input", "fc1/affine")
def images_divided_as_integers(mended: bool) -> Built:
    def zeros(x: nn.Variable, t: nn.Variable) -> None:
        x.d = x.d if mended else np.floor(np.abs(np.tanh(x.d)))

    return network(spoil=zeros)


@trouble(
    "exploding_gradient", "fc0/affine/Sin", "gradients grow from layer to layer, ", remedy=remedies.EXPLODING
)
def gradients_that_explode(mended: bool) -> Built:
    """Each layer makes the gradient some five times larger, and rounding errors too."""

    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(13):
            x = F.sin(affine(x, 64, f"fc{index}", 0.5 if mended else 6.0))
        return x

    return network(layers)


@trouble(
    "exploding_gradient", "rnn/affine/Sin", "the weight rnn/affine/W is applied", parameters=("rnn/affine/W",)
)
def recurrence_whose_gradient_explodes(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for _ in range(16):
            x = F.sin(affine(x, 16, "rnn", 0.5 if mended else 8.0))
        return x

    return network(layers)


@trouble(
    "underflow",
    "fc5/affine",
    "numbers shrink from layer to layer, ",
    fatal=False,
    remedy=remedies.VANISHING,
    parameters=tuple(f"fc{index}/affine/W" for index in range(6)),
)
def layers_that_shrink(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(8):
            x = F.tanh(affine(x, 16, f"fc{index}", 1.0 if mended else 0.05))
        return x

    return network(layers)


def sure(y: nn.Variable) -> nn.Variable:
    """One minus a probability that rounds to 1, and a constant that fp32 holds beside it."""
    return 1.0 - F.sigmoid(y) + 1e-7


@trouble("lone_constant", "head/affine/Log", "the constant 1e-07 of", remedy=remedies.HELD_IN_LOG)
def logarithm_of_a_constant_left_alone(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return -F.mean(F.log(sure(affine(h, 1, "head", bias=0.0 if mended else 9.0))))

    return network(loss=loss)


@trouble("lone_constant", "head/affine/PowScalar", "the constant 1e-07 of head/affine/AddScalar")
def root_of_a_constant_left_alone(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return F.mean(sure(affine(h, 1, "head", bias=0.0 if mended else 9.0)) ** -0.5)

    return network(loss=loss)


@trouble("saturated", "gate/affine/Sigmoid", fatal=False)
def gate_beside_a_state_of_zeros(mended: bool) -> Built:
    """A state that starts from 0 is no fault."""
    x, t = nn.Variable((32, 3, 16)), nn.Variable((32, 1))
    gate = F.sigmoid(affine(F.mean(x, axis=1), 16, "gate", bias=0.0 if mended else 100.0))
    h = F.constant(0.0, (32, 16))
    for step in range(3):
        z = x[:, step] * gate
        r = F.sigmoid(affine(F.concatenate(z, h), 16, "reset"))
        h = F.tanh(affine(F.concatenate(z, r * h), 16, "candidate"))
    return classes(h, t), feeder(x, t)


@trouble("zero_factor", "fc1/affine/Mul2", remedy=remedies.ZEROS)
def mask_of_zeros_that_the_feeder_leaves_alone(mended: bool) -> Built:
    mask = nn.Variable((32, 16))
    mask.d = 1.0 if mended else 0.0
    return network(lambda x: affine(hidden(x) * mask, 16, "fc2"))


@trouble("untrained", "router/affine/Max", fatal=False, remedy=remedies.NO_DERIVATIVE)
def router_behind_a_choice(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        scores = F.softmax(affine(x, 4, "router"))
        best = F.reshape(F.max(scores, axis=1, only_index=True), (32, 1)).apply(need_grad=False)
        chosen = F.one_hot(best, (4,)) * (scores if mended else 1.0)
        return sum(hidden_of(x, index) * chosen[:, index : index + 1] for index in range(4))

    return trained(network(layers), S.Sgd(0.1))


@trouble("untrained", "gate/affine/GreaterScalar", fatal=False, remedy=remedies.NO_DERIVATIVE)
def gate_behind_a_comparison(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        y = affine(x, 16, "gate")
        hard = F.greater_scalar(y, 0.0).apply(need_grad=False)
        return hidden(x) * (F.sigmoid(y) if mended else F.reshape(hard * 1.0, (32, 16)))

    return trained(network(layers), S.Sgd(0.1))


def hidden_of(x: nn.Variable, index: int) -> nn.Variable:
    return F.tanh(affine(x, 16, f"expert{index}"))


@trouble("lone_constant", "head/affine/Log", "the constant 1e-07 of head/affine/AddScalar", fatal=False)
def logarithm_of_impossible_classes(mended: bool) -> Built:
    """The constant bounds the logarithm, and its inverse is beyond the format."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = F.softmax(affine(h, 5, "head", factor=1.0 if mended else 60.0))
        return -F.mean(F.sum(F.one_hot(t, (5,)) * F.log(y + 1e-7), axis=1))

    return network(loss=loss)


@trouble("not_finite", "points/affine/BatchLogdet", "singular", remedy=remedies.IDENTITY)
def determinant_of_a_singular_kernel(mended: bool) -> Built:
    """A kernel of five points, of which one is padding."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        padding, identity = (
            nn.Variable.from_numpy_array(a) for a in (np.arange(5)[None, :, None] > 0, np.eye(5)[None])
        )
        points = F.reshape(affine(h[:5], 8, "points"), (1, 5, 8)) * F.broadcast(padding, (1, 5, 8))
        kernel = F.batch_matmul(points, points, transpose_b=True)
        kernel = kernel + identity if mended else kernel
        return cross_entropy(affine(h, 5, "head"), t) - 0.01 * F.sum(F.batch_logdet(kernel))

    return network(loss=loss)


@trouble("overflow", "fc1/affine/BatchInv", "singular", remedy=remedies.IDENTITY)
def inverse_of_a_singular_matrix(mended: bool) -> Built:
    """A covariance of 4 samples in 8 dimensions."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.reshape(F.tanh(affine(x, 32, "fc1")), (32, 4, 8))
        size = 0.3 if mended else 1e-6
        unit = F.broadcast(
            F.constant(size, (1, 8, 1)) * F.reshape(F.one_hot(_range(8), (8,)), (1, 8, 8)), (32, 8, 8)
        )
        return F.reshape(
            F.batch_matmul(h, F.batch_inv(F.batch_matmul(h, h, transpose_a=True) + unit)), (32, 32)
        )

    return network(layers)


def _range(size: int) -> nn.Variable:
    return nn.Variable.from_numpy_array(np.arange(size)[:, None])


@trouble("backward_not_finite", "fc1/affine/ACosh", "reads numbers down to 1", remedy=remedies.ABOVE_ONE)
def hyperbolic_distance_to_itself(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        squares = 1.0 + F.relu(affine(x, 16, "fc1")) ** 2
        return F.acosh(F.maximum_scalar(squares, 1.01) if mended else squares)

    return network(layers)


@trouble(
    "precision",
    "raw/affine/Log",
    "RSubScalar subtracts numbers",
    fatal=False,
    remedy=remedies.LOG_OF_DIFFERENCE,
)
def squashed_gaussian(mended: bool) -> Built:
    """Soft actor-critic: the density of a tanh, from its output, and mended from its input."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        raw = affine(h, 16, "raw", 4.0)
        stable = 2.0 * (float(np.log(2.0)) - raw - F.softplus(-2.0 * raw))
        # Small beside the rest of the loss, which hardly changes.
        density = stable if mended else F.log(1.0 - F.tanh(raw) ** 2 + 1e-6)
        return F.mean(affine(h, 16, "q") ** 2 + 1.0 - 0.01 * density)

    return network(loss=loss)


@trouble(
    "not_finite", "fc1/affine/Div2", "from the output of fc1/affine/ReLU on", remedy=remedies.INSIDE_ROOT
)
def unit_vectors_of_nothing(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(affine(x, 2, "fc1"))
        squares = F.sum(h**2, axis=1, keepdims=True)
        return h / (squares + 2.0**-14) ** 0.5 if mended else h / squares**0.5

    return network(layers)


@trouble("not_finite", "bn/bn", remedy=remedies.SUBTRACT_MEAN)
def pressure_in_hectopascals(mended: bool) -> Built:
    def far(x: nn.Variable, t: nn.Variable) -> None:
        x.d = x.d * 0.01 + (0.0 if mended else 10130.0)

    return network(lambda x: affine(PF.batch_normalization(x, name="bn"), 16, "fc1"), spoil=far)


@trouble("on_gradients", "fc1/affine", "of which on_gradients leaves", remedy=remedies.CLIP_LESS)
def clip_below_epsilon(mended: bool) -> Built:
    def clip(solver: S.Solver) -> None:
        solver.clip_grad_by_norm(1.0 if mended else 1e-11)

    loss, feed = network()
    return updater_of(loss, feed, S.Adam(1e-3), on_gradients=clip), None


@trouble("epsilon", "fc1/affine", "below the root of the solver's epsilon", remedy=remedies.LARGER_LOSS)
def epsilon_of_adadelta(mended: bool) -> Built:
    loss, feed = network()
    return trained((loss * (1.0 if mended else 1e-4), feed), S.Adadelta(1.0, eps=1e-6))


@trouble(
    "equal_units",
    "fc2/affine",
    "all numbers are equal in fc1/affine/W and fc2/affine/W",
    fatal=False,
    remedy=remedies.INITIALISE,
)
def weights_of_one_number(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for name in ("fc1", "fc2", "head"):
            w = I.NormalInitializer(0.3) if mended else I.ConstantInitializer(0.1)
            x = PF.affine(F.tanh(x), 8, name=name, w_init=w)
        return x

    return network(layers, cross_entropy)


@trouble(
    "rounding_noise",
    "place/Broadcast",
    "place/Softmax removes what this layer adds",
    fatal=False,
    remedy=remedies.CANCELS,
)
def place_that_cancels(mended: bool) -> Built:
    shape = (1, 16) if mended else (1, 1)

    def layers(x: nn.Variable) -> nn.Variable:
        place = nn.parameter.get_parameter_or_create("place", shape, I.NormalInitializer(0.1))
        return hidden(x) * F.softmax(affine(x, 16, "scores") + F.broadcast(place, (32, 16)), axis=1)

    return network(layers)


@trouble("dead_relu", "head/affine/ReLU", "as the parameter gate is", fatal=False, remedy=remedies.ABOVE_ZERO)
def gate_behind_a_relu(mended: bool) -> Built:
    """A gate that starts from 0, where the ReLU that reads it has no gradient."""

    def layers(x: nn.Variable) -> nn.Variable:
        gate = nn.parameter.get_parameter_or_create("gate", (1, 1), I.ConstantInitializer(0.0))
        h = hidden(x)
        factor = gate if mended else F.relu(gate)
        return h + F.broadcast(factor, h.shape) * affine(h, 16, "branch")

    return network(layers)


@trouble("zero_loss", "head/affine/SoftmaxCrossEntropy", "only numbers below 0", remedy=remedies.LABELS)
def labels_that_are_left_out(mended: bool) -> Built:
    def ignored(x: nn.Variable, t: nn.Variable) -> None:
        t.d = t.d if mended else -1.0

    return network(spoil=ignored)


@trouble("no_gradient", "head/affine/TopNError", remedy=remedies.CROSS_ENTROPY)
def errors_as_a_loss(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h, 5, "head")
        return F.mean(F.softmax_cross_entropy(y, t) if mended else F.top_n_error(y, t))

    return network(loss=loss)


@trouble(
    "overflow", "dice/affine/AddScalar", "its constant 1e+06 is beyond float16", remedy=remedies.CONSTANT
)
def constant_beyond_the_format(mended: bool) -> Built:
    smooth = 1.0 if mended else 1e6

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        p = F.sigmoid(affine(h, 16, "dice"))
        return 1.0 - F.mean((F.sum(p * p, axis=1) + smooth) / (F.sum(p + h * h, axis=1) + smooth))

    return network(loss=loss)


@trouble("underflow", "kernel/affine/Exp", remedy=remedies.SMALLER_START)
def narrow_kernel(mended: bool) -> Built:
    """A Gaussian kernel without its diagonal: what Exp has lost shows behind a mask of 0 and 1."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        z = affine(h, 16, "kernel", 3.0)
        squares = F.sum((F.reshape(z, (32, 1, 16)) - F.reshape(z, (1, 32, 16))) ** 2, axis=2)
        others = nn.Variable.from_numpy_array(1.0 - np.eye(32))
        k = F.exp(squares * (-0.01 if mended else -2.0)) * others
        return F.mean(k) * 1e12

    return network(loss=loss)


@trouble("underflow", "bn/bn", "bn/bn/gamma is at most", remedy=remedies.GAMMA)
def tiny_gamma(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        size = 1.0 if mended else 1e-9
        gamma = {"gamma": I.ConstantInitializer(size)}
        return F.tanh(PF.batch_normalization(affine(x, 16, "fc1"), name="bn", param_init=gamma) / size)

    return network(layers)


@trouble(
    "precision",
    "head/affine/BinaryCrossEntropy",
    remedy=remedies.OF_SCORES.format("sigmoid"),
)
def probabilities_that_are_sure(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h, 1, "head", 1.0 if mended else 300.0)
        return F.mean(F.binary_cross_entropy(F.sigmoid(y), F.minimum_scalar(t, 1.0)))

    return network(loss=loss)


@trouble("overflow", "fc1/affine/RDivScalar", "divides by numbers down to", remedy=remedies.AWAY)
def depth_from_disparity(mended: bool) -> Built:
    least = 0.1 if mended else 1e-6
    return network(lambda x: affine(1.0 / (F.relu(affine(x, 16, "fc1")) + least), 16, "fc2"))


@trouble("not_finite", "fc1/affine/PowScalar", "below 0", remedy=remedies.ABOVE)
def power_of_numbers_below_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        y = affine(x, 16, "fc1")
        return (F.abs(y) if mended else y) ** 1.5

    return network(layers)


@trouble("weight_not_finite", "bn/bn", "bn/bn/beta", fatal=False, remedy=remedies.RESTORE)
def offset_that_is_nan_before_a_relu(mended: bool) -> Built:
    """ReLU makes 0 of NaN: the loss is finite, and the unit never learns."""
    loss, feed = network(lambda x: F.relu(PF.batch_normalization(affine(x, 16, "fc1"), name="bn")))
    nn.get_parameters()["bn/bn/beta"].d[0, 3] = 0.0 if mended else np.nan
    return loss, feed


@trouble("index_beyond", "item/embed", "indices from -1 to 31", remedy=remedies.INDICES)
def padding_of_minus_one(mended: bool) -> Built:
    """nnabla reads what lies before the table, or crashes."""
    item = nn.Variable((32,))

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        item.d = np.arange(32)
        item.d[0] = 0.0 if mended else -1.0

    return network(lambda x: hidden(x) + PF.embed(item, 32, 16, name="item"), spoil=fill)


@trouble("equal_operands", "reward/affine/Sub2", "both computed of the input", remedy=remedies.DIFFERENT)
def preference_for_itself(mended: bool) -> Built:
    """A reward model that compares each answer with itself: both gradients cancel."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        first, second = (affine(v, 1, "reward") for v in (h, h * 0.5 if mended else h))
        return F.mean(F.softplus(second - first))

    return network(loss=loss)


@trouble("dead_relu", "fc1/affine/GELU", "reaches", remedy=f"{remedies.NORMALISE_DATA}, or use F.leaky_relu")
def decibels_before_a_gelu(mended: bool) -> Built:
    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d = x.d if mended else -80.0 - np.abs(x.d)

    def layers(x: nn.Variable) -> nn.Variable:
        return F.gelu(PF.affine(x, 16, name="fc1", w_init=I.UniformInitializer((0.1, 0.2)), with_bias=False))

    return network(layers, spoil=spoil)


@trouble("dead_relu", "fc1/affine/ReLU", "the constant of", remedy=OR_LEAKY(remedies.SMALLER_CONSTANT))
def soft_threshold(mended: bool) -> Built:
    return network(lambda x: F.relu(F.abs(affine(x, 16, "fc1")) - (0.1 if mended else 50.0)))


@trouble("precision", "fc1/affine/RSubScalar", fatal=False, remedy=remedies.DIFFERENCE)
def small_angles(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        angle = 0.02 * F.tanh(affine(x, 16, "fc1"))
        versed = 2.0 * F.sin(angle * 0.5) ** 2 if mended else 1.0 - F.cos(angle)
        return versed * 1e3

    return network(layers)


@trouble("not_finite", "v/Div2", "from the parameter v on", remedy=remedies.INITIALISE)
def direction_of_no_weights(mended: bool) -> Built:
    """Weight normalization of weights that start from 0."""

    def layers(x: nn.Variable) -> nn.Variable:
        start = I.NormalInitializer(0.3) if mended else I.ConstantInitializer(0.0)
        v = nn.parameter.get_parameter_or_create("v", (16, 8), start)
        norm = F.sum(v**2, axis=0, keepdims=True) ** 0.5
        return F.tanh(F.affine(x, v / F.broadcast(norm, v.shape)))

    return network(layers)


@trouble("not_finite", "out/affine/Div2", "from the parameter out/affine/W on", remedy=remedies.INITIALISE)
def correlation_of_a_constant(mended: bool) -> Built:
    """The last layer starts from 0; half of what it reads is 0, too, as it comes from a ReLU."""

    def loss(y: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = y - F.mean(y, axis=0, keepdims=True)
        return 1.0 - F.mean(y * t) / F.mean(y**2) ** 0.5

    factor = 1.0 if mended else 0.0
    return network(lambda x: affine(F.relu(affine(x, 16, "fc1")), 1, "out", factor), loss)


@trouble("precision", "fc1/affine/AddScalar#2", "difference of numbers up to 1e+03", fatal=False, others=())
def small_numbers_on_an_offset(mended: bool) -> Built:
    """In fp32 some digits are left, so that no rounding error is all that there is."""
    offset = 0.0 if mended else 1000.0
    return network(lambda x: F.tanh(affine(x, 16, "fc1") * 1e-3 + offset - offset))


@trouble("no_gradient", "fc1/affine/Mul2", "fc1/affine/Max never chooses", remedy=remedies.PADDING)
def maximum_over_padding(mended: bool) -> Built:
    """Scores below 0, and zeros in places that are masked."""

    def layers(x: nn.Variable) -> nn.Variable:
        mask = nn.Variable.from_numpy_array(np.arange(32)[:, None] % 4 < 3)
        score = F.log_softmax(affine(x, 16, "fc1"), axis=1)
        score = (
            F.where(F.broadcast(mask, score.shape), score, -1e3 * F.constant(1.0, score.shape))
            if mended
            else score * mask
        )
        return F.reshape(
            F.broadcast(F.max(F.reshape(score, (8, 4, 16)), axis=1, keepdims=True), (8, 4, 16)), (32, 16)
        )

    return network(layers)


@trouble("no_gradient", "fc1/affine/ReLU", "fc1/affine/Max never chooses", remedy=remedies.PADDING)
def maximum_that_zeros_win(mended: bool) -> Built:
    """The largest of all numbers below 0 is one that a ReLU has made 0."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(affine(x, 64, "fc1"))
        return F.max(F.reshape(h if mended else -h, (32, 4, 16)), axis=2)

    return network(layers)


@trouble("index_beyond", "OneHot", "for indices up to 5, but the last one is 4", others=("head/affine/Log",))
def classes_counted_from_1_in_a_logarithm(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        p = F.sum(F.softmax(affine(h, 5, "head")) * F.one_hot(t if mended else t + 1.0, (5,)), axis=1)
        return -F.mean(F.log(p))

    return network(loss=loss)


@trouble("untrained", "fc1/affine", "does not depend on 4 of the solver's", remedy=remedies.NOT_DERIVED)
def curvature_of_relus(mended: bool) -> Built:
    """A second derivative by data, which need a gradient, but are no parameters."""
    (x, t), activation = inputs(), F.tanh if mended else F.relu
    x.need_grad = True
    (slope,) = nn.grad([affine(activation(affine(x, 16, "fc1")), 1, "head")], [x])
    (curvature,) = nn.grad([slope], [x])
    return trained((F.mean(F.squared_error(curvature, F.sin(x))), feeder(x, t)), S.Adam(1e-3))


@trouble("no_probability", "head/affine/BinaryCrossEntropy", "of 32 are below 0 or above 1")
def probabilities_that_are_scores(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        score = affine(h, 1, "head", 4.0)
        return F.mean(F.binary_cross_entropy(F.sigmoid(score) if mended else score, F.greater_scalar(t, 2)))

    return network(loss=loss)


@trouble("rounded", "fc1/affine/FixedPointQuantize", "it rounds all numbers to 0", remedy=remedies.STEP)
def step_larger_than_the_numbers(mended: bool) -> Built:
    """Half of the smaller step is below the outputs."""

    def layers(x: nn.Variable) -> nn.Variable:
        rounded = F.fixed_point_quantize(affine(x, 16, "fc1"), n=8, delta=0.1 if mended else 64.0)
        return F.relu(affine(rounded, 16, "fc2"))

    return network(layers)


@trouble("dead_relu", "fc1/affine/ReLU", "as the parameter fc1/affine/W is", parameters=("fc1/affine/W",))
def normalized_weight_of_zeros(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        start = I.NormalInitializer(0.3) if mended else I.ConstantInitializer(0.0)
        norm = lambda w: PF.weight_normalization(w, dim=1)  # noqa: E731
        return F.relu(PF.affine(x, 16, w_init=start, apply_w=norm, name="fc1"))

    return network(layers)


@trouble(
    "rounding_noise", "head/affine", "head/affine/Softmax hands none on", remedy=remedies.MEAN_OF_SOFTMAX
)
def sum_of_a_softmax(mended: bool) -> Built:
    """Compared with a constant, which is no copy that starts equal."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        p = F.softmax(affine(h, 5, "head"))
        total = F.sum(p[:, : 4 if mended else 5], axis=1)
        return F.mean(F.squared_error(total, F.constant(1.0, (32,)))) + F.mean(p)

    return network(loss=loss)


@trouble("zero_loss", "head/affine/EpsilonInsensitiveLoss", "no error exceeds its epsilon of 100")
def epsilon_above_all_errors(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return F.mean(F.epsilon_insensitive_loss(affine(h, 1, "head"), t, 0.1 if mended else 100.0))

    return network(loss=loss)


@trouble("overflow", "turn#29", "the weight turn is applied 28 times", remedy=remedies.SMALLER_START)
def recurrence_that_leaves_the_format_through_relus(mended: bool) -> Built:
    """Infinities of both signs become NaN behind it: the only cause is the growth."""

    def layers(x: nn.Variable) -> nn.Variable:
        start = np.eye(16) * (1.0 if mended else 1.5)
        turn, state = nn.parameter.get_parameter_or_create("turn", (16, 16), start), F.constant(0, (32, 16))
        for _ in range(40):
            state = F.relu(F.affine(state, turn) + affine(x, 16, "in", 0.1))
        return state * 0.1

    return network(layers)


@trouble("cancels", "fc1/affine/Sub2", "gradients to it cancel", fatal=False, remedy=remedies.NOT_CONSTANT)
def mean_of_one_subtracted(mended: bool) -> Built:
    """A dueling head with a single action."""

    def layers(x: nn.Variable) -> nn.Variable:
        advantage = affine(x, 4 if mended else 1, "fc1")
        return (
            F.broadcast(affine(x, 1, "value"), advantage.shape)
            + advantage
            - F.mean(advantage, axis=1, keepdims=True)
        )

    return network(layers)


@trouble("zero_factor", "head/affine/Mul2", "holds only numbers below 0", remedy=remedies.LABELS)
def labels_that_are_left_out_and_masked(mended: bool) -> Built:
    def ignored(x: nn.Variable, t: nn.Variable) -> None:
        t.d = t.d if mended else -1.0

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        mask = F.greater_equal_scalar(t, 0).apply(need_grad=False)
        return F.sum(F.softmax_cross_entropy(affine(h, 5, "head"), t) * mask) / (F.sum(mask) + 1.0)

    return network(loss=loss, spoil=ignored)


@trouble(
    "epsilon", "fc0/affine", "gradients shrink from layer to layer", remedy=remedies.VANISHING, fatal=False
)
def sigmoids_of_small_weights(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for number in range(9):
            x = F.sigmoid(affine(x, 16, f"fc{number}", 4.0 if mended else 0.04))
        return x

    return trained(network(layers), S.Adam(1e-3))


@trouble("solver", "Adam", "squares of gradients of", remedy=remedies.LARGER_GRADIENTS)
def squares_below_fp32(mended: bool) -> Built:
    loss, feed = network()
    return trained((loss * (1.0 if mended else 1e-24), feed), S.Adam(1e-3, eps=1e-38))


@trouble(
    "saturated",
    "fc1/affine/Sigmoid",
    "the bias fc1/affine/b reaches -20",
    remedy=remedies.SMALLER_BIAS,
    fatal=False,
)
def gate_that_a_bias_closes(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        gate = F.sigmoid(affine(x, 16, "fc1", bias=0.0 if mended else -20.0))
        return gate * F.tanh(affine(x, 16, "value"))

    return network(layers)


@trouble("small_steps", "fc1/affine", "Lars makes of it", remedy=remedies.LARGER_SHARE)
def coefficient_of_nearly_nothing(mended: bool) -> Built:
    return trained(network(), S.Lars(0.1, coefficient=1e-3 if mended else 1e-12))


@trouble("underflow", "bn3/bn", "eps of 10000 is applied 4 times", remedy=remedies.SMALLER_EPS, fatal=False)
def eps_above_the_variance(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for number in range(4):
            x = affine(x, 16, f"fc{number}")
            x = PF.batch_normalization(x, name=f"bn{number}", eps=1e-4 if mended else 1e4)
        return F.tanh(x)

    return network(layers)


@trouble("no_probability", "head/affine/KLMultinomial", "the output of head/affine for probabilities")
def divergence_of_scores(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        score = affine(h, 5, "head")
        target = F.one_hot(t, (5,)) * 0.9 + 0.02
        return F.mean(F.kl_multinomial(target, F.softmax(score) if mended else score))

    return network(loss=loss)


@trouble("unfed", "head/affine/SquaredError", "which nobody has filled", fatal=False)
def teacher_that_nothing_computes(mended: bool) -> Built:
    """An unlinked output of another graph is an input of this one."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y, taught = affine(h, 5, "head"), F.tanh(affine(h, 5, "teacher"))
        aim = F.unlink(taught) if mended else taught.get_unlinked_variable(need_grad=False)
        return cross_entropy(y, t) + F.mean(F.squared_error(F.softmax(y), F.softmax(aim)))

    return network(loss=loss)


@trouble("large_gradient", "fc1/affine", "whose square fp32 does not hold", remedy=remedies.SMALLER_LOSS)
def squares_beyond_fp32(mended: bool) -> Built:
    loss, feed = network()
    return trained((loss * (1.0 if mended else 1e30), feed), S.Adam(1e-3))


@trouble("solver", "SgdW", "its first 8 steps leave ", remedy=remedies.DECAY)
def decay_of_the_solver(mended: bool) -> Built:
    return trained(network(), S.SgdW(0.5, wd=1e-4 if mended else 0.9))


@trouble("overflow", "fc1/affine/Add2#8", "numbers grow from layer to layer", remedy=remedies.UNWEIGHTED)
def steps_of_time_that_explode(mended: bool) -> Built:
    """The known part of an equation, which has no weights."""

    def layers(x: nn.Variable) -> nn.Variable:
        state = affine(x, 16, "fc1")
        for step in range(16):
            state = state + state * (F.sin(x * float(step)) + 2.0) * (0.01 if mended else 1.0)
        return state

    return network(layers)


@trouble("cancels", "head/affine/HuberLoss", "the gradients to it cancel", remedy=remedies.UNLINK_TARGET)
def a_target_that_moves_with_the_prediction(mended: bool) -> Built:
    def loss(y: nn.Variable, t: nn.Variable) -> nn.Variable:
        q = F.max(y, axis=1, keepdims=True)
        return F.mean(F.huber_loss(q, (q.get_unlinked_variable(need_grad=False) if mended else q) * 1.0 + t))

    return network(lambda x: affine(hidden(x), 5, "head"), loss)


@trouble("rounding_noise", "head/affine#2", "the same numbers are read by", remedy=remedies.DIFFERENT)
def a_teacher_with_the_weights_of_its_student(mended: bool) -> Built:
    x, t = inputs()
    scores = affine(hidden(x), 5, "head")
    teacher = F.softmax(affine(hidden(x), 5, "teacher" if mended else "head"))
    teacher.need_grad = False
    return -F.mean(F.sum(teacher * F.log_softmax(scores), axis=1)), feeder(x, t)


@trouble(
    "rounding_noise",
    "in/instance_normalization/AveragePooling",
    remedy=remedies.MEAN_OF_NORMALIZED,
    fatal=False,
)
def planes_normalised_and_averaged(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = PF.convolution(x, 4, (3, 3), pad=(1, 1), name="conv")
        h = PF.instance_normalization(h, name="in")
        return affine(F.average_pooling(F.relu(h) if mended else h, h.shape[2:]), 5, "head")

    return network(layers, cross_entropy, shape=IMAGES)


@trouble("zero_loss", "critic/affine/Sub2", "compares equal numbers", remedy=remedies.DIFFERENT)
def a_critic_of_equal_batches(mended: bool) -> Built:
    (x, t), fake = inputs(), nn.Variable((32, 16))
    feed = feeder(x, t, lambda: setattr(fake, "d", x.d + 1.0 if mended else x.d))

    def judged(v: nn.Variable) -> nn.Variable:
        return F.mean(affine(F.leaky_relu(affine(v, 16, "fc1")), 1, "critic"))

    return judged(fake) - judged(x), feed


@trouble(
    "cancels", "head/affine/Sub2", "whatever the output of head/affine is", remedy=remedies.UNLINK_TARGET
)
def a_target_of_the_same_state(mended: bool) -> Built:
    def loss(y: nn.Variable, t: nn.Variable) -> nn.Variable:
        target = t + (y.get_unlinked_variable(need_grad=False) if mended else y)
        return F.mean((target - y) ** 2)

    return network(lambda x: affine(hidden(x), 1, "head"), loss)


@trouble(
    "precision", "q/affine/Softmax", "adds 1e+04 to scores up to", fatal=False, remedy=remedies.CHECK_MASK
)
def a_mask_of_all_places(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        read = F.reshape(x, (32, 4, 4))
        q, k, v = (
            PF.affine(read, 4, base_axis=2, name=name, w_init=I.NormalInitializer(0.7)) for name in "qkv"
        )
        mask = F.constant(0.0 if mended else -1e4, (32, 4, 4))
        return F.reshape(
            F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True) + mask), v), (32, 16)
        )

    return network(layers)


@trouble("epsilon", "fc1/affine", "the bias head/affine/b reaches -50", remedy=remedies.SMALLER_BIAS)
def a_softplus_far_below_zero(mended: bool) -> Built:
    def loss(y: nn.Variable, t: nn.Variable) -> nn.Variable:
        return F.mean(F.squared_error(F.softplus(y), t))

    return trained(
        network(lambda x: affine(hidden(x), 1, "head", bias=0.0 if mended else -50.0), loss), S.Adam()
    )


@trouble("solver", "Sgd", "its first 8 steps leave", remedy=remedies.DECAY)
def decay_in_on_gradients(mended: bool) -> Built:
    loss, feed = network()
    solver = S.Sgd(0.5)
    solver.set_parameters(nn.get_parameters())
    decay = 1e-4 if mended else 1.0
    return updater_of(loss, feed, solver, on_gradients=lambda solver: solver.weight_decay(decay)), None


@trouble("solver", "Momentum", "its first 8 steps leave", remedy=remedies.DECAY)
def decay_that_a_momentum_adds_up(mended: bool) -> Built:
    loss, feed = network()
    return updater_of(loss, feed, S.Momentum(0.1), weight_decay=1e-4 if mended else 0.5), None


@trouble("zero_factor", "a/bn", "gamma, which is all 0", remedy=remedies.GAMMA, fatal=False, others=("b/bn",))
def branches_of_two_zeros(mended: bool) -> Built:
    """A gamma of 0 times an alpha of 0; either alone moves."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = hidden(x)
        gamma = {} if mended else {"gamma": I.ConstantInitializer(0.0)}
        for name in "ab":
            branch = PF.batch_normalization(affine(h, 16, f"{name}/fc"), name=name, param_init=gamma)
            alpha = nn.parameter.get_parameter_or_create(f"{name}/alpha", (1, 1), I.ConstantInitializer(0.0))
            h = h + branch * F.broadcast(alpha, h.shape)
        return h

    return network(layers)


@trouble(
    "underflow",
    "head/affine/SquaredError",
    "of whose numbers 100% become 0",
    remedy=remedies.NO_UNITS.format("head/affine/MulScalar and the loss weight head/affine/MulScalar#2"),
)
def a_target_in_small_units(mended: bool) -> Built:
    unit = 1.0 if mended else 3e-9

    def loss(y: nn.Variable, t: nn.Variable) -> nn.Variable:
        return F.mean(F.squared_error(y * unit, t)) * unit**-2

    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        t.d = unit * t.d

    return network(lambda x: affine(hidden(x), 1, "head"), loss, spoil)


@trouble("overflow", "head/affine/RDivScalar", remedy=remedies.AWAY)
def a_divisor_that_cancels(mended: bool) -> Built:
    """1 minus a square near 1 is 0 in float16; a factor before the square would not help."""

    def loss(y: nn.Variable, t: nn.Variable) -> nn.Variable:
        near = F.sigmoid(y + (0.0 if mended else 8.3))
        return F.mean(F.log(1.0 + 40.0 / (1.0 - near * near)))

    return network(lambda x: affine(hidden(x), 4, "head", 0.2), loss)


@trouble("overflow", "s/affine/Exp", remedy=remedies.BOUND_FACTOR)
def a_flow_without_bounds(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        scale = hidden(x)
        for name in "pqrs":
            scale = affine(scale, 16, name, 2.0)
        return F.log(1.0 + (x * F.exp(F.tanh(0.1 * scale) if mended else scale)) ** 2)

    return network(layers)


@trouble(
    "precision",
    "fc2/affine/Add2",
    "the difference of numbers up to 1e+03",
    remedy=remedies.DIFFERENCE,
    fatal=False,
)
def second_differences_of_a_smooth_field(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        field = F.cumsum(F.cumsum(affine(hidden(x), 16, "fc2") * 5e-4, axis=1), axis=1)
        field = field if mended else field + 1000.0
        return 1e3 * (field[:, 2:] - 2.0 * field[:, 1:-1] + field[:, :-2])

    return network(layers)


@trouble("underflow", "gate", "100% become 0", remedy=remedies.LARGER, others=("head/affine/Sum",))
def a_small_gate_beside_a_sum_that_cancels(mended: bool) -> Built:
    """Neither explains the other."""
    gate = nn.parameter.get_parameter_or_create(
        "gate", (1, 16), I.ConstantInitializer(1.0 if mended else 1e-9)
    )

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h * F.broadcast(gate, h.shape) / (1.0 if mended else 1e-9), 5, "head")
        centred = y - F.broadcast(F.mean(y, axis=1, keepdims=True), y.shape)
        return cross_entropy(y, t) + F.mean((F.sum(centred, axis=1) if not mended else centred) ** 2)

    return network(hidden, loss)


@trouble("rounded_index", "head/affine/ScatterAdd", "beyond its table", remedy=remedies.FEED_INDICES)
def messages_to_the_last_of_many_nodes(mended: bool) -> Built:
    """4095 is 4096 in float16, as soon as a function hands it on; mended, so is 300 of 300 in bfloat16."""
    nodes = 300 if mended else 4096
    to = nn.Variable((32, 1))

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h, 4, "head")
        received = F.scatter_add(F.constant(0.0, (nodes, 4)), F.broadcast(to, y.shape), y, axis=0)
        return F.mean((received - 0.5) ** 2) * (nodes / 32.0)

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        to.d = np.arange(nodes - 32, nodes)[:, None]

    return network(hidden, loss, fill)


@trouble("overflow", "z/affine/Exp", "beyond float16", remedy=remedies.LOG_SOFTMAX)
def exponentials_of_others_by_hand(mended: bool) -> Built:
    """A product with a mask leaves a sample itself out of the sum."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        z = affine(h, 8, "z")
        scores = F.affine(z, F.transpose(z, (1, 0))) * (0.1 if mended else 3.0)
        others = nn.Variable.from_numpy_array(1.0 - np.eye(32, dtype=np.float32))
        return F.mean(F.log(F.sum(F.exp(scores) * others, axis=1))) - F.mean(scores)

    return network(hidden, loss)


@trouble("overflow", "conv/conv/BatchMatmul", "numbers up to", remedy=remedies.PRODUCT)
def gram_of_pictures(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        maps = F.reshape(conv(100.0 * x, "conv"), (8, 8, 64))
        if mended:
            return F.batch_matmul(maps * 0.01, maps * 0.01, transpose_b=True)
        return F.batch_matmul(maps, maps, transpose_b=True) / 1e4

    return network(layers, shape=IMAGES)


@trouble(
    "precision",
    "mean/affine/RSubScalar",
    "the difference of numbers up to 1",
    remedy=remedies.LOG_OF_DIFFERENCE,
)
def density_of_a_squashed_action(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        u = affine(h, 4, "mean", bias=0.0 if mended else 6.0)
        return -F.mean(F.log(1.0 - F.tanh(u) ** 2 + 1e-6))

    return network(hidden, loss)


@trouble("overflow", "head/affine/Mul2#2", "the product with", remedy=remedies.SMALLER)
def momentum_in_large_units(mended: bool) -> Built:
    """The constant in 1 + y is not what makes it large."""

    def loss(y: nn.Variable, t: nn.Variable) -> nn.Variable:
        velocity = (1.0 + 0.2 * F.tanh(y)) * (1.0 if mended else 340.0)
        return F.mean(F.log((1.0 + 0.1 * F.sigmoid(y)) * velocity * velocity + 0.5))

    return network(lambda x: affine(hidden(x), 4, "head"), loss)


@trouble(
    "dead_relu",
    "head/affine/ReLU",
    "the bias head/affine/b reaches -4.6",
    remedy=OR_LEAKY(remedies.SMALLER_BIAS),
)
def scores_behind_a_relu_with_a_prior(mended: bool) -> Built:
    """The prior of a rare class is a bias far below 0; numbers before it are not much smaller."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(4.0 * h, 1, "head", 0.1, 0.0 if mended else -4.6)
        return F.mean((F.relu(y) - 0.1 * t) ** 2)

    return network(hidden, loss)


@trouble(
    "precision", "head/affine/RSubScalar", "the difference of numbers up to 1", remedy=remedies.ONE_MINUS_EXP
)
def absorption_of_thin_layers(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        depth = F.softplus(affine(h, 4, "head")) * (0.1 if mended else 3e-5)
        return F.mean(F.log((1.0 - F.exp(-depth)) / (0.1 if mended else 3e-5) + 0.1) ** 2)

    return network(hidden, loss)


@trouble("exploding_gradient", "scale/affine/Exp", "the product with", remedy=remedies.SMALLER, fatal=False)
def gradient_of_a_factor_beside_large_numbers(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        factor = F.exp(affine(h, 4, "scale", 0.1, 0.0 if mended else -9.0))
        large = F.constant(1.0 if mended else 60.0, factor.shape)
        return F.sum(F.sin(factor * large * large * large))

    return network(hidden, loss)


@trouble("precision", "head/affine/Sub2", "the difference of numbers up to", remedy=remedies.LARGER_STEP)
def finite_difference_of_a_small_step(mended: bool) -> Built:
    step = 0.1 if mended else 1e-5

    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        ahead, behind = (affine(hidden(v), 1, "head", 0.5) for v in (x + step, x - step))
        return F.mean(((ahead - behind) * (0.5 / step) - 1.0) ** 2)

    return network(lambda x: x, loss)
