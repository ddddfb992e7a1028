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

from .nets import Built, affine, classifier, cross_entropy, feeder, inputs, one_hot, trouble


def heads(x: nn.Variable, factor: float = 1.0) -> List[nn.Variable]:
    """Queries, keys and values of four places."""
    return [F.reshape(affine(x, 32, n, f), (32, 4, 8)) for n, f in (("q", factor), ("k", factor), ("v", 1.0))]


def conv(x: nn.Variable, name: str) -> nn.Variable:
    return PF.convolution(x, 8, (3, 3), pad=(1, 1), name=name, rng=np.random.RandomState(len(name)))


def images(layers: Callable[[nn.Variable], nn.Variable]) -> Built:
    x, t = nn.Variable((8, 3, 8, 8)), nn.Variable((8, 1))
    return cross_entropy(affine(layers(x), 5, "head"), t), feeder(x, t)


# Not finite, or beyond the format.


def of_data(spoil: Callable[[nn.Variable, nn.Variable], None]) -> Callable[[bool], Built]:
    """A sound network whose data is spoiled."""

    def build(mended: bool) -> Built:
        x, t = inputs()
        loss = cross_entropy(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"), t)
        return loss, feeder(x, t) if mended else feeder(x, t, lambda: spoil(x, t))

    return build


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
    x, t = inputs()
    h = F.relu(PF.batch_normalization(affine(x, 16, "fc1"), name="bn"))

    def spoil() -> None:
        x.d[:, 0] *= 1.0 if mended else 1e8

    return cross_entropy(affine(h, 5, "head"), t), feeder(x, t, spoil)


@trouble("weight_not_finite", "fc2/affine", "the parameter fc2/affine/W, which holds 1 NaN")
def nan_in_a_weight(mended: bool) -> Built:
    built = classifier(lambda x: F.tanh(affine(F.tanh(affine(x, 16, "fc1")), 16, "fc2")))
    if not mended:
        nn.get_parameters()["fc2/affine/W"].d[3, 4] = np.nan
    return built


@trouble(
    "not_finite", "fc1/affine/Div2", "divides by 4 numbers that become 0 in float16: it does not hold the"
)
def epsilon_that_the_format_does_not_hold(mended: bool) -> Built:
    x, t = inputs()
    norm = F.maximum_scalar(F.sum(x**2, axis=1, keepdims=True), 1e-3 if mended else 1e-8)

    def padding() -> None:
        x.d[:4] = 0.0

    return cross_entropy(affine(F.tanh(affine(x / norm, 16, "fc1")), 5, "head"), t), feeder(x, t, padding)


@trouble("not_finite", "head/affine/Log", "reads 80 zeros, in fp32 too")
def log_of_zero(mended: bool) -> Built:
    x, t = inputs()
    y = F.relu(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"))
    return -F.mean(one_hot(t) * F.log(F.maximum_scalar(y, 2**-14) if mended else y)), feeder(x, t)


@trouble("backward_not_finite", "fc1/affine/PowScalar", "its gradient is not finite, as it reads 270 zeros")
def root_of_zero(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(affine(x, 16, "fc1"))
        return F.tanh((h + 2**-8 if mended else h) ** 0.5)

    return classifier(layers)


@trouble("backward_not_finite", "head/affine/PowScalar", "as it reads 32 zeros")
def root_beside_another_use(mended: bool) -> Built:
    """What else reads the same hands on what the root has spoiled."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "fc1"))
        distance = F.sum((h - h * 1.0) ** 2, axis=1, keepdims=True)
        root = (distance + 2**-8 if mended else distance) ** 0.5
        return F.broadcast(root, h.shape) + affine(h, 16, "fc2")

    return classifier(layers)


@trouble("overflow", "head/affine/Exp", "reads numbers up to 13.4; the weight head/affine/W makes numbers 13")
def exponential(mended: bool) -> Built:
    x, t = inputs()
    y = affine(F.tanh(affine(x, 16, "fc1")), 1, "head", factor=8.0)
    y = F.minimum_scalar(y, 5.0) if mended else y
    return F.mean(F.exp(y) - t * y), feeder(x, t)


@trouble("overflow", "head/affine/Sum", "adds up 576 numbers of up to")
def sum_of_a_map(mended: bool) -> Built:
    x, t = nn.Variable((4, 1, 26, 26)), nn.Variable((4, 1))
    h = F.relu(PF.convolution(x, 4, (3, 3), name="conv", rng=np.random.RandomState(0)))
    h = F.mean(h, axis=(2, 3)) if mended else F.sum(h, axis=(2, 3))
    fill = feeder(x, t)

    def feed() -> None:
        fill()
        x.d = 400.0 * np.abs(x.d)

    return cross_entropy(PF.batch_normalization(affine(h, 5, "head"), name="bn", batch_stat=True), t), feed


@trouble("overflow", "rnn/affine#16", "the weight rnn/affine/W is applied 16 times")
def recurrence_that_grows(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for _ in range(20):
            x = F.relu(PF.affine(x, 16, name="rnn", w_init=np.eye(16) * (1.0 if mended else 1.9)))
        return x

    return classifier(layers)


@trouble("overflow", "fc3/affine/SquaredError", "the weight fc2/affine/W makes numbers")
def a_weight_behind_the_loss(mended: bool) -> Built:
    """What leaves the range first is the loss, and it is not to blame."""
    x, t = inputs()
    h = affine(F.tanh(affine(x, 16, "fc1")), 16, "fc2", 1.0 if mended else 1e3)
    return F.mean(F.squared_error(affine(F.tanh(h) if mended else h, 1, "fc3"), t)), feeder(x, t)


@trouble("closed_row", "head/affine/Softmax", "as the input of shape (1, 4, 4) reaches 1e+09, beyond float16")
def mask_beyond_the_format(mended: bool) -> Built:
    """Rows of padding: uniform in fp32, nothing but minus infinity in float16."""
    x, t = inputs()
    mask = nn.Variable((1, 4, 4))
    mask.d = np.where(np.arange(4)[:, None] == 3, -1e9, 0.0)
    mask.d[0, 3, 3] = 0.0 if mended else -1e9
    q, k, v = (F.reshape(affine(x, 32, name), (32, 4, 8)) for name in "qkv")
    scores = F.batch_matmul(q, k, transpose_b=True)
    h = F.batch_matmul(F.softmax(scores + F.broadcast(mask, scores.shape)), v)
    return cross_entropy(affine(h, 5, "head"), t), feeder(x, t)


@trouble("precision", "fc1/affine/Sub2", "the difference of numbers up to 3.66e+03")
def variance_of_large_numbers(mended: bool) -> Built:
    x, t = inputs()
    z = x + (0.0 if mended else 60.0)
    mean = F.mean(z, axis=1, keepdims=True)
    v = F.mean(z**2, axis=1, keepdims=True) - mean**2
    return cross_entropy(affine(F.tanh(affine(F.concatenate(v, x * 0.01), 16, "fc1")), 5, "head"), t), feeder(
        x, t
    )


@trouble("not_finite", "q/affine/Div2", "divides by 32 zeros, in fp32 too")
def cosine_of_padding(mended: bool) -> Built:
    """Attention by cosines; the last place of some samples is padding."""
    x, t = nn.Variable((32, 4, 8)), nn.Variable((32, 1))
    q, k = (PF.affine(x, 8, 2, name=n, rng=np.random.RandomState(1)) for n in "qk")
    length = F.sum(q**2, axis=2, keepdims=True)
    q = q / (F.maximum_scalar(length, 2**-10) if mended else length)
    h = F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), x)

    def pad() -> None:
        x.d[:, 3] = 0.0

    return cross_entropy(affine(h, 5, "head"), t), feeder(x, t, pad)


@trouble("overflow", "q/affine/BatchMatmul", "it computes numbers up to")
def scores_divided_too_late(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = heads(x, 100.0)
        if mended:
            scores = F.batch_matmul(q * 1e-4, k, transpose_b=True)
        else:
            scores = F.batch_matmul(q, k, transpose_b=True) * 1e-4
        return F.batch_matmul(F.softmax(scores), v)

    return classifier(layers)


@trouble("not_finite", "d2/affine/Log", "become 0 in float16")
def sure_discriminator(mended: bool) -> Built:
    """The generator's loss of the first paper."""
    z, t = nn.Variable((32, 8)), nn.Variable((32, 1))
    fake = affine(F.relu(affine(z, 16, "g1")), 16, "g2")
    y = affine(F.leaky_relu(affine(fake, 16, "d1")), 1, "d2", bias=-9.0 if mended else 9.0)
    return F.mean(F.log(1.0 - F.sigmoid(y))) + 0.0 * F.mean(t), feeder(z, t)


@trouble("weight_not_finite", "conv02/conv", "the parameter conv02/conv/W, which holds 1 infinity")
def infinity_in_a_kernel(mended: bool) -> Built:
    built = images(lambda x: F.relu(conv(F.relu(conv(x, "conv1")), "conv02")))
    if not mended:
        nn.get_parameters()["conv02/conv/W"].d[0, 0, 1, 1] = np.inf
    return built


@trouble("weight_not_finite", "bn/bn", "the parameter bn/bn/mean, which holds")
def statistics_that_are_nan(mended: bool) -> Built:
    """A normalization that uses what an earlier training has left."""
    built = images(lambda x: F.relu(PF.batch_normalization(conv(x, "conv1"), batch_stat=False, name="bn")))
    if not mended:
        nn.get_parameters(grad_only=False)["bn/bn/mean"].d[0, 1] = np.nan
    return built


@trouble("overflow", "sigma/affine/Exp", "reads numbers up to")
def variance_of_a_vae(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "encoder"))
    mu, log_variance = affine(h, 4, "mu"), affine(h, 4, "sigma", 0.1 if mended else 12.0)
    z = mu + F.exp(log_variance) * F.randn(shape=mu.shape)
    return cross_entropy(affine(F.tanh(z), 5, "head"), t), feeder(x, t)


@trouble("not_finite", "head/affine/Mul2", "0 times")
def infinite_mask_times_zero(mended: bool) -> Built:
    """Scores of impossible classes are minus infinity, and their labels 0."""
    x, t = inputs()
    mask = nn.Variable.from_numpy_array(np.array([[0, 0, 0, 0, -1e4 if mended else -np.inf]], np.float32))
    y = affine(F.tanh(affine(x, 16, "fc1")), 5, "head")

    def possible() -> None:
        t.d = t.d % 4

    log = F.log_softmax(y + F.broadcast(mask, y.shape))
    return -F.mean(F.sum(F.one_hot(t, (5,)) * log, axis=1)), feeder(x, t, possible)


# Where the gradient ends.


@trouble("dead_relu", "fc2/affine/ReLU", "every output is 0 in every batch")
def dead_relu(mended: bool) -> Built:
    bias = 0.0 if mended else -100.0
    return classifier(lambda x: F.relu(affine(F.tanh(affine(x, 16, "fc1")), 16, "fc2", bias=bias)))


@trouble("dead_relu", "branch/affine/ReLU", "it is dead", fatal=False)
def dead_branch(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        return h + F.relu(affine(h, 16, "branch", bias=0.0 if mended else -100.0))

    return classifier(layers)


@trouble("saturated", "gate/affine/Sigmoid", "of its outputs are where its derivative", fatal=False)
def mostly_flat_sigmoid(mended: bool) -> Built:
    return classifier(lambda x: F.sigmoid(affine(x, 16, "gate", 1.0 if mended else 20.0)))


@trouble("saturated", "head/affine/Softmax", "of its rows are 1 in one place", fatal=False)
def mostly_flat_softmax(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        factors = {"q": 1.0 if mended else 4.0, "k": 1.0 if mended else 4.0, "v": 1.0}
        q, k, v = (F.reshape(affine(x, 32, n, factor), (32, 4, 8)) for n, factor in factors.items())
        return F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v)

    return classifier(layers)


@trouble("constant_softmax", "scores/affine/Softmax", "an axis of size 1")
def softmax_over_an_axis_of_one(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        places = F.reshape(affine(x, 32, "places"), (32, 4, 8))
        scores = F.reshape(affine(F.tanh(affine(x, 8, "fc")), 4, "scores"), (32, 4, 1))
        return F.sum(F.softmax(scores, axis=1 if mended else 2) * places, axis=1)

    return classifier(layers)


@trouble("zero_factor", "side/affine/MulScalar", "multiplies by 0", fatal=False)
def loss_weight_of_zero(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "fc1"))
    side = F.mean(affine(h, 1, "side") ** 2)
    return cross_entropy(affine(h, 5, "head"), t) + side * (0.1 if mended else 0.0), feeder(x, t)


@trouble("zero_weights", "fc3/affine", "weights are all 0 and get no gradient", fatal=False)
def two_layers_of_zeros(mended: bool) -> Built:
    factor = 1.0 if mended else 0.0

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(F.tanh(affine(x, 16, "fc1")), 16, "fc2", factor))
        return F.tanh(affine(h, 16, "fc3", factor))

    return classifier(layers)


@trouble("small_factors", "fc1/affine/MulScalar#2", "multiply to 1.0e-60: 1e-20 in")
def product_of_factors_in_fp32(mended: bool) -> Built:
    x, t = inputs()
    y = loss = F.mean(affine(x, 16, "fc1") ** 2)
    for _ in range(0 if mended else 4):
        y = y * 1e-20
    return y + F.mean(t) if not mended else loss, feeder(x, t)


@trouble("underflow", "head/affine/MulScalar#2", "factors multiply to 2.0e-09", fatal=False)
def product_of_factors_as_stored(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        for factor in () if mended else (1e-3, 2e-3, 1e-3):
            x = x * factor
        return x

    return classifier(lambda x: layers(F.tanh(affine(x, 16, "fc1"))))


@trouble("underflow", "head/affine/Mul2", "reads the input of shape (32, 1), of whose numbers 100% become 0")
def elementwise_weights(mended: bool) -> Built:
    x, t = inputs()
    w, y = nn.Variable((32, 1)), affine(F.tanh(affine(x, 16, "fc1")), 1, "head")

    def fill() -> None:
        w.d = np.full(w.shape, 1.0 if mended else 1e-9)

    return F.mean(F.squared_error(y, t) * w), feeder(x, t, fill)


@trouble("rounding_noise", "head/affine", "nothing but rounding errors")
def mean_of_a_softmax(mended: bool) -> Built:
    x, t = inputs()
    p = F.softmax(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"))
    return F.mean(p**2 if mended else p), feeder(x, t)


@trouble("no_backward", "gate/affine/GreaterScalar", "has no backward")
def hard_gate(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        y = affine(x, 16, "gate")
        return F.tanh(affine(x, 16, "fc1")) * (F.sigmoid(y) if mended else F.greater_scalar(y, 0.0))

    return classifier(layers)


@trouble("unfed", "fc1/affine", "which nobody has filled")
def never_fed(mended: bool) -> Built:
    """The feeder fills variables of another build."""
    (x, t), others = inputs(), inputs()
    loss = cross_entropy(affine(F.tanh(affine(x, 16, "fc1")), 5, "head"), t)
    return loss, feeder(x, t) if mended else feeder(*others)


@trouble("unfed", "head/affine", "is unlinked: nothing computes it in forward")
def unlinked_trunk(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "trunk"))
    return cross_entropy(affine(h if mended else h.get_unlinked_variable(), 5, "head"), t), feeder(x, t)


@trouble(
    "untrained", "trunk/affine", "stops at the output of trunk/affine/Tanh, which has need_grad", fatal=False
)
def trunk_without_gradient(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "trunk"))
    h.need_grad = mended
    return updater_of(cross_entropy(affine(h, 5, "head"), t), feeder(x, t), S.Sgd(0.1)), None


@trouble("untrained", "fc1/affine", "which has need_grad=False", fatal=False)
def cut_in_the_middle(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "fc1"))
    h.need_grad = mended
    loss = cross_entropy(affine(F.tanh(affine(h, 16, "fc2")), 5, "head"), t)
    return updater_of(loss, feeder(x, t), S.Sgd(0.1)), None


@trouble("untrained", "fc1/affine", "does not depend on 4 of the solver's parameters")
def parameters_of_another_build(mended: bool) -> Built:
    loss, feed = classifier(lambda x: affine(x, 16, "fc1"))
    parameters = nn.get_parameters()
    if not mended:
        nn.clear_parameters()
        classifier(lambda x: affine(x, 16, "fc1"))
        parameters = nn.get_parameters()
    return updater_of(loss, feed, S.Sgd(0.1), parameters), None


class NnablasUpdater:
    """What of nnabla's updater is looked at; it takes a solver without parameters."""

    def __init__(self, solver: S.Solver, built: Built) -> None:
        self.solver = solver
        self.loss, self.data_feeder = built


@trouble("empty_solver", "the solver", "has no parameters")
def solver_without_parameters(mended: bool) -> Built:
    built, solver = classifier(lambda x: affine(x, 16, "fc1")), S.Sgd(0.1)
    if mended:
        solver.set_parameters(nn.get_parameters())
    return NnablasUpdater(solver, built), None


@trouble("epsilon", "fc1/affine", "below the solver's epsilon of 1e-08")
def epsilon_of_adam(mended: bool) -> Built:
    loss, feed = classifier(lambda x: F.tanh(affine(x, 16, "fc1")))
    return updater_of(loss * 1e-10, feed, S.Adam(1e-3, eps=1e-20 if mended else 1e-8)), None


@trouble("saturated", "head/affine/MinimumScalar", "all of its outputs are where")
def clipped_away(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        return F.clip_by_value(affine(x, 16, "fc1", 0.5, 0.0 if mended else 20.0), -1.0, 1.0)

    return classifier(layers)


@trouble("constant_input", "bn/bn", "one number at a time", fatal=False)
def normalization_of_one_number(mended: bool) -> Built:
    """Each channel has one number, as the batch is one pixel."""
    x, t = nn.Variable((8 if mended else 1, 16)), nn.Variable((8 if mended else 1, 1))
    h = PF.batch_normalization(affine(x, 16, "fc1"), name="bn")
    return cross_entropy(affine(F.tanh(h), 5, "head"), t), feeder(x, t)


@trouble("zero_factor", "bn/bn", "the parameter bn/bn/gamma, which is all 0", fatal=False)
def frozen_gamma_of_zero(mended: bool) -> Built:
    """A branch that starts from 0, and that nothing can move."""
    gamma = np.full((1, 8, 1, 1), 1.0 if mended else 0.0)

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(conv(x, "stem"))
        init = {"gamma": gamma, "beta": np.zeros_like(gamma)}
        branch = PF.batch_normalization(
            conv(h, "branch"), name="bn", param_init=init, fix_parameters=True, batch_stat=True
        )
        return F.relu(h + branch)

    loss, feed = images(layers)
    return updater_of(loss, feed, S.Sgd(0.1)), None


@trouble("saturated", "rnn/affine/Tanh", "of its outputs are where its derivative", fatal=False)
def saturated_recurrence(mended: bool) -> Built:
    factor = 1.0 if mended else 12.0

    def layers(x: nn.Variable) -> nn.Variable:
        for _ in range(3):
            x = F.tanh(affine(x, 16, "rnn", factor))
        return x

    return classifier(layers)


@trouble("zero_factor", "side/affine/Mul2", "which is all 0", fatal=False)
def inverted_mask(mended: bool) -> Built:
    (x, t), mask = inputs(), nn.Variable((32, 16))
    h = F.tanh(affine(x, 16, "trunk"))
    side = F.mean(F.squared_error(affine(h, 16, "side"), x) * mask)

    def fill() -> None:
        mask.d = 1.0 if mended else 0.0

    return cross_entropy(affine(h, 5, "head"), t) + side, feeder(x, t, fill)


@trouble("untrained", "g1/affine", "the gradient stops at the output of g2/affine, which has need_grad=False")
def generator_cut_off(mended: bool) -> Built:
    z, t = nn.Variable((32, 4)), nn.Variable((32, 1))
    fake = affine(F.relu(affine(z, 16, "g1")), 16, "g2")
    own = nn.get_parameters()
    fake.need_grad = mended
    on_fake = affine(F.leaky_relu(affine(fake, 16, "d1")), 1, "d2")
    loss = F.mean(F.sigmoid_cross_entropy(on_fake, F.constant(1, on_fake.shape)))
    return updater_of(loss, feeder(z, t), S.Adam(1e-3), own), None


@trouble("epsilon", "side/affine", "below the solver's epsilon of 1e-08", fatal=False)
def epsilon_of_one_head(mended: bool) -> Built:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "trunk"))
    side = F.mean(F.squared_error(affine(h, 16, "side"), x))
    loss = cross_entropy(affine(h, 5, "head"), t) + (1e-2 if mended else 1e-9) * side
    return updater_of(loss, feeder(x, t), S.Adam(1e-3)), None


@trouble("zero_factor", "a/affine/Mul2", "multiplies by the output of a/affine, which is all 0")
def zero_embedding_and_output(mended: bool) -> Built:
    """Two factors of a bilinear form that both start from 0: neither gets a gradient."""
    x, t = inputs()
    a, b = (affine(x, 16, name, 1.0 if mended else 0.0) for name in "ab")
    return F.mean(F.squared_error(F.sum(a * b, axis=1, keepdims=True), t)), feeder(x, t)


@trouble("no_backward", "head/affine/OneHot", "has no backward")
def hard_attention(mended: bool) -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        q, k, v = heads(x)
        scores = F.batch_matmul(q, k, transpose_b=True)
        if mended:
            return F.batch_matmul(F.softmax(scores), v)
        chosen = F.max(scores, axis=2, keepdims=True, only_index=True)
        return F.batch_matmul(F.one_hot(chosen, (4,)), v)

    return classifier(layers)
