# SPDX-License-Identifier: Apache-2.0
"""Does anything train worse, or lose gradients, where more of the network has one scale?

One version of the package is imported at a time: its lines have a label, and the table puts two side by side.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from common.digits import BatchFeeder, Examples, load
from nnabla.parameter import get_parameter_or_create
from numpy.typing import NDArray

import nnabla_adaloss
from nnabla_adaloss import AdaptiveLossScalingUpdater, Format, FormatEmulation, LossScaleWarning, Precision

from .experiment import Experiment, Line
from .methods import REFERENCE, Method, Trainee, adaptive, plain, rounded, train
from .task import Player, accuracy, cross_entropy
from .text import paragraph, rows

LABELS = ("before", "now")
STORAGES = ("float16", "float8_e5m2", "fp8_hybrid")
SEEDS = 3
TRAINING, GRADIENTS = "training", "gradients"

_RESOLUTION = 0.02  # a difference of scores that means nothing
_QUICK = ("rnn16_vanish", "transformer2", "siamese")
_QUICK_ITERATIONS = 24
_QUICK_STORAGES = ("float16",)
_OF_GRADIENTS = (
    *("rnn64_vanish", "rnn64_explode", "rnn256_vanish", "rnn256_explode", "lstm64_vanish"),
    *("transformer2", "transformer2_plain", "transformer12", "transformer12_plain"),
    *("autoencoder", "siamese"),
)
_UPDATES_BEFORE, _UPDATES_TO_SETTLE, _UPDATES_MORE = 20, 20, 16
_SMALL_STEPS = 0.1
_DEPTHS = 8
_TIMES, _TINY_ERROR = 2.0, 1e-6

Array = NDArray[Any]
Gradients = Dict[str, Array]


class Built(NamedTuple):
    """A network that is ready to be trained."""

    players: Sequence[Player]
    score: Callable[[], float]  # from 0 to 1, the best
    inputs: Mapping[str, nn.Variable]  # leaves whose gradients are looked at, beside those of parameters


def _adam(learning_rate: float) -> Any:
    """Adam that takes the same steps down to gradients of 1e-18; the squares of smaller ones are zero."""
    return S.Adam(learning_rate, eps=1e-18)


class Program(NamedTuple):
    """A network and how it is trained."""

    title: str
    build: Callable[[int], Built]
    learning_rate: float
    iterations: int
    solver: Callable[[float], Any] = _adam


class JoinedJob(NamedTuple):
    """One training, or the gradients of one batch."""

    part: str
    net: str
    storage: str
    method: str  # fp32, or the label of the version that scales
    seed: int
    iterations: int


# Transformers: the symbol at each place is told at the next one. ------------------------------------------

_SYMBOLS, _LENGTH, _WIDTH, _ATTENTIONS = 8, 8, 32, 2


def _one_hot(numbers: Array, count: int) -> Array:
    return np.eye(count, dtype=np.float32)[numbers]


def _normal(scale: float, *shape: int) -> Array:
    drawn: Array = nn.random.prng.standard_normal(shape)
    return drawn * scale


def _dense(
    h: nn.Variable, width: int, name: str, scale: float = 1.0, *, with_bias: bool = True
) -> nn.Variable:
    """A dense layer of the last axis, whose outputs are `scale` times as large as its inputs."""
    weight = _normal(scale / np.sqrt(h.shape[-1]), h.shape[-1], width)
    return PF.affine(h, width, base_axis=h.ndim - 1, w_init=weight, with_bias=with_bias, name=name)


def _attention(h: nn.Variable, out: float) -> nn.Variable:
    batch, length, width = h.shape
    each = width // _ATTENTIONS

    def part(name: str) -> nn.Variable:
        # What is added to all keys changes nothing.
        apart = F.reshape(_dense(h, width, name, with_bias=name != "key"), (batch, length, _ATTENTIONS, each))
        return F.transpose(apart, (0, 2, 1, 3))

    alike = F.batch_matmul(part("query"), part("key"), transpose_b=True) * each**-0.5
    mixed = F.batch_matmul(F.softmax(alike, axis=3), part("value"))
    return _dense(F.reshape(F.transpose(mixed, (0, 2, 1, 3)), h.shape), width, "out", out)


def _block(h: nn.Variable, name: str, out: float, *, normalized: bool) -> nn.Variable:
    """Attention and two dense layers, each with a shortcut around it, and outputs `out` times as large."""

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
        # The first place has none before it, and tells its own.
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
    """What tells how often the largest logit is the wanted one."""

    def score() -> float:
        logits.forward(clear_buffer=True)
        return float((logits.d.argmax(axis=-1) == wanted).mean())

    return score


# Recurrent nets: a symbol that is shown at one step is told at the end. ------------------------------------

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
    """A cell whose forget gate is half closed, with recurrent weights times `gain`."""
    h, c = state
    weights = np.concatenate([_orthogonal(gain, _STATE) for _ in range(4)], axis=1)
    recurrent = PF.affine(h, 4 * _STATE, w_init=weights, with_bias=False, name="recurrent")
    gates = F.reshape(PF.affine(x, 4 * _STATE, name="input") + recurrent, (x.shape[0], 4, _STATE))
    i, f, o, g = F.split(gates, axis=1)
    c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
    return [F.sigmoid(o) * F.tanh(c), c]


def _recurrent(cell: Step, states: int, steps: int, gain: float, shown_at: int, seed: int) -> Built:
    """A net whose state begins as a parameter; the symbol is shown `shown_at` steps from either end."""
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
    """Whether two images show the same digit."""
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
    """Digits through 16 numbers; the decoder has the encoder's weights, transposed."""
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
    """Points of a normal distribution; scored by how near mean and covariance are."""
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
    """Three cells of mixed operations, with the same architecture weights in each."""
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
    """The word that follows two others, in a language of 24; one matrix embeds words and tells them."""
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


