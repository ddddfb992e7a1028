# SPDX-License-Identifier: Apache-2.0
"""What adaptive loss scaling takes beside dynamic, on small models of the kinds that are published.

    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py
    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py lstm darts --graph static --storage float16
    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py --kinds --graph static

Each model is trained by nnabla's DynamicLossScalingUpdater and by AdaptiveLossScalingUpdater, which take
turns iteration by iteration, on eight batches in a circle. Its graph is static, or rebuilt for each batch;
numbers are stored in emulated fp16, or as nnabla stores them (none), with both updaters alike. A ratio is
that of the processor's times, adaptive over dynamic: the median over blocks of 16 iterations (`blocks.py`).
Batches that ran again while they were timed are told beside the ratios, whose times hold them.

With `--kinds`, how often the last backward of an update was of which kind: "hookless", "measuring", or why
single functions had hooks; and how many batches ran again, but for the first one.

For another checkout of the package, in which kernels are built, start it from elsewhere with its folder:

    cd /tmp && PYTHONPATH=OTHER OMP_NUM_THREADS=1 python CHECKOUT/benchmarks/published_shapes.py
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections import Counter, OrderedDict
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from blocks import BLOCK, means, ratio, take_turns

import nnabla_adaloss
from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FormatEmulation,
    LossScaleWarning,
)

GRAPHS = ("static", "rebuilt")
STORAGES = ("float16", "none")
UPDATES = 200
_BATCHES = 8

Batch = Tuple[np.ndarray, ...]
Losses = Union[nn.Variable, Dict[str, nn.Variable]]
"""The loss; or, of players in turn, each one's loss by the scope of its parameters."""


class Model(NamedTuple):
    """A model to train."""

    title: str
    batch: Callable[[np.random.Generator], Batch]
    build: Callable[..., Losses]
    rate: float = 0.01


def constant(array: Any) -> nn.Variable:
    """A Variable that holds numbers and needs no gradient."""
    return nn.Variable.from_numpy_array(np.asarray(array, np.float32))


def weight(name: str, shape: Sequence[int], sigma: float = 0.1) -> nn.Variable:
    """A parameter of the current scope."""
    return nn.parameter.get_parameter_or_create(name, tuple(shape), I.NormalInitializer(sigma))


def classified(h: nn.Variable, t: nn.Variable, axis: int = 1) -> nn.Variable:
    """The mean cross entropy."""
    return F.mean(F.softmax_cross_entropy(h, t, axis=axis))


# Batches


def phrases(random: np.random.Generator, batch: int, length: int, symbols: int) -> np.ndarray:
    """Symbols that count up in steps of 1 to 3."""
    first, step = random.integers(0, symbols, (batch, 1)), random.integers(1, 4, (batch, 1))
    return (first + step * np.arange(length)) % symbols


def next_symbols(batch: int, length: int, symbols: int, random: np.random.Generator) -> Batch:
    """Phrases, and the symbol that follows each one."""
    told = phrases(random, batch, length + 1, symbols)
    return told[:, :-1], told[:, 1:, np.newaxis]


