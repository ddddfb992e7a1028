# SPDX-License-Identifier: Apache-2.0
"""Networks that nothing is wrong with, some of which leave parameters untrained on purpose."""

from __future__ import annotations

from typing import Callable, Dict, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from sklearn.datasets import load_digits

from nnabla_adaloss import GradScaler
from tests.worlds.tampering import Noise
from tests.worlds.trainings import updater_of

from .nets import Built, affine, classes, cross_entropy, feeder, hidden, inputs, network
from .troubles import IMAGES, trained


def conv(x: nn.Variable, name: str) -> nn.Variable:
    h = PF.convolution(x, 8, (3, 3), pad=(1, 1), name=name, rng=np.random.RandomState(len(name)))
    return PF.batch_normalization(h, name=f"{name}_bn")


def parameters(begin: str) -> Dict[str, nn.Variable]:
    return {name: v for name, v in nn.get_parameters().items() if name.startswith(begin)}


def mlp() -> Built:
    return network(lambda x: F.relu(affine(hidden(x), 16, "fc2")))


def mean_by_hand() -> Built:
    """The factor of a mean makes nothing small."""
    return network(
        lambda x: affine(hidden(x), 400, "head"),
        lambda y, t: F.sum(F.squared_error(y, F.broadcast(t, y.shape))) / y.size,
    )


def bias_by_hand() -> Built:
    """A batch normalization removes it, as it removes a layer's bias."""

    def layers(x: nn.Variable) -> nn.Variable:
        bias = nn.parameter.get_parameter_or_create("bias", (16,), I.ConstantInitializer(0.1))
        h = affine(x, 16, "fc1") + F.broadcast(F.reshape(bias, (1, 16)), (32, 16))
        return F.relu(PF.batch_normalization(h, name="bn"))

    return network(layers)


def forces() -> Built:
    """Forces are the gradient of an energy, whose last bias has no effect."""

    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        x = x.apply(need_grad=True)
        force = nn.grad([F.sum(affine(hidden(x), 1, "energy"))], [x])[0]
        return F.mean(F.squared_error(force, 0.1 * x.get_unlinked_variable(need_grad=False)))

    return trained(network(lambda x: x, loss), S.Adam(1e-3))


def warm_up() -> Built:
    """Its first steps are below the last bit of the weights."""
    loss, feed = mlp()
    updater = updater_of(loss, feed, S.Adam(1e-11))

    def feed_with_a_larger_rate() -> None:
        feed()
        updater.solver.set_learning_rate(2.0 * updater.solver.learning_rate())

    updater.data_feeder = feed_with_a_larger_rate
    return updater, None


Distance = Callable[[nn.Variable, nn.Variable], nn.Variable]


def copied(distance: Distance) -> Built:
    def parts(x: nn.Variable, scope: str) -> Tuple[nn.Variable, nn.Variable]:
        with nn.parameter_scope(scope):
            h = hidden(x)
            return affine(h, 5, "head"), affine(h, 8, "projection")

    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        (_, target), (scores, projection) = parts(x, "teacher"), parts(x, "student")
        for name, v in parameters("student/").items():
            # An average that differs by rounding errors.
            parameters("teacher/")[name.replace("student", "teacher")].d = 0.9 * v.d + 0.1 * v.d
        return cross_entropy(scores, t) + F.mean(distance(projection, target.apply(need_grad=False)))

    return trained(network(lambda x: x, loss), S.Adam(1e-3), parameters("student/"))


def copied_teacher() -> Built:
    """The student's projection learns when it has moved away from the teacher's, of which it is a copy."""
    return copied(F.squared_error)


def copied_teacher_by_hand() -> Built:
    return copied(lambda a, b: (a - b) ** 2)


