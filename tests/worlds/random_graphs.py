# SPDX-License-Identifier: Apache-2.0
"""Random networks out of everything the engine must handle: fan-out, sharing, many outputs, recompute."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import numpy as np

BATCH, WIDTH, CHANNELS, SIZE = 3, 4, 2, 4


class Network(NamedTuple):
    """A loss, what it is computed from, and whether each leaf is used by one function only."""

    loss: nn.Variable
    leaves: Dict[str, nn.Variable]
    used_once: bool


class Builder:
    """Grows a graph; every parameter is drawn from one generator, so that a seed gives one network."""

    def __init__(self, seed: int, known: Optional[Mapping[str, nn.Variable]] = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.known: Mapping[str, nn.Variable] = known or {}
        self.leaves: Dict[str, nn.Variable] = {}
        self.used_once = True

    def leaf(self, kind: str, *shape: int, reuse: bool = False) -> nn.Variable:
        """Return a parameter; an earlier one of the same shape when ``reuse`` is set and there is one."""
        if reuse:
            same = [v for name, v in self.leaves.items() if v.shape == shape and name.startswith(kind)]
            if same:
                self.used_once = False
                return same[int(self.rng.integers(len(same)))]
        name, values = f"{kind}{len(self.leaves)}", self.rng.standard_normal(shape) * 0.5
        v = self.known.get(name)
        if v is None or v.shape != shape:
            v = nn.Variable(shape, need_grad=True)
            v.d = values
        self.leaves[name] = v
        return v

    def pick(self, pool: List[nn.Variable]) -> nn.Variable:
        """Return one of the pool, early ones too: they become fan-outs."""
        return pool[int(self.rng.integers(len(pool)))]


Step = Callable[[Builder, List[nn.Variable]], List[nn.Variable]]


def _affine(b: Builder, pool: List[nn.Variable], reuse: bool = False) -> List[nn.Variable]:
    weight = b.leaf("w", WIDTH, WIDTH, reuse=reuse)
    return [F.affine(b.pick(pool), weight, b.leaf("b", WIDTH))]


def _tied(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    weight = b.leaf("w", WIDTH, WIDTH)
    b.used_once = False
    return [F.affine(F.affine(b.pick(pool), weight), F.transpose(weight, (1, 0)))]


def _batch_matmul(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    rows = F.reshape(b.pick(pool), (BATCH, WIDTH, 1), inplace=False)
    columns = F.reshape(b.pick(pool), (BATCH, 1, WIDTH), inplace=False)
    scores = F.batch_matmul(rows, columns)
    return [F.reshape(F.batch_matmul(F.softmax(scores), rows, transpose_a=True), (BATCH, WIDTH))]


def _squared(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    v = F.reshape(b.pick(pool), (BATCH, WIDTH, 1), inplace=False)
    return [F.reshape(F.batch_matmul(v, v, transpose_b=True), (BATCH, WIDTH * WIDTH))[:, :WIDTH]]


def _split(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    halves = F.split(F.reshape(b.pick(pool), (BATCH, 2, WIDTH // 2)), axis=1)
    return [F.concatenate(F.tanh(halves[0]), halves[1], axis=1)]


def _one_of_many_outputs(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    first, _ = F.split(F.reshape(b.pick(pool), (BATCH, 2, WIDTH // 2)), axis=1)
    return [F.concatenate(first, first, axis=1)]


def _batch_normalization(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    mean, variance = nn.Variable((1, WIDTH)), nn.Variable((1, WIDTH))
    mean.d, variance.d = 0, 1
    beta, gamma = b.leaf("beta", 1, WIDTH), b.leaf("gamma", 1, WIDTH)
    return [F.batch_normalization(b.pick(pool), beta, gamma, mean, variance, batch_stat=True)]


def _recompute(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    # What is recomputed ends in a layer that is not: nnabla 1.39 reads freed memory when several functions,
    # or one that works in place, read the last recomputed output.
    with nn.recompute():
        h = F.sigmoid(F.tanh(_affine(b, pool)[0]))
    return [F.affine(h, b.leaf("w", WIDTH, WIDTH))]


def _in_place(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    # Each of the three writes its output, or its gradient, into the array of an input.
    h = F.relu(F.reshape(_affine(b, pool)[0], (BATCH, 2, WIDTH // 2)), inplace=True)
    return [F.reshape(F.add2(h, F.tanh(h), inplace=True), (BATCH, WIDTH))]


def _image(
    b: Builder, pool: List[nn.Variable], step: Callable[[Builder, nn.Variable], nn.Variable]
) -> nn.Variable:
    flat = F.affine(b.pick(pool), b.leaf("w", WIDTH, CHANNELS * SIZE * SIZE))
    image = step(b, F.tanh(F.reshape(flat, (BATCH, CHANNELS, SIZE, SIZE))))
    return F.affine(image, b.leaf("w", int(np.prod(image.shape[1:])), WIDTH))


def _convolutions(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    def step(b: Builder, x: nn.Variable) -> nn.Variable:
        x = F.convolution(
            x, b.leaf("c", CHANNELS, CHANNELS, 3, 3), b.leaf("b", CHANNELS), pad=(1, 1), stride=(2, 2)
        )
        x = F.depthwise_convolution(x, b.leaf("c", CHANNELS, 1, 1))
        return F.deconvolution(x, b.leaf("c", CHANNELS, CHANNELS, 2, 2))

    return [_image(b, pool, step)]


def _grouped(b: Builder, pool: List[nn.Variable]) -> List[nn.Variable]:
    def step(b: Builder, x: nn.Variable) -> nn.Variable:
        x = F.relu(F.convolution(x, b.leaf("c", 2 * CHANNELS, 1, 2, 2), group=CHANNELS))
        return F.max_pooling(x, (3, 3))

    return [_image(b, pool, step)]


STEPS: Dict[str, Step] = {
    "affine": _affine,
    "shared": lambda b, pool: _affine(b, pool, reuse=True),
    "tied": _tied,
    "tanh": lambda b, pool: [F.tanh(b.pick(pool))],
    "relu": lambda b, pool: [F.relu(b.pick(pool))],
    "add": lambda b, pool: [b.pick(pool) + b.pick(pool)],
    "in_place": _in_place,
    "multiply": lambda b, pool: [F.tanh(b.pick(pool)) * F.sigmoid(b.pick(pool))],
    "prelu": lambda b, pool: [F.prelu(b.pick(pool), b.leaf("a", 1))],
    "bias": lambda b, pool: [b.pick(pool) + F.broadcast(b.leaf("v", 1, WIDTH), (BATCH, WIDTH))],
    "batch_matmul": _batch_matmul,
    "squared": _squared,
    "split": _split,
    "one_of_many_outputs": _one_of_many_outputs,
    "batch_normalization": _batch_normalization,
    "recompute": _recompute,
    "convolutions": _convolutions,
    "grouped": _grouped,
}
CLIPPING: Dict[str, Step] = {"clip": lambda b, pool: [F.clip_grad_by_norm(b.pick(pool), 1e-2)]}


def build(
    seed: int,
    steps: List[str],
    *,
    input_gradient: bool,
    batch: Tuple[int, ...] = (BATCH, WIDTH),
    known: Optional[Mapping[str, nn.Variable]] = None,
) -> Network:
    """Return the network that ``steps`` make; the same arguments give the same network.

    Args:
        known: leaves of one that was built before, to be used again.
    """
    b = Builder(seed, known)
    x = nn.Variable(batch)
    # Not from the generator of the rest: batches of another size make the same network.
    x.d = np.random.default_rng([seed, 1]).standard_normal(batch)
    if input_gradient:
        x = b.known.get("x", x)
        x.need_grad = True
        b.leaves["x"] = x
        b.used_once = False
    pool: List[nn.Variable] = [x]
    for name in ["affine", *steps]:
        pool += {**STEPS, **CLIPPING}[name](b, pool)
    heads = [F.affine(v, b.leaf("w", WIDTH, 2)) for v in pool[-2:]]
    target = nn.Variable.from_numpy_array(np.zeros((batch[0], 1)))
    loss = F.mean(F.softmax_cross_entropy(sum(heads[1:], heads[0]), target))
    return Network(loss, b.leaves, b.used_once)


seeds, chosen_steps = st.integers(0, 2**31), st.lists(st.sampled_from(sorted(STEPS)), max_size=7)
networks = st.builds(build, seeds, chosen_steps, input_gradient=st.booleans())
with_clipping = st.lists(st.sampled_from([*sorted(STEPS), *CLIPPING, *CLIPPING]), max_size=7)
networks_that_clip = st.builds(build, seeds, with_clipping, input_gradient=st.booleans())


def assert_same_above_subnormals(found: np.ndarray, reference: np.ndarray, name: str) -> None:
    """Gradients of float32 are the same, bit for bit, with a scale and without.

    What underflows in float32 without a scale may be there with one, and be a part of something larger: below
    2^-80 gradients only have to be close.

    Args:
        found: bits, uint32.
        reference: bits without a scale.
        name: whose gradient it is.
    """
    values, expected = found.view(np.float32), reference.view(np.float32)
    large = ~(np.abs(expected) < 2.0**-80)
    np.testing.assert_array_equal(found[large], reference[large], err_msg=name)
    np.testing.assert_allclose(values[~large], expected[~large], rtol=0.0, atol=2.0**-104, err_msg=name)
