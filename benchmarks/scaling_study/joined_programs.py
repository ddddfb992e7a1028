# SPDX-License-Identifier: Apache-2.0
"""Networks with merged components: transformers, recurrent ones, and others that share weights."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Mapping, NamedTuple, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from common.digits import BatchFeeder, Examples, load
from nnabla.parameter import get_parameter_or_create
from numpy.typing import NDArray

from .task import Player, accuracy, cross_entropy

_SYMBOLS, _LENGTH, _WIDTH, _ATTENTIONS = 8, 8, 32, 2

Array = NDArray[Any]


class Built(NamedTuple):
    """Network that is ready to be trained."""

    players: Sequence[Player]
    score: Callable[[], float]  # from 0 to 1, the best
    inputs: Mapping[str, nn.Variable]  # leaves whose gradients are compared, besides parameters


def _adam(learning_rate: float) -> Any:
    """Make an Adam with equal steps down to gradients of 1e-18; the squares of smaller ones are zero."""
    return S.Adam(learning_rate, eps=1e-18)


class Program(NamedTuple):
    """Network and its training settings."""

    title: str
    build: Callable[[int], Built]
    learning_rate: float
    iterations: int
    solver: Callable[[float], Any] = _adam


def _one_hot(numbers: Array, count: int) -> Array:
    return np.eye(count, dtype=np.float32)[numbers]


def _normal(scale: float, *shape: int) -> Array:
    drawn: Array = nn.random.prng.standard_normal(shape)
    return drawn * scale


def _dense(
    h: nn.Variable, width: int, name: str, scale: float = 1.0, *, with_bias: bool = True
) -> nn.Variable:
    """Apply a dense layer to the last axis, with outputs `scale` times as large as inputs."""
    weight = _normal(scale / np.sqrt(h.shape[-1]), h.shape[-1], width)
    return PF.affine(h, width, base_axis=h.ndim - 1, w_init=weight, with_bias=with_bias, name=name)


def _attention(h: nn.Variable, out: float) -> nn.Variable:
    batch, length, width = h.shape
    each = width // _ATTENTIONS

    def part(name: str) -> nn.Variable:
        # Keys have no bias: softmax would cancel it.
        apart = F.reshape(_dense(h, width, name, with_bias=name != "key"), (batch, length, _ATTENTIONS, each))
        return F.transpose(apart, (0, 2, 1, 3))

    alike = F.batch_matmul(part("query"), part("key"), transpose_b=True) * each**-0.5
    mixed = F.batch_matmul(F.softmax(alike, axis=3), part("value"))
    return _dense(F.reshape(F.transpose(mixed, (0, 2, 1, 3)), h.shape), width, "out", out)


def _block(h: nn.Variable, name: str, out: float, *, normalized: bool) -> nn.Variable:
    """Apply attention and two dense layers, each with a shortcut, and outputs `out` times as large."""

    def ready(h: nn.Variable, name: str) -> nn.Variable:
        return PF.layer_normalization(h, batch_axis=(0, 1), name=name) if normalized else h

    with nn.parameter_scope(name):
        h = h + _attention(ready(h, "norm1"), out)
        wide = F.relu(_dense(ready(h, "norm2"), 2 * _WIDTH, "wide"))
        return h + _dense(wide, _WIDTH, "narrow", out)


def _transformer(blocks: int, seed: int, *, normalized: bool = True) -> Built:
    batch = 16
    x, t = nn.Variable((batch, _LENGTH, _SYMBOLS)), nn.Variable((batch, _LENGTH, 1))

    def net(x: nn.Variable) -> nn.Variable:
        start = _normal(1.0, 1, _LENGTH, _WIDTH)
        places = get_parameter_or_create("places", start.shape, start)
        h = _dense(x, _WIDTH, "symbols", np.sqrt(_SYMBOLS))
        h = h + F.broadcast(places, h.shape)
        for index in range(blocks):
            out = 0.5 if normalized else 0.5 * blocks**-0.5
            h = _block(h, f"block{index}", out, normalized=normalized)
        if normalized:
            h = PF.layer_normalization(h, batch_axis=(0, 1), name="norm")
        return _dense(h, _SYMBOLS, "logits")

    def drawn(random: Any, count: int) -> Tuple[Array, Array]:
        symbols = random.randint(0, _SYMBOLS, (count, _LENGTH))
        # The first position has no predecessor and predicts itself.
        told = np.concatenate([symbols[:, :1], symbols[:, :-1]], axis=1)
        return _one_hot(symbols, _SYMBOLS), told[:, :, np.newaxis]

    loss = F.mean(F.softmax_cross_entropy(net(x), t, axis=2))
    parameters, random = nn.get_parameters(), np.random.RandomState(seed)

    def feed() -> None:
        x.d, t.d = drawn(random, batch)

    shown, wanted = drawn(np.random.RandomState(1234), 64)
    score = _right(net(nn.Variable.from_numpy_array(shown)), wanted[:, :, 0])
    return Built([Player(loss, parameters, feed)], score, {"x": x})


def _right(logits: nn.Variable, wanted: Array) -> Callable[[], float]:
    """Make a function that computes the share of correct largest logits."""

    def score() -> float:
        logits.forward(clear_buffer=True)
        return float((logits.d.argmax(axis=-1) == wanted).mean())

    return score


# Recurrent nets: a symbol that is shown at one step is classified at the end. -------------------------------

_STATE, _CLASSES, _NOISE = 24, 4, 0.1

Step = Callable[[nn.Variable, Sequence[nn.Variable], float], Sequence[nn.Variable]]


def _orthogonal(gain: float, width: int) -> Array:
    q, _ = np.linalg.qr(nn.random.prng.standard_normal((width, width)))
    return gain * q


def _tanh_cell(x: nn.Variable, state: Sequence[nn.Variable], gain: float) -> Sequence[nn.Variable]:
    (h,) = state
    recurrent = PF.affine(h, _STATE, w_init=_orthogonal(gain, _STATE), with_bias=False, name="recurrent")
    return [F.tanh(PF.affine(x, _STATE, name="input") + recurrent)]


def _lstm_cell(x: nn.Variable, state: Sequence[nn.Variable], gain: float) -> Sequence[nn.Variable]:
    """LSTM cell with a half-closed forget gate, and recurrent weights times `gain`."""
    h, c = state
    weights = np.concatenate([_orthogonal(gain, _STATE) for _ in range(4)], axis=1)
    recurrent = PF.affine(h, 4 * _STATE, w_init=weights, with_bias=False, name="recurrent")
    gates = F.reshape(PF.affine(x, 4 * _STATE, name="input") + recurrent, (x.shape[0], 4, _STATE))
    i, f, o, g = F.split(gates, axis=1)
    c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
    return [F.sigmoid(o) * F.tanh(c), c]


def _recurrent(cell: Step, states: int, steps: int, gain: float, shown_at: int, seed: int) -> Built:
    """Build a net with a trained initial state; the symbol is shown `shown_at` steps from either end."""
    batch = 32

    def net(inputs: Sequence[nn.Variable]) -> nn.Variable:
        state = []
        for index in range(states):
            start = get_parameter_or_create(f"state{index}", (1, _STATE), _normal(0.1, 1, _STATE))
            state.append(F.broadcast(start, (inputs[0].shape[0], _STATE)))
        for x in inputs:
            state = list(cell(x, state, gain))
        return PF.affine(state[0], _CLASSES, name="logits")

    def drawn(random: Any, count: int) -> Tuple[Array, Array]:
        x = _NOISE * random.standard_normal((steps, count, _CLASSES)).astype(np.float32)
        t = random.randint(0, _CLASSES, (count, 1))
        x[shown_at] += _one_hot(t[:, 0], _CLASSES)
        return x, t

    inputs, t = [nn.Variable((batch, _CLASSES)) for _ in range(steps)], nn.Variable((batch, 1))
    loss = cross_entropy(net(inputs), t)
    parameters, random = nn.get_parameters(), np.random.RandomState(seed)

    def feed() -> None:
        drawn_x, t.d = drawn(random, batch)
        for variable, x in zip(inputs, drawn_x):
            variable.d = x

    shown, wanted = drawn(np.random.RandomState(1234), 256)
    score = _right(net([nn.Variable.from_numpy_array(x) for x in shown]), wanted[:, 0])
    looked_at = {"x first": inputs[0], "x middle": inputs[steps // 2], "x last": inputs[-1]}
    return Built([Player(loss, parameters, feed)], score, looked_at)


_rnn = partial(_recurrent, _tanh_cell, 1)
_lstm = partial(_recurrent, _lstm_cell, 2)


# Nets that use a weight more than once. --------------------------------------------------------------------


def _siamese(seed: int) -> Built:
    """Decide whether two images show the same digit."""
    batch, (examples, test) = 32, load()

    def tower(x: nn.Variable) -> nn.Variable:
        h = F.reshape(x, (x.shape[0], -1))
        for index in range(3):
            h = F.tanh(PF.affine(h, 32, name=f"layer{index}"))
        return PF.affine(h, 8, with_bias=False, name="place")

    def logit(a: nn.Variable, b: nn.Variable) -> nn.Variable:
        apart = F.mean((tower(a) - tower(b)) ** 2, axis=1, keepdims=True)
        nearness = get_parameter_or_create("nearness", (1, 1), np.ones((1, 1)))
        return F.broadcast(nearness, apart.shape) - apart

    def drawn(random: Any, of: Examples, count: int) -> Tuple[Array, Array, Array]:
        digits = of.t[:, 0]
        first = random.randint(0, len(digits), count)
        second = random.randint(0, len(digits), count)
        for index in range(0, count, 2):
            second[index] = random.choice(np.flatnonzero(digits == digits[first[index]]))
        return of.x[first], of.x[second], (digits[first] == digits[second])[:, np.newaxis]

    shape = (batch, *examples.x.shape[1:])
    a, b, t = nn.Variable(shape), nn.Variable(shape), nn.Variable((batch, 1))
    loss = F.mean(F.sigmoid_cross_entropy(logit(a, b), t))
    parameters, random = nn.get_parameters(), np.random.RandomState(seed)

    def feed() -> None:
        a.d, b.d, t.d = drawn(random, examples, batch)

    *pair, same = drawn(np.random.RandomState(1234), test, 512)
    told = logit(*map(nn.Variable.from_numpy_array, pair))

    def score() -> float:
        told.forward(clear_buffer=True)
        return float(((told.d > 0.0) == same).mean())

    return Built([Player(loss, parameters, feed)], score, {"a": a, "b": b})


def _autoencoder(seed: int) -> Built:
    """Compress digits to 16 numbers; the decoder has the encoder's weights, transposed."""
    batch, widths, (examples, test) = 32, (64, 48, 16), load()
    x, digit = nn.Variable((batch, 1, 8, 8)), nn.Variable((batch, 1))

    def weight(index: int) -> nn.Variable:
        shape = widths[index : index + 2]
        start = nn.random.prng.standard_normal(shape) * shape[0] ** -0.5
        return get_parameter_or_create(f"weight{index}", shape, start)

    def biased(h: nn.Variable, name: str) -> nn.Variable:
        bias = get_parameter_or_create(name, (1, h.shape[1]), np.zeros((1, h.shape[1])))
        return h + F.broadcast(bias, h.shape)

    def net(x: nn.Variable) -> nn.Variable:
        h = F.reshape(x, (x.shape[0], -1))
        for index in (0, 1):
            h = F.tanh(biased(F.affine(h, weight(index)), f"encoder{index}"))
        h = F.tanh(biased(F.affine(h, F.transpose(weight(1), (1, 0))), "decoder1"))
        return biased(F.affine(h, F.transpose(weight(0), (1, 0))), "decoder0")

    loss = F.mean(F.squared_error(net(x), F.reshape(x, (batch, -1))))
    parameters, feed = nn.get_parameters(), BatchFeeder(examples, x, digit, seed)
    told, wanted = net(nn.Variable.from_numpy_array(test.x)), test.x.reshape(len(test.x), -1)

    def score() -> float:
        told.forward(clear_buffer=True)
        error = ((told.d - wanted) ** 2).mean() / ((wanted - examples.x.mean(axis=0).ravel()) ** 2).mean()
        return max(0.0, 1.0 - float(error))

    return Built([Player(loss, parameters, feed)], score, {"x": x})