def carried_state() -> Built:
    """Forward overwrites the state that it has read, before backward reads it."""
    x, t = inputs()
    start = nn.parameter.get_parameter_or_create(
        "state", (32, 16), I.ConstantInitializer(0.0), need_grad=False
    )
    state = start
    for _ in range(2):
        gate = F.sigmoid(affine(F.concatenate(x, state, axis=1), 16, "gate"))
        state = gate * state + (1.0 - gate) * F.tanh(affine(x, 16, "new"))
    state.persistent = True
    start.data = state.data
    return trained((cross_entropy(affine(state, 5, "head"), t), feeder(x, t)), S.Adam(1e-3))


def clipped_updates() -> Built:
    """A learning rate that would be too large without clipping."""
    clipped = updater_of(
        *mlp(), S.Sgd(100.0), weight_decay=1e-5, on_gradients=lambda s: s.clip_grad_by_norm(1e-3)
    )
    return clipped, None


def digits() -> Built:
    """LeNet on images that are no noise."""
    data, rng = load_digits(), np.random.default_rng(0)

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(F.max_pooling(conv(x, "conv1"), (2, 2)))
        h = F.relu(F.max_pooling(conv(h, "conv02"), (2, 2)))
        return affine(F.relu(affine(h, 64, "fc1")), 10, "fc2")

    def fill(x: nn.Variable, t: nn.Variable) -> None:
        chosen = rng.integers(0, len(data.images), 32)
        x.d, t.d = data.images[chosen, None] / 8.0 - 1.0, data.target[chosen, None]

    return network(layers, cross_entropy, fill, (32, 1, 8, 8))


def quantized() -> Built:
    """The gradient of a bias before a normalization is 0; that of the weight is behind a function."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = PF.fixed_point_quantized_convolution(
            x, 8, (3, 3), pad=(1, 1), delta_w=2.0**-6, quantize_b=False, name="conv"
        )
        return F.relu(PF.batch_normalization(h, name="bn"))

    return network(layers, shape=IMAGES)


def resnet() -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(conv(x, "stem"))
        h = F.relu(h + conv(F.relu(conv(h, "block1/a")), "block1/bb"))
        return F.average_pooling(h, (8, 8))

    return network(layers, shape=IMAGES)


def zero_initialised_residual() -> Built:
    """The last layer of a branch starts from 0, as residual nets and language models are often started."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = hidden(x)
        return h + affine(F.tanh(affine(h, 16, "inner")), 16, "out", factor=0.0)

    return network(layers)


def queries_that_start_from_zero() -> Built:
    """Learned queries are a layer's data; its weights get a gradient when these have moved."""

    def layers(x: nn.Variable) -> nn.Variable:
        queries = nn.parameter.get_parameter_or_create("queries", (32, 16), np.zeros((32, 16)))
        return F.tanh(affine(queries, 16, "of_queries") + affine(x, 16, "of_data"))

    return network(layers)


def group_norm_and_dropout() -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = PF.convolution(x, 8, (3, 3), name="c", rng=np.random.RandomState(0))
        return F.dropout(F.relu(PF.group_normalization(h, 4, name="gn")), 0.5)

    return network(layers, shape=IMAGES)


def augmented_images() -> Built:
    """Each forward draws a new augmentation, from a generator with a seed."""

    def layers(x: nn.Variable) -> nn.Variable:
        x = F.image_augmentation(x, x.shape[1:], pad=(1, 1), angle=0.3, noise=0.2, flip_lr=True, seed=0)
        return F.relu(conv(F.random_erase(x, prob=0.5, replacements=(0.0, 1.0), seed=1), "c"))

    return network(layers, shape=IMAGES)


def seeded_noise() -> Built:
    """Dropout, shifts and noise with seeds."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.random_shift(F.reshape(hidden(x), (32, 4, 4)), (1, 1), seed=3)
        h = F.dropout(h, 0.3, seed=5) + 0.1 * F.randn(shape=h.shape, seed=3)
        return F.random_flip(h * F.rand(0.5, 1.0, h.shape, seed=4), seed=2)

    return network(layers)


def noise_of_numpy() -> Built:
    """A function in Python that draws from a generator of numpy that all use."""
    return network(lambda x: Noise(own=False)(hidden(x)))


def fixed_statistics() -> Built:
    """Fine-tuning with the statistics of an earlier training."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = PF.convolution(x, 8, (3, 3), name="c", rng=np.random.RandomState(0))
        y = F.relu(PF.batch_normalization(h, batch_stat=False, name="bn"))
        nn.get_parameters(grad_only=False)["bn/bn/var"].d = 0.5
        return y

    return network(layers, shape=IMAGES)