# Jobs. -----------------------------------------------------------------------------------------------------


def experiment(quick: bool) -> Experiment:
    """The trainings of all labels and in fp32, then the gradients; `selected` takes those of one version."""
    return Experiment(list(_jobs(quick)), work, table)


def _jobs(quick: bool) -> Iterator[JoinedJob]:
    names, storages = (_QUICK, _QUICK_STORAGES) if quick else (tuple(PROGRAMS), STORAGES)
    for seed in range(1 if quick else SEEDS):
        for name in names:
            iterations = _QUICK_ITERATIONS if quick else PROGRAMS[name].iterations
            yield JoinedJob(TRAINING, name, "float32", REFERENCE, seed, iterations)
            for storage in storages:
                for label in LABELS:
                    yield JoinedJob(TRAINING, name, storage, label, seed, iterations)
    for name in _OF_GRADIENTS:
        if name in names:
            for storage in storages:
                for label in LABELS:
                    yield JoinedJob(GRADIENTS, name, storage, label, 0, _UPDATES_TO_SETTLE)


def default_label() -> str:
    """`before` where the package is that of a checkout of this name, else `now`."""
    return LABELS[0] if _checkout() == LABELS[0] else LABELS[1]


def _checkout() -> str:
    return Path(nnabla_adaloss.__file__ or "").parents[1].name


def selected(jobs: Iterable[JoinedJob], label: str, *, gradients: bool) -> List[JoinedJob]:
    """The trainings that a version is to do, or its passes over single batches."""
    part = GRADIENTS if gradients else TRAINING
    return [job for job in jobs if job.part == part and job.method in (label, REFERENCE)]


