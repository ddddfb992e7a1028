# SPDX-License-Identifier: Apache-2.0
"""Networks that are not finite somewhere, or whose gradient ends somewhere; with True they are mended."""

from __future__ import annotations

from typing import Callable, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from tests.worlds.trainings import updater_of

from .nets import Built, affine, classes, cross_entropy, feeder, hidden, inputs, network, trouble

IMAGES = (8, 3, 8, 8)


def conv(x: nn.Variable, name: str) -> nn.Variable:
    return PF.convolution(x, 8, (3, 3), pad=(1, 1), name=name, rng=np.random.RandomState(len(name)))


def heads(x: nn.Variable, factor: float = 1.0) -> List[nn.Variable]:
    """Queries, keys and values of four places."""
    return [F.reshape(affine(x, 32, n, f), (32, 4, 8)) for n, f in (("q", factor), ("k", factor), ("v", 1.0))]


def trained(built: Built, solver: S.Solver, parameters: object = None) -> Built:
    return updater_of(*built, solver, parameters), None


# Not finite, or beyond the format.


def of_data(spoil: Callable[[nn.Variable, nn.Variable], None]) -> Callable[[bool], Built]:
    """A sound network whose data is spoiled."""
    return lambda mended: network() if mended else network(spoil=spoil)


@trouble("data_not_finite", "fc1/affine", "the input of shape (32, 16), which holds 1 NaN")
@of_data
def nan_in_data(x: nn.Variable, t: nn.Variable) -> None:
    x.d[1, 2] = np.nan


@trouble("data_not_finite", "head/affine/SoftmaxCrossEntropy", "which holds 1 NaN", fatal=False)
@of_data
def nan_in_labels(x: nn.Variable, t: nn.Variable) -> None:
    t.d = np.where(np.arange(32)[:, None] == 3, np.nan, t.d)


@trouble("beyond_format", "fc1/affine", "beyond float16, which ends at 65504")
def column_of_timestamps(mended: bool) -> Built:
    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:, 0] *= 1.0 if mended else 1e8

    return network(lambda x: F.relu(PF.batch_normalization(affine(x, 16, "fc1"), name="bn")), spoil=spoil)


@trouble("weight_not_finite", "conv02/conv", "the parameter conv02/conv/W, which holds 1 infinity")
def infinity_in_a_kernel(mended: bool) -> Built:
    built = network(lambda x: F.relu(conv(F.relu(conv(x, "conv1")), "conv02")), shape=IMAGES)
    if not mended:
        nn.get_parameters()["conv02/conv/W"].d[0, 0, 1, 1] = np.inf
    return built


@trouble("weight_not_finite", "bn/bn", "the parameter bn/bn/mean, which holds 1 NaN")
def statistics_that_are_nan(mended: bool) -> Built:
    """A normalization that uses what an earlier training has left."""
    built = network(
        lambda x: PF.batch_normalization(conv(x, "conv1"), batch_stat=False, name="bn"), shape=IMAGES
    )
    if not mended:
        nn.get_parameters(grad_only=False)["bn/bn/mean"].d[0, 1] = np.nan
    return built