def experts() -> Built:
    """A gate shares each sample among experts."""

    def layers(x: nn.Variable) -> nn.Variable:
        gate = F.reshape(F.softmax(affine(x, 3, "gate")), (32, 3, 1))
        each = F.reshape(affine(x, 48, "experts"), (32, 3, 16))
        return F.sum(F.broadcast(gate, each.shape) * F.tanh(each), axis=1)

    return network(layers)


def contrastive() -> Built:
    """Two views of each sample are to be alike, by cosines over a temperature."""

    def layers(x: nn.Variable) -> nn.Variable:
        views = [affine(hidden(x * factor), 8, "project") for factor in (1.0, 0.8)]
        one, two = (h / (F.sum(h**2, axis=1, keepdims=True) + 2**-12) ** 0.5 for h in views)
        return F.affine(one, F.transpose(two, (1, 0))) * 10.0

    labels = nn.Variable.from_numpy_array(np.arange(32, dtype=np.float32)[:, None])
    return network(layers, lambda scores, t: cross_entropy(scores, labels))


def triplets() -> Built:
    """Some margins are kept."""

    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        anchor, near, far = (F.tanh(affine(x * f, 8, "embed")) for f in (1.0, 0.9, -1.0))
        distances = [F.sum((anchor - v) ** 2, axis=1) for v in (near, far)]
        return F.mean(F.relu(distances[0] - distances[1] + 8.0))

    return network(lambda x: x, loss)


def adversarial() -> Built:
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


def critic() -> Built:
    """The loss of a Wasserstein critic, on data and on what a generator has made before, is below 0."""
    fake = nn.Variable((32, 16))

    def score(x: nn.Variable) -> nn.Variable:
        return F.mean(affine(F.leaky_relu(affine(x, 16, "fc1")), 1, "fc2"))

    def generate(x: nn.Variable, t: nn.Variable) -> None:
        fake.d = np.tanh(x.d[::-1])

    return network(lambda x: x, lambda x, t: score(fake) - score(x), generate)


def generated(scope: str = "") -> Tuple[nn.Variable, Callable[[], None], Dict[str, nn.Variable]]:
    """A generator's loss, whose gradient comes by way of a discriminator, and its own parameters."""
    z, t = nn.Variable((32, 4)), nn.Variable((32, 1))
    with nn.parameter_scope(f"{scope}g"):
        fake = affine(F.relu(affine(z, 16, "1")), 16, "2")
    own = parameters(f"{scope}g")
    with nn.parameter_scope(f"{scope}d"):
        on_fake = affine(F.leaky_relu(affine(fake, 16, "1")), 1, "2")
    loss = F.mean(F.sigmoid_cross_entropy(on_fake, F.constant(1, on_fake.shape)))
    return loss, feeder(z, t), own


def generator() -> Built:
    """The discriminator has no solver yet."""
    loss, feed, own = generated("gan/")
    return trained((loss, feed), S.Adam(1e-3), own)


def flat_generator() -> Built:
    """The solver of the discriminator exists."""
    loss, feed, own = generated()
    updater = updater_of(loss, feed, S.Adam(1e-3), own)
    updater.other = S.Adam(1e-3)
    updater.other.set_parameters(parameters("d"))
    return updater, None


def scaled_generator() -> Built:
    """A loop of its own with a solver for each network, both of one scaler."""
    loss, feed, own = generated()
    solvers = S.Adam(1e-3), S.Adam(1e-3)
    solvers[0].set_parameters(own)
    solvers[1].set_parameters(parameters("d"))
    scaler = GradScaler(*solvers, storage="float16")
    return loss, lambda: feed() if scaler else None