def _gan(seed: int) -> Built:
    """Generate points of a normal distribution; scored by the errors of mean and covariance."""
    batch = 64
    middle, mix = np.array([1.0, -0.5]), np.array([[0.8, 0.0], [0.5, 0.4]])

    def generator(noise: nn.Variable) -> nn.Variable:
        with nn.parameter_scope("generator"):
            return PF.affine(F.tanh(PF.affine(noise, 16, name="hidden")), 2, name="out")

    def critic(x: nn.Variable) -> nn.Variable:
        with nn.parameter_scope("critic"):
            h = x
            for index in range(2):
                h = F.leaky_relu(PF.affine(h, 24, name=f"hidden{index}"), 0.2)
            return PF.affine(h, 1, name="out")

    def against(logit: nn.Variable, wanted: float) -> nn.Variable:
        return F.mean(F.sigmoid_cross_entropy(logit, F.constant(wanted, logit.shape)))

    real, made, noise, other = (nn.Variable((batch, width)) for width in (2, 2, 4, 4))
    drawn, source = generator(noise), generator(other)
    fooled = against(critic(drawn), 1.0)
    caught = against(critic(real), 1.0) + against(critic(made), 0.0)
    random = np.random.RandomState(seed)

    def feed_critic() -> None:
        real.d = middle + random.standard_normal((batch, 2)) @ mix.T
        other.d = random.standard_normal(other.shape)
        source.forward(clear_buffer=True)
        made.d = source.d

    def feed_generator() -> None:
        noise.d = random.standard_normal(noise.shape)

    shown = generator(nn.Variable.from_numpy_array(np.random.RandomState(1234).standard_normal((1024, 4))))

    def score() -> float:
        shown.forward(clear_buffer=True)
        off = np.abs(shown.d.mean(axis=0) - middle).sum()
        return float(np.exp(-off - np.abs(np.cov(shown.d.T) - mix @ mix.T).sum()))

    def of(scope: str) -> Dict[str, nn.Variable]:
        with nn.parameter_scope(scope):
            return dict(nn.get_parameters())

    players = [Player(caught, of("critic"), feed_critic), Player(fooled, of("generator"), feed_generator)]
    return Built(players, score, {})