@trouble("not_finite", "fc1/affine/Div2", "by 4 numbers that become 0 in float16: it does not hold the")
def epsilon_that_the_format_does_not_hold(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        norm = F.maximum_scalar(F.sum(x**2, axis=1, keepdims=True), 1e-3 if mended else 1e-8)
        return hidden(x / norm)

    def padding(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:4] = 0.0

    return network(layers, spoil=padding)


@trouble("not_finite", "q/affine/Div2", "divides by 32 zeros, in fp32 too")
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


@trouble("not_finite", "head/affine/Log", "reads 80 zeros, in fp32 too")
def log_of_zero(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = F.relu(affine(h, 5, "head"))
        return -F.mean(F.one_hot(t, (5,)) * F.log(F.maximum_scalar(y, 2**-14) if mended else y))

    return network(loss=loss)


@trouble("not_finite", "head/affine/Log", "numbers below 0, in fp32 too")
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


@trouble("backward_not_finite", "fc1/affine/PowScalar", "its gradient is not finite, as it reads 270 zeros")
def root_of_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(affine(x, 16, "fc1"))
        return F.tanh((h + 2**-8 if mended else h) ** 0.5)

    return network(layers)


@trouble("backward_not_finite", "head/affine/PowScalar", "as it reads 32 zeros")
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


@trouble("overflow", "head/affine/Exp", "reads numbers up to 13.4; the weight head/affine/W makes numbers 13")
def exponential(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = affine(h, 1, "head", factor=8.0)
        y = F.minimum_scalar(y, 5.0) if mended else y
        return F.mean(F.exp(y) - t * y)

    return network(loss=loss)


@trouble("overflow", "head/affine/Sum", "adds up 576 numbers of up to")
def sum_of_a_map(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(PF.convolution(x, 4, (3, 3), name="conv", rng=np.random.RandomState(0)))
        return F.mean(h, axis=(2, 3)) if mended else F.sum(h, axis=(2, 3))

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return cross_entropy(PF.batch_normalization(affine(h, 5, "head"), name="bn", batch_stat=True), t)

    def large(x: nn.Variable, t: nn.Variable) -> None:
        x.d = 400.0 * np.abs(x.d)

    return network(layers, loss, large, (4, 1, 26, 26))


@trouble("overflow", "rnn/affine#16", "the weight rnn/affine/W is applied 16 times")
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


@trouble("overflow", "fc3/affine/SquaredError", "the weight fc2/affine/W makes numbers")
def a_weight_behind_the_loss(mended: bool) -> Built:
    """What leaves the range first is the loss, and it is not to blame."""

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


@trouble("closed_row", "head/affine/Softmax", "as the input of shape (1, 4, 4) reaches 1e+09, beyond float16")
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


@trouble("dead_relu", "fc2/affine/ReLU", "every output is 0 in every batch")
def dead_relu(mended: bool) -> Built:
    return network(lambda x: F.relu(affine(hidden(x), 16, "fc2", bias=0.0 if mended else -100.0)))


@trouble("dead_relu", "branch/affine/ReLU", "it is dead", fatal=False)
def dead_branch(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        return h + F.relu(affine(h, 16, "branch", bias=0.0 if mended else -100.0))

    return network(layers)


@trouble("saturated", "gate/affine/Sigmoid", "of its outputs are where its derivative", fatal=False)
def mostly_flat_sigmoid(mended: bool) -> Built:
    return network(lambda x: F.sigmoid(affine(x, 16, "gate", 1.0 if mended else 20.0)))


@trouble("saturated", "rnn/affine/Tanh", "of its outputs are where its derivative", fatal=False)
def saturated_recurrence(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for _ in range(3):
            x = F.tanh(affine(x, 16, "rnn", 1.0 if mended else 12.0))
        return x

    return network(layers)


@trouble("saturated", "head/affine/Softmax", "of its rows are 1 in one place", fatal=False)
def mostly_flat_softmax(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = heads(x, 1.0 if mended else 4.0)
        return F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v)

    return network(layers)


@trouble("saturated", "head/affine/MinimumScalar", "all of its outputs are where")
def clipped_away(mended: bool) -> Built:
    bias = 0.0 if mended else 20.0
    return network(lambda x: F.clip_by_value(affine(x, 16, "fc1", 0.5, bias), -1.0, 1.0))


@trouble("constant_softmax", "scores/affine/Softmax", "an axis of size 1")
def softmax_over_an_axis_of_one(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        places = F.reshape(affine(x, 32, "places"), (32, 4, 8))
        scores = F.reshape(affine(F.tanh(affine(x, 8, "fc")), 4, "scores"), (32, 4, 1))
        return F.sum(F.softmax(scores, axis=1 if mended else 2) * places, axis=1)

    return network(layers)


@trouble("constant_input", "bn/bn", "one number at a time", fatal=False)
def normalization_of_one_number(mended: bool) -> Built:
    """Each channel has one number, as the batch is one sample."""
    shape = (8 if mended else 1, 16)
    return network(lambda x: F.tanh(PF.batch_normalization(affine(x, 16, "fc1"), name="bn")), shape=shape)


@trouble("zero_factor", "bn/bn", "the parameter bn/bn/gamma, which is all 0", fatal=False)
def frozen_gamma_of_zero(mended: bool) -> Built:
    """A branch that starts from 0, and that nothing can move."""
    init = {"gamma": np.full((1, 8, 1, 1), 1.0 if mended else 0.0), "beta": np.zeros((1, 8, 1, 1))}

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(conv(x, "stem"))
        branch = PF.batch_normalization(conv(h, "branch"), name="bn", param_init=init, fix_parameters=True)
        return F.relu(h + branch)

    return trained(network(layers, shape=IMAGES), S.Sgd(0.1))


@trouble("zero_factor", "side/affine/MulScalar", "multiplies by 0", fatal=False)
def loss_weight_of_zero(mended: bool) -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return classes(h, t) + F.mean(affine(h, 1, "side") ** 2) * (0.1 if mended else 0.0)

    return network(loss=loss)


@trouble("zero_factor", "side/affine/Mul2", "the input of shape (32, 16), which is all 0", fatal=False)
def inverted_mask(mended: bool) -> Built:
    mask = nn.Variable((32, 16))

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        return classes(h, t) + F.mean(affine(h, 16, "side") ** 2 * mask)

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        mask.d = 1.0 if mended else 0.0

    return network(loss=loss, spoil=fill)


@trouble("zero_factor", "a/affine/Mul2", "multiplies by the output of a/affine, which is all 0")
def two_factors_of_zero(mended: bool) -> Built:
    """Both factors of a bilinear form start from 0: neither gets a gradient."""

    def layers(x: nn.Variable) -> nn.Variable:
        a, b = (affine(x, 16, name, 1.0 if mended else 0.0) for name in "ab")
        return F.sum(a * b, axis=1, keepdims=True)

    return network(layers, lambda y, t: F.mean(F.squared_error(y, t)))


@trouble("zero_weights", "fc3/affine", "weights are all 0 and get no gradient", fatal=False)
def two_layers_of_zeros(mended: bool) -> Built:
    factor = 1.0 if mended else 0.0
    return network(lambda x: F.tanh(affine(F.tanh(affine(hidden(x), 16, "fc2", factor)), 16, "fc3", factor)))


@trouble("small_factors", "fc1/affine/MulScalar#2", "multiply to 1.0e-60: 1e-20 in")
def product_of_factors_in_fp32(mended: bool) -> Built:
    def loss(y: nn.Variable, t: nn.Variable) -> nn.Variable:
        y = F.mean(y**2)
        for _ in range(0 if mended else 4):
            y = y * 1e-20
        return y + F.mean(t)

    return network(lambda x: affine(x, 16, "fc1"), loss)


@trouble("underflow", "head/affine/MulScalar#2", "factors multiply to 2.0e-09", fatal=False)
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


@trouble("rounding_noise", "head/affine", "nothing but rounding errors")
def mean_of_a_softmax(mended: bool) -> Built:
    return network(loss=lambda h, t: F.mean(F.softmax(affine(h, 5, "head")) ** (2 if mended else 1)))


@trouble("no_backward", "gate/affine/GreaterScalar", "has no backward")
def hard_gate(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        y = affine(x, 16, "gate")
        return hidden(x) * (F.sigmoid(y) if mended else F.greater_scalar(y, 0.0))

    return network(layers)


@trouble("unfed", "fc1/affine", "which nobody has filled")
def never_fed(mended: bool) -> Built:
    """The feeder fills variables of another build."""
    loss, feed = network()
    return loss, feed if mended else feeder(*inputs())


@trouble("unfed", "head/affine", "is unlinked: nothing computes it in forward")
def unlinked_trunk(mended: bool) -> Built:
    return network(lambda x: hidden(x) if mended else hidden(x).get_unlinked_variable())


@trouble("untrained", "fc1/affine", "of fc1/affine/Tanh, which has need_grad=False", fatal=False)
def cut_in_the_middle(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = hidden(x)
        h.need_grad = mended
        return F.tanh(affine(h, 16, "fc2"))

    return trained(network(layers), S.Sgd(0.1))


@trouble(
    "untrained", "fc1/affine", "the gradient stops at the output of fc1/affine/Tanh, which has need_grad"
)
def generator_cut_off(mended: bool) -> Built:
    """The step of a generator, with what it makes cut off as in the discriminator's."""

    def layers(x: nn.Variable) -> nn.Variable:
        fake = hidden(x)
        fake.need_grad = mended
        return F.leaky_relu(affine(fake, 16, "discriminator"))

    built = network(layers)
    own = {name: v for name, v in nn.get_parameters().items() if name.startswith("fc1/")}
    return trained(built, S.Adam(1e-3), own)


@trouble("untrained", "fc1/affine", "does not depend on 4 of the solver's parameters")
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


@trouble("overflow", "fc1/affine/PowScalar", "the bias fc1/affine/b reaches 20")
def bias_that_leaves_the_range(mended: bool) -> Built:
    return network(
        lambda x: F.pow_scalar(affine(x, 16, "fc1", 0.1, bias=1.0 if mended else 20.0), 4.0) * 1e-5
    )


@trouble(
    "precision", "head/affine/Log", "numbers up to 1 that it reads from fc1/affine/AddScalar", fatal=False
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