def frozen_discriminator() -> Built:
    """Its parameters need no gradient while the generator learns."""
    built, solver = (
        network(lambda z: PF.affine(affine(z, 16, "g"), 8, name="d", fix_parameters=True)),
        S.Adam(),
    )
    return trained(built, solver, {**parameters("g"), **parameters("head")})


def fixed_features() -> Built:
    """A frozen extractor, by `fix_parameters`."""
    return network(lambda x: F.tanh(PF.affine(x, 16, name="features", fix_parameters=True)))


def frozen_features() -> Built:
    """A frozen extractor, whose parameters need no gradient; the solver has them all the same."""
    x, t = inputs()
    h = hidden(x)
    loss, solver = classes(h, t), S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    for v in (*parameters("fc1/").values(), *h.parent.inputs[0].parent.inputs):
        v.need_grad = False
    return trained((loss, feeder(x, t)), solver, solver.get_parameters())


def unlinked_features() -> Built:
    """A frozen extractor, cut off by `unlinked`; the solver has the head alone."""
    x, t = inputs()
    features = hidden(x)
    loss = classes(features.get_unlinked_variable(need_grad=False), t)
    return trained((loss, feeder(x, t, features.forward)), S.Sgd(0.1), parameters("head/"))


def fine_tuned_head() -> Built:
    """A backbone that gets gradients and that the solver leaves alone."""
    built = network(lambda x: F.tanh(affine(hidden(x), 16, "fc2")))
    return trained(built, S.Sgd(0.1), parameters("head/"))


def biases_only() -> Built:
    """Fine-tuning of all biases, and of no weight."""
    built = mlp()
    return trained(built, S.Sgd(0.1), {n: v for n, v in nn.get_parameters().items() if n.endswith("/b")})


def q_learning() -> Built:
    """The loss of Q learning, with a target network beside the one that learns."""
    s2, rng = nn.Variable((32, 16)), np.random.default_rng(1)

    def q(state: nn.Variable, scope: str) -> nn.Variable:
        with nn.parameter_scope("dqn"), nn.parameter_scope(scope):
            return affine(F.relu(affine(state, 16, "fc1")), 5, "fc2")

    target = F.max(q(s2, "target"), axis=1, keepdims=True) * 0.9 + 0.1
    target.need_grad = False

    def fill(s: nn.Variable, a: nn.Variable) -> None:
        s2.d = rng.standard_normal(s2.shape)

    def taken(s: nn.Variable, a: nn.Variable) -> nn.Variable:
        return F.sum(q(s, "online") * F.one_hot(a, (5,)), axis=1, keepdims=True)

    return network(lambda s: s, lambda s, a: F.mean(F.huber_loss(taken(s, a), target)), fill)


def actor_and_critic() -> Built:
    """The advantage is a number to the actor; one solver trains both."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        value, log = affine(h, 1, "value"), F.log_softmax(affine(h, 5, "policy"))
        taken = F.sum(F.one_hot(t, (5,)) * log, axis=1, keepdims=True)
        return 0.5 * F.mean(F.squared_error(value, t)) - F.mean(taken * F.unlink(t - value))

    return trained(network(loss=loss), S.Adam(1e-3))


def tied_language_model() -> Built:
    """Words are embedded by the matrix that the outputs are computed with."""
    rng = np.random.default_rng(0)

    def layers(words: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(F.reshape(PF.embed(words, 12, 8, name="embed"), (32, 32)), 8, "fc"))
        return F.affine(h, F.transpose(nn.get_parameters()["embed/embed/W"], (1, 0)))

    def fill(words: nn.Variable, t: nn.Variable) -> None:
        words.d, t.d = rng.integers(0, 12, words.shape), rng.integers(0, 12, t.shape)

    return trained(network(layers, cross_entropy, fill, (32, 4)), S.Adam(1e-3))


def scaled_scores() -> Built:
    """Probabilities that are made scores again by a temperature."""
    return network(loss=lambda h, t: cross_entropy(F.softmax(affine(h, 5, "head")) * 10.0, t))


def label_smoothing() -> Built:
    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        soft = F.one_hot(t, (5,)) * 0.9 + 0.02
        return -F.mean(F.sum(soft * F.log_softmax(affine(h, 5, "head")), axis=1))

    return network(loss=loss)


def several_losses() -> Built:
    """A distribution's entropy and a regression beside the classes."""

    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        h = F.relu(affine(x, 16, "trunk"))
        y = affine(h, 5, "classes")
        entropy = -F.mean(F.sum(F.softmax(y) * F.log_softmax(y), axis=1))
        regression = F.mean(F.squared_error(affine(h, 16, "decoder"), x))
        return cross_entropy(y, t) + 0.1 * regression - 0.01 * entropy

    return trained(network(lambda x: x, loss), S.Momentum(0.01))