def _mixed_cell(seed: int) -> Built:
    """Build three cells of mixed operations, with shared architecture weights."""
    batch, nodes, (examples, test) = 32, 3, load()
    x, digit = nn.Variable((batch, 1, 8, 8)), nn.Variable((batch, 1))

    def mixed(h: nn.Variable, share: Callable[[int], nn.Variable], name: str) -> nn.Variable:
        made = [
            F.tanh(PF.affine(h, h.shape[1], name=f"{name}_tanh")),
            F.relu(PF.affine(h, h.shape[1], name=f"{name}_relu")),
            h,
        ]
        return F.add_n(*(one * F.broadcast(share(index), one.shape) for index, one in enumerate(made)))

    def cell(h: nn.Variable) -> nn.Variable:
        found, edge = [h], 0
        for node in range(1, nodes):
            parts = []
            for source in range(node):
                weights = get_parameter_or_create(f"../edge{edge}", (1, 3), np.zeros((1, 3)))
                shares = F.softmax(weights, axis=1)

                def share(index: int, shares: nn.Variable = shares) -> nn.Variable:
                    return F.slice(shares, (0, index), (1, index + 1))

                parts.append(mixed(found[source], share, f"edge{edge}"))
                edge += 1
            found.append(F.add_n(*parts) * (1.0 / len(parts)))
        return found[-1]

    def net(x: nn.Variable) -> nn.Variable:
        h = PF.affine(F.reshape(x, (x.shape[0], -1)), 24, name="first")
        for index in range(3):
            with nn.parameter_scope(f"cell{index}"):
                h = cell(h)
        return PF.affine(h, 10, name="logits")

    loss = cross_entropy(net(x), digit)
    parameters, feed = nn.get_parameters(), BatchFeeder(examples, x, digit, seed)
    return Built([Player(loss, parameters, feed)], accuracy(net, test), {"x": x})