def padded(batch: int, length: int, symbols: int, random: np.random.Generator) -> Batch:
    """Phrases of other lengths, where they hold symbols, and whether most are of the upper half."""
    told = phrases(random, batch, length, symbols)
    there = np.arange(length) < random.integers(length // 2, length + 1, (batch, 1))
    return told * there, there.reshape(batch, 1, 1, length), told[:, :1] >= symbols // 2


def images(shape: Sequence[int], classes: int, random: np.random.Generator) -> Batch:
    """Noise that is brighter in one band than in the others, and which band it is."""
    x, label = random.standard_normal(shape), random.integers(0, classes, (shape[0], 1))
    rows = np.arange(shape[2]) * classes // shape[2]
    return x + (rows == label)[:, np.newaxis, :, np.newaxis], label


def pairs(shape: Sequence[int], random: np.random.Generator) -> Batch:
    """Two images of bands each, and whether they show the same one."""
    (one, first), (other, second) = images(shape, 2, random), images(shape, 2, random)
    return one, other, first == second


def heatmaps(shape: Sequence[int], joints: int, random: np.random.Generator) -> Batch:
    """Images of blobs, and a map of each blob."""
    size = shape[2]
    where = random.uniform(2, size - 2, (2, shape[0], joints, 1, 1))
    rows, columns = np.arange(size)[:, np.newaxis], np.arange(size)
    maps = np.exp(-((rows - where[0]) ** 2 + (columns - where[1]) ** 2) / 4.0)
    return random.normal(0.0, 0.1, shape) + maps.sum(1, keepdims=True), maps


def waves(batch: int, length: int, levels: int, random: np.random.Generator) -> Batch:
    """Quantized sines, and what follows each sample, shape (batch, 1, length)."""
    phase = random.uniform(0.0, 6.0, (batch, 1)) + random.uniform(0.2, 0.6, (batch, 1)) * np.arange(
        length + 1
    )
    told = ((np.sin(phase) + 1.0) * 0.499 * levels).astype(np.int64)
    return told[:, :-1], told[:, np.newaxis, 1:]


def pictures(shape: Sequence[int], levels: int, random: np.random.Generator) -> Batch:
    """Slopes of few levels, and the same as numbers."""
    slope = random.integers(0, levels, (shape[0], 1, 1, 1)) + np.arange(shape[2])[:, np.newaxis] // 2
    found = np.broadcast_to(slope % levels, shape)
    return found / (levels - 1.0), found


def masks(shape: Sequence[int], random: np.random.Generator) -> Batch:
    """Noise with a bright rectangle, and where that is."""
    first, last = np.sort(random.integers(0, shape[2], (2, shape[0], 1, 1, 1)), axis=0)
    rows, columns = np.arange(shape[2])[:, np.newaxis], np.arange(shape[3])
    inside = (rows >= first) & (rows <= last) & (columns >= first) & (columns <= last)
    return random.standard_normal(shape) + 2.0 * inside, inside


def vectors(batch: int, width: int, random: np.random.Generator) -> Batch:
    """Sines of other frequencies."""
    return (np.sin(random.uniform(0.1, 1.0, (batch, 1)) * np.arange(width)),)


def half_labelled(batch: int, width: int, random: np.random.Generator) -> Batch:
    """Vectors with the class of each, others without, and a direction of length 1 for each of these."""
    x, label = random.standard_normal((2, batch, width)), random.integers(0, 4, (batch, 1))
    x[0] += 2.0 * (np.arange(width) % 4 == label)
    direction = random.standard_normal((batch, width))
    return x[0], label, x[1], direction / np.linalg.norm(direction, axis=1, keepdims=True)


def real_and_noise(batch: int, size: int, random: np.random.Generator) -> Batch:
    """Images of bands, and noise to draw others from."""
    return np.tanh(images((batch, 1, size, size), 4, random)[0]), random.standard_normal((batch, 16))


# Models


def attention(h: nn.Variable, hidden: nn.Variable, heads: int) -> nn.Variable:
    """What each place makes of others; `hidden` is added to what they are worth to it."""
    batch, length, width = h.shape

    def parts(name: str) -> nn.Variable:
        found = PF.affine(h, width, base_axis=2, name=name)
        return F.transpose(F.reshape(found, (batch, length, heads, width // heads)), (0, 2, 1, 3))

    worth = F.batch_matmul(parts("query"), parts("key"), transpose_b=True) * (width // heads) ** -0.5
    seen = F.batch_matmul(F.softmax(worth + hidden, axis=3), parts("value"))
    seen = F.reshape(F.transpose(seen, (0, 2, 1, 3)), h.shape)
    return PF.affine(seen, width, base_axis=2, name="mixed")


def layer_norm(h: nn.Variable, name: str) -> nn.Variable:
    return PF.layer_normalization(h, batch_axis=(0, 1), name=name)


def transformer(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    """A language model of two blocks that normalize first; its last layer has a weight of its own."""
    width, length = 32, x.shape[1]
    hidden = constant(np.triu(np.full((1, 1, length, length), -1e4), 1))
    h = PF.embed(x, 32, width, name="symbols") + weight("places", (1, length, width))
    for block in range(2):
        with nn.parameter_scope(f"block{block}"):
            h = h + attention(layer_norm(h, "before_attention"), hidden, heads=4)
            g = F.relu(PF.affine(layer_norm(h, "before_mlp"), 4 * width, base_axis=2, name="up"))
            h = h + PF.affine(g, width, base_axis=2, name="down")
    return classified(PF.affine(layer_norm(h, "last"), 32, base_axis=2, name="out"), t, axis=2)


def bert(x: nn.Variable, there: nn.Variable, t: nn.Variable) -> nn.Variable:
    """An encoder of two blocks that normalize last, with masks of padding; the first place is classified."""
    width, length = 32, x.shape[1]
    hidden = (there - 1.0) * 1e4
    h = PF.embed(x, 32, width, name="symbols") + weight("places", (1, length, width))
    h = layer_norm(h, "first")
    for block in range(2):
        with nn.parameter_scope(f"block{block}"):
            h = layer_norm(h + attention(h, hidden, heads=2), "after_attention")
            g = F.gelu(PF.affine(h, 4 * width, base_axis=2, name="up"))
            h = layer_norm(h + PF.affine(g, width, base_axis=2, name="down"), "after_mlp")
    pooled = F.tanh(PF.affine(h[:, 0], width, name="pooled"))
    return classified(PF.affine(pooled, 2, name="out"), t)


def lstm(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    """A language model of one unrolled LSTM, with a cross entropy of each step."""
    (batch, steps), width, symbols = x.shape, 32, 32
    letters = F.split(PF.embed(x, symbols, width, name="symbols"), axis=1)
    following = F.split(t, axis=1)
    h = c = constant(np.zeros((batch, width)))
    losses = []
    for letter, target in zip(letters, following):
        gates = F.reshape(
            PF.affine(F.concatenate(letter, h, axis=1), 4 * width, name="gates"), (batch, 4, width)
        )
        taken, kept, shown, new = F.split(gates, axis=1)
        c = F.sigmoid(kept) * c + F.sigmoid(taken) * F.tanh(new)
        h = F.sigmoid(shown) * F.tanh(c)
        losses.append(classified(PF.affine(h, symbols, name="out"), target))
    return F.add_n(*losses) * (1.0 / steps)


def rnn(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    """16 steps of a recurrent net through the rows of an image, from an initial state that is trained."""
    batch, width = x.shape[0], 64
    h = F.broadcast(weight("initial", (1, width)), (batch, width))
    for row in F.split(F.reshape(x, (batch, 16, -1)), axis=1):
        h = F.tanh(PF.affine(row, width, name="in") + PF.affine(h, width, with_bias=False, name="again"))
    return classified(PF.affine(h, 4, name="out"), t)


def unit(h: nn.Variable, maps: int, size: int, name: str) -> nn.Variable:
    """Batch normalization, ReLU, convolution."""
    with nn.parameter_scope(name):
        h = F.relu(PF.batch_normalization(h))
        return PF.convolution(h, maps, (size, size), pad=(size // 2, size // 2))


def bottleneck(h: nn.Variable, name: str) -> nn.Variable:
    maps = h.shape[1]
    with nn.parameter_scope(name):
        return h + unit(unit(unit(h, maps // 2, 1, "a"), maps // 2, 3, "b"), maps, 1, "c")


def hourglass(x: nn.Variable, maps: nn.Variable) -> nn.Variable:
    """Two stacks of residual blocks, down to one pixel and up again, with a loss each."""

    def down_and_up(h: nn.Variable, level: int) -> nn.Variable:
        with nn.parameter_scope(f"level{level}"):
            beside = bottleneck(h, "beside")
            h = bottleneck(F.max_pooling(h, (2, 2)), "down")
            h = down_and_up(h, level - 1) if level > 1 else bottleneck(h, "inner")
            return beside + F.unpooling(bottleneck(h, "up"), (2, 2))

    joints, losses = maps.shape[1], []
    h = bottleneck(PF.convolution(x, 8, (3, 3), pad=(1, 1), name="stem"), "first")
    for stack in range(2):
        with nn.parameter_scope(f"stack{stack}"):
            g = unit(bottleneck(down_and_up(h, 4), "out"), 8, 1, "features")
            told = PF.convolution(F.relu(PF.batch_normalization(g)), joints, (1, 1), name="maps")
            losses.append(F.mean(F.squared_error(told, maps)))
            if stack == 0:
                back = PF.convolution(told, 8, (1, 1), name="back")
                h = h + PF.convolution(g, 8, (1, 1), name="on") + back
    return losses[0] + losses[1]


def wavenet(x: nn.Variable, t: nn.Variable, *, normalized: bool) -> nn.Variable:
    """Ten layers of dilated causal convolutions, with gates, residuals and a sum of skips."""
    maps, levels = 16, 16
    more: Dict[str, Any] = (
        {"apply_w": PF.weight_normalization, "w_init": I.NormalInitializer(0.1)} if normalized else {}
    )

    def convolution(h: nn.Variable, name: str, outmaps: int = maps, size: int = 1, step: int = 1) -> Any:
        if size > 1:
            h = F.pad(h, ((size - 1) * step, 0))
        return PF.convolution(h, outmaps, (size,), dilation=(step,), name=name, **more)

    h = convolution(F.transpose(F.one_hot(F.reshape(x, (*x.shape, 1)), (levels,)), (0, 2, 1)), "in")
    skips = []
    for layer in range(10):
        with nn.parameter_scope(f"layer{layer}"):
            step = 2 ** (layer % 5)
            g = F.tanh(convolution(h, "filter", size=2, step=step)) * F.sigmoid(
                convolution(h, "gate", size=2, step=step)
            )
            skips.append(convolution(g, "skip"))
            h = h + convolution(g, "residual")
    h = convolution(F.relu(F.add_n(*skips)), "last")
    return classified(convolution(F.relu(h), "out", levels), t)


def pixelcnn(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    """Six gated layers of convolutions with masked weights: a pixel sees those above, and to its left."""
    maps, levels = 16, 4

    def masked(h: nn.Variable, outmaps: int, size: int, name: str, *, itself: bool = True) -> nn.Variable:
        seen = np.zeros((1, 1, size, size))
        seen[:, :, : size // 2] = seen[:, :, size // 2, : size // 2] = 1.0
        seen[:, :, size // 2, size // 2] = itself
        mask = constant(np.broadcast_to(seen, (outmaps, h.shape[1], size, size)))
        pad = (size // 2, size // 2)
        return PF.convolution(h, outmaps, (size, size), pad=pad, apply_w=lambda w: w * mask, name=name)

    h = masked(x, maps, 5, "in", itself=False)
    for layer in range(6):
        with nn.parameter_scope(f"layer{layer}"):
            new, gate = F.split(
                F.reshape(masked(h, 2 * maps, 3, "both"), (h.shape[0], 2, *h.shape[1:])), axis=1
            )
            h = h + PF.convolution(F.tanh(new) * F.sigmoid(gate), maps, (1, 1), name="mixed")
    return classified(PF.convolution(F.relu(h), levels, (1, 1), name="out"), t)


def vat(x: nn.Variable, t: nn.Variable, free: nn.Variable, direction: nn.Variable) -> nn.Variable:
    """One network three times: a cross entropy, and how far a small push changes what it says of others.

    The push goes in a given direction, where published ones search for the worst: that takes other graphs.
    """

    def network(h: nn.Variable) -> nn.Variable:
        for layer in range(3):
            h = F.relu(PF.batch_normalization(PF.affine(h, 128, name=f"fc{layer}"), name=f"bn{layer}"))
        return PF.affine(h, 4, name="out")

    clean, pushed = network(free), network(free + 2.0 * direction)
    apart = F.softmax(clean) * (F.log_softmax(clean) - F.log_softmax(pushed))
    return classified(network(x), t) + F.mean(F.sum(apart, axis=1))


def autoencoder(x: nn.Variable) -> nn.Variable:
    """An autoencoder whose decoder multiplies by the encoder's weights, transposed."""
    widths = [x.shape[1], 128, 64, 16]
    weights = [
        weight(f"W{layer}", shape, math.sqrt(2.0 / sum(shape)))
        for layer, shape in enumerate(zip(widths, widths[1:]))
    ]
    h = x
    for layer, w in enumerate(weights):
        h = F.tanh(F.affine(h, w, weight(f"encoder{layer}", w.shape[1:], 0.0)))
    for layer, w in reversed(list(enumerate(weights))):
        h = F.affine(h, F.transpose(w, (1, 0)), weight(f"decoder{layer}", w.shape[:1], 0.0))
        h = F.tanh(h) if layer else h
    return F.mean(F.squared_error(h, x))


def siamese(one: nn.Variable, other: nn.Variable, same: nn.Variable) -> nn.Variable:
    """A convolutional net of two images, and the contrastive loss of how far apart it puts them."""

    def network(h: nn.Variable) -> nn.Variable:
        h = F.max_pooling(F.relu(PF.convolution(h, 8, (5, 5), name="conv1")), (2, 2))
        h = F.max_pooling(F.relu(PF.convolution(h, 16, (3, 3), name="conv2")), (2, 2))
        return PF.affine(F.relu(PF.affine(h, 64, name="fc1")), 8, name="fc2")

    squared = F.sum(F.squared_error(network(one), network(other)), axis=1, keepdims=True)
    gap = F.relu(1.0 - (squared + 1e-4) ** 0.5)
    return F.mean(same * squared + (1.0 - same) * gap**2)


def gan(real: nn.Variable, noise: nn.Variable) -> Dict[str, nn.Variable]:
    """A generator and a critic, of convolutions; the critic trains on what the generator has just drawn."""

    def generator() -> nn.Variable:
        with nn.parameter_scope("generator"):
            h = F.reshape(PF.affine(noise, 16 * 16, name="fc"), (-1, 16, 4, 4))
            h = F.relu(PF.batch_normalization(h, name="bn1"))
            h = PF.deconvolution(h, 8, (4, 4), pad=(1, 1), stride=(2, 2), name="deconv1")
            h = F.relu(PF.batch_normalization(h, name="bn2"))
            return F.tanh(PF.deconvolution(h, 1, (4, 4), pad=(1, 1), stride=(2, 2), name="deconv2"))

    def critic(h: nn.Variable, wanted: float) -> nn.Variable:
        with nn.parameter_scope("critic"):
            for layer, maps in enumerate((8, 16)):
                h = PF.convolution(h, maps, (4, 4), pad=(1, 1), stride=(2, 2), name=f"conv{layer}")
                h = F.leaky_relu(h, 0.2)
            told = PF.affine(h, 1, name="out")
        return F.mean(F.sigmoid_cross_entropy(told, constant(np.full(told.shape, wanted))))

    drawn = generator().apply(persistent=True)
    fooled = critic(drawn, 1.0)
    caught = critic(real, 1.0) + critic(drawn.get_unlinked_variable(need_grad=False), 0.0)
    return {"generator": fooled, "critic": caught}


def unet(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    """Three levels, each of which is concatenated to what comes up from below."""

    def twice(h: nn.Variable, maps: int, name: str) -> nn.Variable:
        for index in range(2):
            with nn.parameter_scope(f"{name}{index}"):
                h = PF.convolution(h, maps, (3, 3), pad=(1, 1), with_bias=False)
                h = F.relu(PF.batch_normalization(h))
        return h

    beside = []
    h = twice(x, 4, "down0")
    for level in (1, 2):
        beside.append(h)
        h = twice(F.max_pooling(h, (2, 2)), 4 * 2**level, f"down{level}")
    for level in (1, 0):
        h = PF.deconvolution(h, 4 * 2**level, (2, 2), stride=(2, 2), name=f"deconv{level}")
        h = twice(F.concatenate(beside[level], h, axis=1), 4 * 2**level, f"up{level}")
    return classified(PF.convolution(h, 2, (1, 1), name="out"), t)


def darts(x: nn.Variable, t: nn.Variable) -> nn.Variable:
    """Two cells of mixed operations: each is weighted by the softmax of trained weights, which both share."""
    maps = 8

    def operations(h: nn.Variable) -> List[nn.Variable]:
        def separable(name: str, step: int) -> nn.Variable:
            with nn.parameter_scope(name):
                g = PF.depthwise_convolution(F.relu(h), (3, 3), pad=(step, step), dilation=(step, step))
                return PF.batch_normalization(PF.convolution(g, maps, (1, 1), with_bias=False))

        pools = [
            PF.batch_normalization(pool(h, (3, 3), stride=(1, 1), pad=(1, 1)), name=name)
            for name, pool in (("max", F.max_pooling), ("average", F.average_pooling))
        ]
        return [h, *pools, separable("plain", 1), separable("dilated", 2)]

    def mixed(h: nn.Variable, edge: str, weights: Dict[str, nn.Variable]) -> nn.Variable:
        if edge not in weights:
            with nn.parameter_scope("", whole):
                weights[edge] = F.softmax(weight(f"edge{edge}", (5, 1, 1, 1, 1)), axis=0)
        with nn.parameter_scope(edge):
            return F.add_n(*(w * g for w, g in zip(F.split(weights[edge], axis=0), operations(h))))

    whole = nn.parameter.get_current_parameter_scope()
    shared: Dict[str, nn.Variable] = {}
    before = h = PF.batch_normalization(
        PF.convolution(x, maps, (3, 3), pad=(1, 1), name="stem"), name="stem_bn"
    )
    for cell in range(2):
        with nn.parameter_scope(f"cell{cell}"):
            first = mixed(before, "0-2", shared) + mixed(h, "1-2", shared)
            second = mixed(before, "0-3", shared) + mixed(h, "1-3", shared) + mixed(first, "2-3", shared)
            both = F.concatenate(first, second, axis=1)
            before, h = h, PF.convolution(both, maps, (1, 1), name="out")
    return classified(PF.affine(F.average_pooling(h, h.shape[2:]), 4, name="fc"), t)


MODELS = {
    "transformer": Model("transformer, 4x16 symbols", partial(next_symbols, 4, 16, 32), transformer, 0.05),
    "bert": Model("encoder with masks, 4x16 symbols", partial(padded, 4, 16, 32), bert),
    "lstm": Model("LSTM, 16 steps", partial(next_symbols, 16, 16, 32), lstm, 0.1),
    "rnn": Model("RNN, 16 steps", partial(images, (64, 1, 16, 16), 4), rnn),
    "hourglass": Model("2 hourglasses, 16x16", partial(heatmaps, (4, 1, 16, 16), 4), hourglass, 0.001),
    "wavenet": Model("WaveNet", partial(waves, 4, 64, 16), partial(wavenet, normalized=False), 0.1),
    "wavenet-wn": Model(
        "WaveNet, normalized", partial(waves, 4, 64, 16), partial(wavenet, normalized=True), 0.02
    ),
    "pixelcnn": Model("PixelCNN, 8x8", partial(pictures, (4, 1, 8, 8), 4), pixelcnn),
    "vat": Model("VAT, 3 applications", partial(half_labelled, 64, 32), vat),
    "autoencoder": Model("tied autoencoder", partial(vectors, 128, 256), autoencoder, 0.5),
    "siamese": Model("Siamese, 16x16", partial(pairs, (32, 1, 16, 16)), siamese),
    "gan": Model("GAN, two updaters, 16x16", partial(real_and_noise, 64, 16), gan, 0.002),
    "unet": Model("U-Net, 16x16", partial(masks, (8, 1, 16, 16)), unet),
    "darts": Model("DARTS, 2 cells, 8x8", partial(images, (4, 1, 8, 8), 4), darts),
}


class Training:
    """A training of one model in one way; each instance has parameters of its own."""

    def __init__(self, model: Model, method: str, graph: str, storage: str) -> None:
        self._model, self._storage, self._rebuilt = model, storage, graph == "rebuilt"
        self._scope: Any = OrderedDict()
        nn.seed(0)
        nn.random.set_parameter_seed(0)
        random = np.random.default_rng(0)
        batches = [model.batch(random) for _ in range(_BATCHES)]
        self._batches = cycle(batches)
        self._inputs = [nn.Variable(array.shape) for array in batches[0]]
        self.updates = self.fed = 0
        # The number of the update, for each time that a batch ran again.
        self.repeats: List[int] = []
        losses = self._losses()
        self.functions = sum(map(count_functions, losses.values()))
        self.updaters: List[Any] = []
        for index, (scope, loss) in enumerate(losses.items()):
            solver = S.Momentum(model.rate)
            with nn.parameter_scope("", self._scope):
                found = nn.get_parameters()
            solver.set_parameters({name: found[name] for name in found if name.startswith(scope)})
            # The first one feeds; what others are asked to feed is only counted.
            feed = self._count if index else self._feed
            make = AdaptiveLossScalingUpdater if method == "adaptive" else DynamicLossScalingUpdater
            self.updaters.append(make(solver, self._stored(loss), feed))

    def update(self) -> List[Any]:
        """One iteration: an update of each player. What their updaters return."""
        before = self.fed
        results = [updater.update() for updater in self.updaters]
        self.updates += 1
        # The dynamic updater takes another batch, and the adaptive one tells.
        told = [result.retries for result in results if result is not None]
        again = sum(told) if told else self.fed - before - len(self.updaters)
        self.repeats += [self.updates] * again
        return results

    @property
    def losses(self) -> List[float]:
        """Those of the last batch."""
        found = [updater.loss for updater in self.updaters]
        return [float((loss if isinstance(loss, nn.Variable) else loss.variable).d) for loss in found]

    def _losses(self) -> Dict[str, nn.Variable]:
        with nn.parameter_scope("", self._scope):
            losses = self._model.build(*self._inputs)
        return {"": losses} if isinstance(losses, nn.Variable) else losses

    def _stored(self, loss: nn.Variable) -> Any:
        return loss if self._storage == "none" else FormatEmulation(loss, self._storage, float_tail=True)

    def _count(self) -> None:
        self.fed += 1

    def _feed(self) -> None:
        self._count()
        for variable, array in zip(self._inputs, next(self._batches)):
            variable.d = array
        if self._rebuilt and self.fed > 1:
            for updater, loss in zip(self.updaters, self._losses().values()):
                updater.loss = self._stored(loss)


def count_functions(loss: nn.Variable) -> int:
    """How many functions compute a loss."""
    found: List[Any] = []
    loss.visit(found.append)
    return len(found)


class Row(NamedTuple):
    """What was measured of one model with one graph, by storage."""

    functions: int
    ms: Dict[str, float]
    ratios: Dict[str, float]
    repeats: Dict[str, int]


def measure(model: Model, graph: str, storages: Sequence[str], blocks: int) -> Row:
    """Times both updaters in turns, with each storage."""
    row = Row(0, {}, {}, {})
    for storage in storages:
        trainings = {way: Training(model, way, graph, storage) for way in ("dynamic", "adaptive")}
        taken = take_turns({way: training.update for way, training in trainings.items()}, blocks)
        row = row._replace(functions=trainings["dynamic"].functions)
        row.ms[storage] = 1e3 * median(means(taken["dynamic"], "cpu"))
        row.ratios[storage] = ratio(taken, "adaptive", "dynamic", "cpu")
        for way, training in trainings.items():
            timed = [number for number in training.repeats if number > BLOCK // 2]
            row.repeats[f"{way} {storage}"] = len(timed)
    return row


HEADER = (
    f"{'':36}{'':>9}{'':>11}{'dynamic, ms':>20}{'adaptive / dynamic':>24}\n"
    f"{'model':36}{'graph':>9}{'functions':>11}{'float16':>11}{'none':>9}{'float16':>15}{'none':>9}"
)


def line(model: Model, graph: str, row: Row) -> str:
    """A line of the table."""
    ms = [f"{row.ms[storage]:.2f}" if storage in row.ms else "" for storage in STORAGES]
    return f"{model.title:36}{graph:>9}{row.functions:11}{ms[0]:>11}{ms[1]:>9}{_cells(row.ratios)}" + "".join(
        f"  {count} batches of {way} ran again" for way, count in row.repeats.items() if count
    )


def _cells(ratios: Dict[str, float]) -> str:
    cells = [f"{ratios[storage]:.3f}" if storage in ratios else "" for storage in STORAGES]
    return f"{cells[0]:>15}{cells[1]:>9}"


def summary(rows: Dict[Tuple[str, str], Row]) -> str:
    """Median and worst of each column, by graph."""
    lines = []
    for graph in dict.fromkeys(graph for _, graph in rows):
        found: Dict[str, List[float]] = {}
        for (_, own), row in rows.items():
            for storage, value in row.ratios.items() if own == graph else ():
                found.setdefault(storage, []).append(value)
        for what, choose in (("median", median), ("worst", max)):
            cells = _cells({storage: choose(values) for storage, values in found.items()})
            lines.append(f"{what:36}{graph:>9}{'':31}{cells}")
    return "\n".join(lines)


def kinds(model: Model, graph: str, storage: str, updates: int = UPDATES) -> Tuple[Counter[str], int]:
    """How many updates ended with a backward of which kind, and how many batches ran again."""
    training = Training(model, "adaptive", graph, storage)
    found: Counter[str] = Counter()
    for _ in range(updates):
        training.update()
        for updater in training.updaters:
            found[updater.scaling.result.kind] += 1
    return found, sum(number > 1 for number in training.repeats)


def print_kinds(name: str, graph: str, storage: str) -> None:
    """Tells the kinds of a model's updates."""
    found, repeats = kinds(MODELS[name], graph, storage)
    again = f"; {repeats} batches ran again" if repeats else ""
    print(f"{name}, {graph}, {storage}{again}")
    for kind, count in found.most_common():
        print(f"  {count:5}  {kind}", flush=True)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="*", help=f"{', '.join(MODELS)} (default: all)")
    parser.add_argument("--storage", choices=(*STORAGES, "both"), default="both", help="(default: both)")
    parser.add_argument("--graph", choices=(*GRAPHS, "both"), default="both", help="(default: both)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of 16 iterations of each (default: 6)")
    parser.add_argument("--kinds", action="store_true", help=f"print kinds over {UPDATES} updates, no times")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.model) - {*MODELS})
    if unknown or options.blocks < 1:
        parser.error(f"unknown model: {', '.join(unknown)}" if unknown else "--blocks must be 1 or more")
    names = [name for name in MODELS if name in (options.model or MODELS)]
    graphs = GRAPHS if options.graph == "both" else (options.graph,)
    storages = STORAGES if options.storage == "both" else (options.storage,)

    warnings.simplefilter("ignore", LossScaleWarning)
    print(f"nnabla_adaloss of {Path(nnabla_adaloss.__file__).parent}", flush=True)
    if options.kinds:
        for name in names:
            for graph in graphs:
                for storage in storages:
                    print_kinds(name, graph, storage)
        return
    print(HEADER)
    rows: Dict[Tuple[str, str], Row] = {}
    for graph in graphs:
        for name in names:
            row = rows[name, graph] = measure(MODELS[name], graph, storages, options.blocks)
            print(line(MODELS[name], graph, row), flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