def siamese() -> Built:
    """The bias of the last layer cancels: its gradient is 0, or rounding errors."""

    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        one, other = (affine(F.relu(affine(v, 16, "first")), 4, "last") for v in (x, x[::-1]))
        distance = F.sum((one - other) ** 2, axis=1, keepdims=True)
        return F.mean(
            F.greater_scalar(t, 1) * distance + F.relu(1.0 - F.pow_scalar(distance + 1e-3, 0.5)) ** 2
        )

    return trained(network(lambda x: x, loss), S.Adam(1e-3))


def vae() -> Built:
    def loss(x: nn.Variable, t: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "encoder"))
        mu, log_variance = affine(h, 4, "mu"), affine(h, 4, "sigma", 0.1)
        z = mu + F.exp(0.5 * log_variance) * F.randn(shape=mu.shape)
        y = affine(F.tanh(affine(z, 16, "d1")), 16, "d2")
        kl = 0.5 * F.mean(F.sum(mu**2 + F.exp(log_variance) - log_variance - 1.0, axis=1))
        return F.mean(F.sum(F.squared_error(y, x), axis=1)) + kl

    return trained(network(lambda x: x, loss), S.Adam(1e-3))


def spatial_transformer() -> Built:
    """It starts from the identity, where sampled places lie on pixels."""

    def layers(x: nn.Variable) -> nn.Variable:
        start = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
        place = PF.affine(
            F.tanh(affine(x, 8, "where1")), 6, name="where2", w_init=I.ConstantInitializer(0.0), b_init=start
        )
        grid = F.affine_grid(F.reshape(place, (32, 2, 3)), (4, 4), align_corners=True)
        return F.warp_by_grid(F.reshape(x, (32, 1, 4, 4)), grid, align_corners=True)

    return network(layers)


def normalized_twice() -> Built:
    """The second normalization removes the first one's gamma, whose gradient cancels."""

    def layers(x: nn.Variable) -> nn.Variable:
        image = PF.batch_normalization(F.reshape(x, (32, 1, 4, 4)), name="bn0")
        rng = np.random.RandomState(3)
        h = PF.convolution(image, 8, (3, 3), pad=(1, 1), with_bias=False, name="conv", rng=rng)
        return F.reshape(F.relu(PF.batch_normalization(h, name="bn1")), (32, 128))

    return network(layers)


def slots_of_zeros() -> Built:
    """Keys get a gradient once the slots, which do, have moved."""

    def layers(x: nn.Variable) -> nn.Variable:
        slots = nn.parameter.get_parameter_or_create("slots", (1, 4, 8), I.ConstantInitializer(0.0))
        queries = PF.affine(F.broadcast(slots, (32, 4, 8)), 8, base_axis=2, name="q")
        read = F.reshape(x, (32, 2, 8))
        keys, values = (PF.affine(read, 8, base_axis=2, name=name) for name in "kv")
        chosen = F.batch_matmul(F.softmax(F.batch_matmul(queries, keys, transpose_b=True)), values)
        return F.reshape(F.tanh(chosen), (32, 32))

    return network(layers)