def _tied_embedding(seed: int) -> Built:
    """Predict the word after two others, in a language of 24; one matrix embeds and predicts words."""
    batch, words, width = 64, 24, 16
    following = np.random.RandomState(99).permutation(words)
    x, t = nn.Variable((batch, 2)), nn.Variable((batch, 1))

    def net(x: nn.Variable) -> nn.Variable:
        start = _normal(0.5, words, width)
        matrix = get_parameter_or_create("words", start.shape, start)
        h = F.reshape(F.embed(x, matrix), (x.shape[0], -1))
        h = PF.affine(F.tanh(PF.affine(h, 64, name="hidden")), width, name="narrow")
        return F.affine(h, F.transpose(matrix, (1, 0)))

    def drawn(random: Any, count: int) -> Tuple[Array, Array]:
        seen = random.randint(0, words, (count, 2))
        # The first word is noise in half of the language.
        told = np.where(seen[:, 1] % 2, following[seen[:, 1]], following[seen[:, 0]])
        return seen, told[:, np.newaxis]

    loss = cross_entropy(net(x), t)
    parameters, random = nn.get_parameters(), np.random.RandomState(seed)

    def feed() -> None:
        x.d, t.d = drawn(random, batch)

    shown, wanted = drawn(np.random.RandomState(1234), 512)
    score = _right(net(nn.Variable.from_numpy_array(shown)), wanted[:, 0])
    return Built([Player(loss, parameters, feed)], score, {})