def work(job: JoinedJob) -> Line:
    """Train, or look at the gradients of a batch."""
    nn.seed(job.seed)
    with nn.parameter_scope("", OrderedDict()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            line = (_trained if job.part == TRAINING else _gradients)(PROGRAMS[job.net], job)
            line["error"] = ""
        except Exception as raised:
            line = {"error": f"{type(raised).__name__}: {raised}"}
    line["warnings"] = [str(one.message) for one in caught if issubclass(one.category, LossScaleWarning)]
    return {**line, "checkout": _checkout()}


def _trained(program: Program, job: JoinedJob) -> Line:
    built = program.build(job.seed)
    trainees = []
    for player in built.players:
        solver = program.solver(program.learning_rate)
        solver.set_parameters(player.parameters)
        trainees.append(Trainee(player.loss, solver, player.feed))
    reference = job.method == REFERENCE
    method: Method = plain() if reference else adaptive()
    elements = flushed = 0

    def before(batch: int) -> None:
        for trainee in trainees:
            trainee.solver.set_learning_rate(program.learning_rate * (1.0 - (batch - 1) / job.iterations))

    def after(batch: int, loops: Sequence[Any]) -> None:
        nonlocal elements, flushed
        for loop in loops:
            if loop.emulation is not None and batch % 10 == 0:
                counted, lost = rounded(loop.emulation)
                elements, flushed = elements + counted, flushed + lost

    train(method, trainees, None if reference else job.storage, job.iterations, before, after)
    score = built.score()
    return {
        "score": score if np.isfinite(score) else None,
        "batches": sum(trainee.fed for trainee in trainees),
        "repeats": sum(trainee.repeats for trainee in trainees),
        "lost": sum(trainee.lost for trainee in trainees),
        "underflow": flushed / max(1, elements),
    }


# Gradients of one batch. -----------------------------------------------------------------------------------


def _gradients(program: Program, job: JoinedJob) -> Line:
    """Train in fp32, then compare the gradients of one batch, when scales have settled, with exact ones."""
    built = program.build(job.seed)
    (player,) = built.players
    # Small steps, after which gradients still vanish or explode.
    solver = program.solver(_SMALL_STEPS * program.learning_rate)
    solver.set_parameters(player.parameters)
    train(plain(), [Trainee(player.loss, solver, player.feed)], None, _UPDATES_BEFORE)
    for variable in built.inputs.values():
        variable.need_grad = True
    leaves = {**player.parameters, **built.inputs}
    player.feed()
    exact = _backward(player.loss, leaves)
    # With the activations of the format, and gradients as good as in fp32.
    of_rounded = _backward(
        FormatEmulation(player.loss, _WITH_EXACT_GRADIENTS[job.storage], float_tail=True), leaves
    )
    still = S.Sgd(0.0)
    still.set_parameters(leaves)
    trainee = Trainee(player.loss, still, lambda: None)
    updater = AdaptiveLossScalingUpdater(still, player.loss, storage=job.storage, monitors=[trainee])
    kinds: List[str] = []
    # The last one is to be of the common kind, which measures nothing.
    while len(kinds) < job.iterations or (
        updater.scaling.result.kind == "measuring" and len(kinds) < job.iterations + _UPDATES_MORE
    ):
        updater.update()
        kinds.append(updater.scaling.result.kind)
    emulation: Any = updater.scaling.loss
    components = len(updater.scaling.result.schedule.graph.names)
    found = {name: leaf.g.astype(np.float64) for name, leaf in leaves.items()}
    return {
        "kind": kinds[-1],
        "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "components": components,
        "repeats": trainee.repeats,
        "lost": trainee.lost,
        "norms": {name: _short(np.linalg.norm(exact[name])) for name in leaves},
        "errors": {name: _error(found[name], exact[name]) for name in leaves},
        "rounding_errors": {name: _error(found[name], of_rounded[name]) for name in leaves},
        "flushed": {name: _flushed(emulation, [leaf]) for name, leaf in leaves.items()},
        "flushed_by_depth": _by_depth(emulation, player.loss),
        "flushed_most": _flushed_most(emulation, player.loss),
    }


# One format is for activations and gradients: float16 with the exponents of float32 loses no gradient.
_WIDE_FLOAT16 = Format.ieee("wide_float16", exponent_bits=8, mantissa_bits=10)
_WITH_EXACT_GRADIENTS = {
    "float16": Precision("float16", "float32"),
    "float8_e5m2": Precision("float8_e5m2", "float32"),
    "fp8_hybrid": Precision(
        "float8_e4m3", "float32", saturate=True, operands_only=True, otherwise=_WIDE_FLOAT16
    ),
}


def _backward(loss: Any, leaves: Mapping[str, nn.Variable]) -> Gradients:
    """The gradients of a loss without scaling."""
    for leaf in leaves.values():
        leaf.grad.zero()
    loss.forward(clear_no_need_grad=True)
    loss.backward(clear_buffer=True)
    return {name: leaf.g.astype(np.float64) for name, leaf in leaves.items()}


def _short(number: Any) -> float:
    return float(f"{number:.3g}")


def _error(found: Array, exact: Array) -> Optional[float]:
    """The relative error; None where there is nothing that may be wrong."""
    # Squares of what float32 holds are no smaller than float64's.
    norm = float(np.linalg.norm(exact))
    if not norm:
        return None
    error = float(np.linalg.norm(found - exact) / norm)
    return _short(error) if np.isfinite(error) else 1e9


def _flushed(emulation: FormatEmulation, variables: Iterable[nn.Variable]) -> List[int]:
    """How many elements of gradients were not zero, and how many of them became zero when stored."""
    told = [emulation.gradient_rounding(variable) for variable in variables]
    return [sum(one.nonzero for one in told if one), sum(one.underflowed for one in told if one)]


def _outputs(loss: nn.Variable) -> List[Tuple[str, nn.Variable]]:
    """What functions write, from the inputs on, and who does."""
    found: List[Tuple[str, nn.Variable]] = []
    loss.visit(lambda f: found.extend((f"{len(found)} {f.info.type_name}", o) for o in f.outputs))
    return found


def _by_depth(emulation: FormatEmulation, loss: nn.Variable) -> List[List[int]]:
    """The same of all outputs, in equal parts from the inputs to the loss."""
    variables = [variable for _, variable in _outputs(loss)]
    ends = [round(len(variables) * part / _DEPTHS) for part in range(_DEPTHS + 1)]
    return [_flushed(emulation, variables[start:end]) for start, end in zip(ends, ends[1:])]


def _flushed_most(emulation: FormatEmulation, loss: nn.Variable) -> List[Any]:
    """The output of which most was lost, by number and function, and the share; of so many outputs."""
    outputs = _outputs(loss)
    shares = []
    for name, variable in outputs:
        nonzero, flushed = _flushed(emulation, [variable])
        shares.append((_short(flushed / max(1, nonzero)), name))
    return [*max(shares)[::-1], len(outputs)]


# The tables. -----------------------------------------------------------------------------------------------

_NOTE = (
    "Each component of the gradients has one scale. Does anything train worse, or lose gradients, where more "
    "belongs to one component? Two versions of the package are compared, each with all defaults of "
    "AdaptiveLossScalingUpdater, and with fp32 without scaling. Formats are emulated. Learning rates fall to "
    "zero linearly."
)
_TRAINING_NOTE = (
    "Scores go from 0 to 1, the best: shares of right answers, of the autoencoder the share of the pixels' "
    "variance that it explains, of the GAN the exponential of minus the errors of mean and covariance. Of "
    f"each version: the mean score of {SEEDS} seeds, its difference to fp32's, in parentheses that of the "
    "worst seed, then the share of the elements of gradients that became zero (every tenth batch), and "
    "repeats, lost batches and warnings where there are any, the sums over seeds. ✗ where the differences to "
    f"fp32 of the same seed have a mean that is below zero by more than {_RESOLUTION:g} and twice its "
    "standard error; the last column says *worse* or *better* where those of now to before are as far from "
    "zero. Nets that explode are chaotic: the same seed comes to something else after the least rounding."
)
_GRADIENTS_NOTE = (
    f"{_UPDATES_BEFORE} updates in fp32 without scaling, with a tenth of the learning rate, the same for "
    "both versions; then one batch, "
    f"{_UPDATES_TO_SETTLE} times or more with a learning rate of 0, and of the last pass the relative error "
    "(L2) of the gradient of each leaf: parameters, inputs (of a recurrent net those of three steps), and "
    "first states. *All* is against fp32. *Backward* is against a backward in fp32 over the same rounded "
    "activations (for fp8_hybrid in float16 of a wider range): look at it where rounding forward changes "
    "all, as in nets that explode. Of transformers each row is the worst leaf of a block. ⚠ where the error "
    f"now is more than {_TIMES:g} times that before, and more than {_TINY_ERROR:g}."
)
_SUMMARY_NOTE = (
    "Of each version: how many components there are; the kind of the last pass; of the backward error the "
    "median and the largest over the leaves; the share of the elements of all gradients that became zero, in "
    "percent, and the variable of which most did, by its number; and the same share in eight parts from the "
    "inputs to the loss."
)


def table(lines: List[Line]) -> str:
    """Trainings, then gradients, each with the versions side by side."""
    trainings = [line for line in lines if line["part"] == TRAINING]
    gradients = [line for line in lines if line["part"] == GRADIENTS]
    made = {
        label: sorted({line["checkout"] for line in lines if line["method"] == label}) for label in LABELS
    }
    told = "; ".join(f"{label}: checkout {', '.join(of)}" for label, of in made.items() if of)
    parts = [
        "# Where more of the network has one scale\n",
        "Made by `python benchmarks/study.py joined` and `python benchmarks/study.py joined --gradients`, "
        "once with each version.\n",
        paragraph(_NOTE),
        f"{len(trainings)} trainings and {len(gradients)} looks at gradients are there ({told or 'none'}).\n",
        *_of_trainings(trainings),
        *_of_gradients(gradients),
    ]
    errors = dict.fromkeys(
        f"- {line['part']}, {line['net']}, {line['storage']}, {line['method']}: {line['error']}\n"
        for line in lines
        if line["error"]
    )
    return "\n".join([*parts, *(["## What ended with an error\n", *errors] if errors else [])])


class Cell(NamedTuple):
    """What the seeds of a training came to."""

    scores: Mapping[int, Optional[float]]
    underflow: float
    counts: Mapping[str, int]

    @property
    def mean(self) -> Optional[float]:
        """The mean score; None where a training failed."""
        known = [score for score in self.scores.values() if score is not None]
        return mean(known) if known and len(known) == len(self.scores) else None


def _cell(lines: Sequence[Line]) -> Cell:
    counts = {field: sum(line.get(field, 0) for line in lines) for field in ("repeats", "lost")}
    counts["warnings"] = sum(len(line["warnings"]) for line in lines)
    scores = {line["seed"]: line.get("score") for line in lines}
    return Cell(scores, mean(line.get("underflow", 0.0) for line in lines), counts)


def _of_trainings(lines: Sequence[Line]) -> List[str]:
    found: Dict[Tuple[str, str, str], List[Line]] = {}
    for line in lines:
        found.setdefault((line["net"], line["storage"], line["method"]), []).append(line)
    cells = {key: _cell(of) for key, of in found.items()}
    worse = dict.fromkeys(LABELS, 0)
    whole = dict.fromkeys(LABELS, 0)
    counts: Dict[str, Dict[str, int]] = {label: {} for label in LABELS}
    changed: Dict[str, int] = {"worse": 0, "better": 0}
    body: Dict[str, List[List[str]]] = {}
    for net, program in PROGRAMS.items():
        reference = cells.get((net, "float32", REFERENCE))
        if reference is None or reference.mean is None:
            continue
        for storage in STORAGES:
            mine = {label: cells.get((net, storage, label)) for label in LABELS}
            if not any(mine.values()):
                continue
            row = [f"{program.title}; {net}", f"{reference.mean:.3f}"]
            for label, cell in mine.items():
                if cell is not None:
                    failed = _change(reference, cell) == "worse"
                    worse[label] += failed
                    whole[label] += 1
                    for field, number in cell.counts.items():
                        counts[label][field] = counts[label].get(field, 0) + number
                row.append("" if cell is None else _mark(cell, reference, failed=failed))
            mark = _change(*mine.values())
            if mark:
                changed[mark] += 1
            body.setdefault(storage, []).append([*row, mark])
    if not body:
        return []
    head = ["", "trainings, 3 seeds each", "✗ worse than fp32", "repeats", "lost batches", "warnings"]
    summary = [
        [label, str(whole[label]), str(worse[label]), *map(str, counts[label].values())]
        for label in LABELS
        if whole[label]
    ]
    text = f"Now is worse than before in {changed['worse']} cells, and better in {changed['better']}.\n"
    parts = ["## Trainings\n", paragraph(_TRAINING_NOTE), rows(head, summary), text]
    for storage, of in body.items():
        parts += [f"### {storage}\n", rows(["", REFERENCE, *LABELS, "now"], of)]
    return parts


def _mark(cell: Cell, reference: Cell, *, failed: bool) -> str:
    if cell.mean is None:
        return "✗ error"
    differences = _differences(reference, cell)
    told = [f"{name} {number}" for name, number in cell.counts.items() if number]
    first = f"{'✗' if failed else '✓'} {cell.mean:.3f} {mean(differences):+.3f} ({min(differences):+.3f})"
    return ", ".join([first, f"{100.0 * cell.underflow:.2g} %", *told])


def _differences(before: Cell, now: Cell) -> List[float]:
    """What seeds that both have came to now, less what they came to before."""
    pairs = [(before.scores.get(seed), score) for seed, score in now.scores.items()]
    return [new - old for old, new in pairs if old is not None and new is not None]


def _change(before: Optional[Cell], now: Optional[Cell]) -> str:
    """Whether training became worse or better, or "" for neither."""
    if before is None or now is None or before.mean is None:
        return ""
    if now.mean is None:
        return "worse"
    differences = _differences(before, now)
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    far = _RESOLUTION + 2.0 * error
    middle = mean(differences)
    return "worse" if middle < -far else "better" if middle > far else ""


_ERRORS = {"errors": "all", "rounding_errors": "backward"}


def _of_gradients(lines: Sequence[Line]) -> List[str]:
    found: Dict[Tuple[str, str], Dict[str, Line]] = {}
    for line in lines:
        if not line["error"]:
            found.setdefault((line["net"], line["storage"]), {})[line["method"]] = line
    if not found:
        return []
    body = []
    for (net, storage), of in found.items():
        flags = sum(any(_flagged(of, leaf, field) for field in _ERRORS) for leaf in _leaves(of))
        told = f"{flags} of {len(_leaves(of))}" if len(of) > 1 else ""
        for label in LABELS:
            if label in of:
                body.append([f"{net}, {storage}", label, *_summary(of[label]), told * (label == LABELS[-1])])
    parts = ["## Gradients\n", paragraph(_GRADIENTS_NOTE), paragraph(_SUMMARY_NOTE)]
    parts.append(rows(["", "", *_SUMMARY, "⚠"], body))
    head = ["leaf", "norm"]
    head += [f"{title}, {label}" for title in _ERRORS.values() for label in LABELS]
    head += [*(f"became zero, {label}" for label in LABELS), "⚠"]
    for key, of in found.items():
        parts += [f"### {', '.join(key)}\n", rows(head, [_leaf_row(of, leaf) for leaf in _shown(of)])]
    return parts


_SUMMARY = ("components", "kind", "median error", "largest", "became zero", "most", "by depth")


def _summary(line: Line) -> List[str]:
    errors = [error for error in line["rounding_errors"].values() if error is not None]
    nonzero, flushed = np.sum(line["flushed_by_depth"], axis=0)
    where, share, outputs = line["flushed_most"]
    by_depth = [f"{100.0 * lost / max(1, of):.2g}" for of, lost in line["flushed_by_depth"]]
    return [
        str(line["components"]),
        line["kind"],
        f"{median(errors):.2g}",
        f"{max(errors):.2g}",
        f"{100.0 * flushed / max(1, nonzero):.2g}",
        f"{100.0 * share:.2g}: {where} of {outputs}" if share else "",
        " ".join(by_depth),
    ]


def _leaves(of: Mapping[str, Line]) -> List[str]:
    return list(next(iter(of.values()))["errors"])


def _shown(of: Mapping[str, Line]) -> List[str]:
    """The leaves of which the table tells: of each block the one with the greatest error, and the others."""
    worst: Dict[str, str] = {}
    for leaf in _leaves(of):
        first = leaf.split("/")[0]
        group = first if first.startswith("block") else leaf
        if group not in worst or _rank(of, leaf) > _rank(of, worst[group]):
            worst[group] = leaf
    return list(worst.values())


def _rank(of: Mapping[str, Line], leaf: str) -> Tuple[bool, float]:
    flagged = any(_flagged(of, leaf, field) for field in _ERRORS)
    return flagged, max(line["rounding_errors"][leaf] or 0.0 for line in of.values())


def _flagged(of: Mapping[str, Line], leaf: str, field: str) -> bool:
    before, now = ((of[label][field][leaf] if label in of else None) for label in LABELS)
    return before is not None and now is not None and now > max(_TIMES * before, _TINY_ERROR)


def _leaf_row(of: Mapping[str, Line], leaf: str) -> List[str]:
    norm = next(iter(of.values()))["norms"][leaf]
    row = [leaf, f"{norm:.2g}"]
    for field in _ERRORS:
        for label in LABELS:
            error = of[label][field][leaf] if label in of else None
            row.append("" if error is None else f"{error:.2g}")
    for label in LABELS:
        nonzero, flushed = of[label]["flushed"][leaf] if label in of else (0, 0)
        row.append(f"{100.0 * flushed / nonzero:.2g} %" if nonzero else "")
    flags = [title for field, title in _ERRORS.items() if _flagged(of, leaf, field)]
    return [*row, f"⚠ {', '.join(flags)}" if flags else ""]