def blobs() -> Built:
    """Their tails become 0 in float16; a ReLU behind biases of 0 reads their sign alone."""
    places, rng = np.arange(16.0), np.random.RandomState(0)
    x, t = nn.Variable((8, 1, 16, 16)), nn.Variable((8, 2))
    h = F.relu(PF.convolution(x, 8, (3, 3), pad=(1, 1), name="c1", rng=np.random.RandomState(1)))
    h = F.relu(PF.convolution(h, 8, (3, 3), pad=(1, 1), stride=(8, 8), name="c2"))

    def feed() -> None:
        t.d = rng.uniform(0.2, 0.8, t.shape)
        rows, columns = (np.exp(-((places - c * 16.0) ** 2) / 2.0) for c in (t.d[:, :1], t.d[:, 1:]))
        x.d = (rows[:, :, None] * columns[:, None, :])[:, None]

    return trained((F.mean(F.squared_error(affine(h, 2, "head"), t)), feed), S.Adam())


def mask_by_a_large_factor() -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        read = F.reshape(x, (32, 4, 4))
        q, k, v = (PF.affine(read, 4, base_axis=2, name=name) for name in "qkv")
        mask = nn.Variable.from_numpy_array(np.tile(np.float32([1, 1, 1, 0]), (32, 4, 1)))
        scores = F.batch_matmul(q, k, transpose_b=True) + (mask - 1.0) * 3e4
        return F.reshape(F.batch_matmul(F.softmax(scores), v), (32, 16))

    return network(layers)


def choice_by_the_same_network() -> Built:
    """A double DQN: the parameters are read twice, once as constants."""
    x, after = nn.Variable((32, 8)), nn.Variable((32, 8))
    rng = np.random.RandomState(0)

    def values(v: nn.Variable, fixed: bool = False) -> nn.Variable:
        h = F.tanh(PF.affine(v, 16, name="fc", fix_parameters=fixed))
        return PF.affine(h, 4, name="q", fix_parameters=fixed)

    best = F.max(values(after, True), axis=1, only_index=True, keepdims=True)
    rewards = nn.Variable.from_numpy_array(rng.randn(32, 4))
    target = F.sum(F.one_hot(best, (4,)) * rewards, axis=1)

    def feed() -> None:
        x.d, after.d = rng.randn(32, 8), rng.randn(32, 8)

    return trained((F.mean(F.squared_error(F.sum(values(x), axis=1), target)), feed), S.Adam())


def mask_of_actions_before_a_logarithm() -> Built:
    allowed = nn.Variable.from_numpy_array(np.tile(np.float32([1, 1, 1, 1, 0]), (32, 1)))
    rare = np.arange(32)[:, None] % 4

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        scores = F.log_softmax(affine(h, 5, "policy") + (allowed - 1.0) * 3e4)
        chosen = F.one_hot(nn.Variable.from_numpy_array(rare), (5,))
        return -F.mean(F.sum(F.where(chosen, scores, F.constant(0.0, scores.shape)), axis=1))

    return network(hidden, loss)


def running_statistics_by_hand() -> Built:
    """Variables that forward writes, and that no one has registered as parameters."""
    shape = (1, 16, 1, 1)

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.reshape(affine(x, 16, "fc1"), (32, 16, 1, 1))
        beta, gamma = (nn.parameter.get_parameter_or_create(name, shape) for name in ("beta", "gamma"))
        beta.d, gamma.d = 0.0, 1.0
        mean, variance = (nn.Variable.from_numpy_array(np.full(shape, value)) for value in (0.0, 1.0))
        return F.tanh(F.reshape(F.batch_normalization(h, beta, gamma, mean, variance), (32, 16)))

    return network(layers)


HEALTHY: Dict[str, Callable[[], Built]] = {
    name: found
    for name, found in list(globals().items())
    if getattr(found, "__annotations__", None) == {"return": "Built"}
}
