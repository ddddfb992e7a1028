# SPDX-License-Identifier: Apache-2.0
"""Small models with the structure of published ones."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Union

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np
from published_batches import (
    Batch,
    half_labelled,
    heatmaps,
    images,
    masks,
    next_symbols,
    padded,
    pairs,
    pictures,
    real_and_noise,
    vectors,
    waves,
)

Losses = Union[nn.Variable, Dict[str, nn.Variable]]
"""The loss; or, for players in turn, each one's loss by the scope of its parameters."""


class Model(NamedTuple):
    """Model to train."""

    title: str
    batch: Callable[[np.random.Generator], Batch]
    build: Callable[..., Losses]
    rate: float = 0.01


def constant(array: Any) -> nn.Variable:
    """Make a Variable with values and without gradient."""
    return nn.Variable.from_numpy_array(np.asarray(array, np.float32))


def weight(name: str, shape: Sequence[int], sigma: float = 0.1) -> nn.Variable:
    """Make a parameter of the current scope."""
    return nn.parameter.get_parameter_or_create(name, tuple(shape), I.NormalInitializer(sigma))


def classified(h: nn.Variable, t: nn.Variable, axis: int = 1) -> nn.Variable:
    """Compute the mean cross entropy."""
    return F.mean(F.softmax_cross_entropy(h, t, axis=axis))


# Batches


def attention(h: nn.Variable, hidden: nn.Variable, heads: int) -> nn.Variable:
    """Attend from each position to others; `hidden` is added to the logits."""
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
    """Build a language model of two pre-norm blocks; its last layer has a weight of its own."""
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
    """Build an encoder of two post-norm blocks, with padding masks; the first position is classified."""
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
    """Build a language model of one unrolled LSTM, with a cross entropy for each step."""
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
    """Build a recurrent net over the 16 rows of an image, with a trained initial state."""
    batch, width = x.shape[0], 64
    h = F.broadcast(weight("initial", (1, width)), (batch, width))
    for row in F.split(F.reshape(x, (batch, 16, -1)), axis=1):
        h = F.tanh(PF.affine(row, width, name="in") + PF.affine(h, width, with_bias=False, name="again"))
    return classified(PF.affine(h, 4, name="out"), t)


def unit(h: nn.Variable, maps: int, size: int, name: str) -> nn.Variable:
    """Apply batch normalization, ReLU and convolution."""
    with nn.parameter_scope(name):
        h = F.relu(PF.batch_normalization(h))
        return PF.convolution(h, maps, (size, size), pad=(size // 2, size // 2))


def bottleneck(h: nn.Variable, name: str) -> nn.Variable:
    maps = h.shape[1]
    with nn.parameter_scope(name):
        return h + unit(unit(unit(h, maps // 2, 1, "a"), maps // 2, 3, "b"), maps, 1, "c")


def hourglass(x: nn.Variable, maps: nn.Variable) -> nn.Variable:
    """Build two stacks of residual blocks, down to one pixel and up again, with a loss each."""

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
    """Build ten dilated causal convolutions, with gates, residuals and a sum of skips."""
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
    """Build six gated convolutions with masked weights: a pixel depends on those above and to its left."""
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
    """Build one network three times: a cross entropy, and the effect of a small perturbation on others.

    The perturbation has a given direction; published models search for the worst, with other graphs.
    """

    def network(h: nn.Variable) -> nn.Variable:
        for layer in range(3):
            h = F.relu(PF.batch_normalization(PF.affine(h, 128, name=f"fc{layer}"), name=f"bn{layer}"))
        return PF.affine(h, 4, name="out")

    clean, pushed = network(free), network(free + 2.0 * direction)
    apart = F.softmax(clean) * (F.log_softmax(clean) - F.log_softmax(pushed))
    return classified(network(x), t) + F.mean(F.sum(apart, axis=1))


def autoencoder(x: nn.Variable) -> nn.Variable:
    """Build an autoencoder whose decoder has the encoder's weights, transposed."""
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
    """Build a convolutional net for two images, and the contrastive loss of their distance."""

    def network(h: nn.Variable) -> nn.Variable:
        h = F.max_pooling(F.relu(PF.convolution(h, 8, (5, 5), name="conv1")), (2, 2))
        h = F.max_pooling(F.relu(PF.convolution(h, 16, (3, 3), name="conv2")), (2, 2))
        return PF.affine(F.relu(PF.affine(h, 64, name="fc1")), 8, name="fc2")

    squared = F.sum(F.squared_error(network(one), network(other)), axis=1, keepdims=True)
    gap = F.relu(1.0 - (squared + 1e-4) ** 0.5)
    return F.mean(same * squared + (1.0 - same) * gap**2)


def gan(real: nn.Variable, noise: nn.Variable) -> Dict[str, nn.Variable]:
    """Build a convolutional generator and critic; the critic trains on the generator's last images."""

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
    """Build three levels, each concatenated to the output of the level below."""

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
    """Build two cells of mixed operations, weighted by the softmax of trained weights, which both share."""
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