_plain = partial(_transformer, normalized=False)
_gan_momentum = partial(S.Momentum, momentum=0.5)


def _momentum(learning_rate: float) -> Any:
    return S.Momentum(learning_rate, 0.9)


PROGRAMS: Dict[str, Program] = {
    "transformer2": Program("transformer, 2 blocks", partial(_transformer, 2), 5e-3, 60),
    "transformer6": Program("transformer, 6 blocks", partial(_transformer, 6), 3e-3, 70),
    "transformer12": Program("transformer, 12 blocks", partial(_transformer, 12), 3e-3, 80),
    "transformer2_plain": Program("the same without normalization, 2", partial(_plain, 2), 5e-3, 50),
    "transformer6_plain": Program("the same without normalization, 6", partial(_plain, 6), 3e-3, 50),
    "transformer12_plain": Program("the same without normalization, 12", partial(_plain, 12), 3e-3, 50),
    "rnn16_vanish": Program("RNN, 16 steps, gain 0.8, 6th last input", partial(_rnn, 16, 0.8, -6), 5e-3, 50),
    "rnn16_explode": Program("RNN, 16 steps, gain 1.6, last inputs", partial(_rnn, 16, 1.6, -3), 3e-3, 120),
    "rnn64_vanish": Program("RNN, 64 steps, gain 0.6, last inputs", partial(_rnn, 64, 0.6, -3), 5e-3, 32),
    "rnn64_explode": Program("RNN, 64 steps, gain 1.4, last inputs", partial(_rnn, 64, 1.4, -3), 5e-3, 160),
    "rnn64_first": Program("RNN, 64 steps, gain 0.98, first input", partial(_rnn, 64, 0.98, 0), 2e-3, 160),
    "rnn256_vanish": Program("RNN, 256 steps, gain 0.8, last inputs", partial(_rnn, 256, 0.8, -3), 1e-2, 20),
    "rnn256_explode": Program("RNN, 256 steps, gain 1.2, last inputs", partial(_rnn, 256, 1.2, -3), 1e-2, 64),
    "lstm16_vanish": Program("LSTM, 16 steps, gain 0.5, last inputs", partial(_lstm, 16, 0.5, -4), 1e-2, 60),
    "lstm16_explode": Program("LSTM, 16 steps, gain 4, last inputs", partial(_lstm, 16, 4.0, -3), 1e-2, 50),
    "lstm64_vanish": Program("LSTM, 64 steps, gain 0.5, last inputs", partial(_lstm, 64, 0.5, -3), 1e-2, 64),
    "lstm64_explode": Program("LSTM, 64 steps, gain 3, last inputs", partial(_lstm, 64, 3.0, -3), 1e-2, 100),
    "siamese": Program("Siamese net", _siamese, 3e-3, 300),
    "autoencoder": Program("autoencoder, tied weights", _autoencoder, 0.1, 300, _momentum),
    "gan": Program("GAN, two updaters", _gan, 0.05, 400, _gan_momentum),
    "mixed_cell": Program("mixed cells, shared architecture", _mixed_cell, 3e-3, 300),
    "tied_embedding": Program("embedding that is the output layer, too", _tied_embedding, 1e-2, 40),
}
