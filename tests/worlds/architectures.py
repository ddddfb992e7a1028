# SPDX-License-Identifier: Apache-2.0
"""Networks as people build them."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np

from tests.worlds.tampering import Gate
from tests.worlds.values import gradients, zero_grads

RNG = np.random.RandomState


def image(*shape: int) -> nn.Variable:
    return nn.Variable.from_numpy_array(RNG(3).randn(*shape).astype(np.float32))


def transformer_block() -> nn.Variable:
    x, width, heads = image(2, 4, 8), 8, 2

    def split(v: nn.Variable) -> nn.Variable:
        return F.transpose(F.reshape(v, (2, 4, heads, width // heads)), (0, 2, 1, 3))

    q, k, v = (split(PF.affine(x, width, base_axis=2, name=n, rng=RNG(i))) for i, n in enumerate("qkv"))
    weights = F.softmax(F.batch_matmul(q, k, transpose_b=True) * 0.5)
    h = F.reshape(F.transpose(F.batch_matmul(weights, v), (0, 2, 1, 3)), (2, 4, width))
    h = PF.layer_normalization(
        x + PF.affine(h, width, base_axis=2, name="out", rng=RNG(4)), batch_axis=(0, 1)
    )
    inner = F.gelu(PF.affine(h, 16, base_axis=2, name="up", rng=RNG(5)))
    return F.mean((h + PF.affine(inner, width, base_axis=2, name="down", rng=RNG(6))) ** 2)


def u_net() -> nn.Variable:
    def conv(h: nn.Variable, maps: int, name: str) -> nn.Variable:
        return F.relu(PF.convolution(h, maps, (3, 3), pad=(1, 1), name=name, rng=RNG(len(name))))

    x = image(2, 2, 8, 8)
    a = conv(x, 4, "a")
    b = conv(F.max_pooling(a, (2, 2)), 8, "bb")
    up = PF.deconvolution(b, 4, (2, 2), stride=(2, 2), name="up", rng=RNG(9))
    return F.mean(conv(F.concatenate(up, a, axis=1), 1, "ccc") ** 2)


def dense_block() -> nn.Variable:
    features = [image(2, 3, 6, 6)]
    for i in range(4):
        joined = F.concatenate(*features, axis=1) if len(features) > 1 else features[0]
        h = PF.batch_normalization(joined, name=f"bn{i}")
        features.append(PF.convolution(F.relu(h), 2, (3, 3), pad=(1, 1), name=f"c{i}", rng=RNG(i)))
    return F.mean(F.concatenate(*features, axis=1) ** 2)


def squeeze_and_excite() -> nn.Variable:
    h = F.swish(PF.convolution(image(2, 3, 6, 6), 4, (3, 3), name="conv", rng=RNG(0)))
    s = F.relu(PF.affine(F.average_pooling(h, h.shape[2:]), 2, name="squeeze", rng=RNG(1)))
    s = F.sigmoid(PF.affine(s, 4, name="excite", rng=RNG(2)))
    return F.mean((h * F.broadcast(F.reshape(s, (2, 4, 1, 1)), h.shape)) ** 2)


def unrolled_lstm() -> nn.Variable:
    h = c = F.constant(0.1, (2, 3))
    for step in range(4):
        x = nn.Variable.from_numpy_array(RNG(step).randn(2, 5).astype(np.float32))
        gates = PF.affine(F.concatenate(x, h, axis=1), 12, name="cell", rng=RNG(7))
        i, f, o, g = F.split(F.reshape(gates, (2, 4, 3)), axis=1)
        c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
        h = F.sigmoid(o) * F.tanh(c)
    return F.mean(h**2)


def gradient_penalty() -> nn.Variable:
    x = image(3, 4)
    x.need_grad = True
    y = PF.affine(F.tanh(PF.affine(x, 5, name="a", rng=RNG(1))), 1, name="b", rng=RNG(2))
    (gradient,) = nn.grad([F.sum(y)], [x])
    return F.mean(y) + F.mean((F.sum(gradient**2, axis=1) ** 0.5 - 1.0) ** 2)


def embedding_with_tied_output() -> nn.Variable:
    ids = nn.Variable.from_numpy_array(np.array([[1, 2, 1], [0, 3, 3]]))
    table = PF.get_parameter_or_create("table", (5, 4), RNG(0).randn(5, 4).astype(np.float32))
    h = F.tanh(F.mean(F.embed(ids, table), axis=1))
    h = PF.affine(h, 4, name="a", rng=RNG(1))
    logits = F.affine(h, F.transpose(table, (1, 0)))
    return F.mean(F.softmax_cross_entropy(logits, F.constant(1, (2, 1))))


def fused_convolution() -> nn.Variable:
    def parameter(name: str, *shape: int, value: float = 0.0) -> nn.Variable:
        initial = RNG(len(name)).randn(*shape) * 0.3 if value == 0.0 else np.full(shape, value)
        need_grad = not name.endswith(("mean", "variance"))
        return PF.get_parameter_or_create(name, shape, initial.astype(np.float32), need_grad=need_grad)

    def unit(h: nn.Variable, name: str, **options: Any) -> nn.Variable:
        return F.fused_convolution(h, parameter(f"{name}/W", 4, h.shape[1], 3, 3), pad=(1, 1), **options)

    h = unit(image(2, 3, 6, 6), "first", bias=parameter("first/b", 4), nonlinearity="relu")
    h = unit(h, "residual", z=h)
    names = ("beta", "gamma", "mean", "variance")
    statistics = {n: parameter(f"bn/{n}", 1, 4, 1, 1, value=1.0) for n in names}
    # The convolution within is computed again in backward, with the weight as it is then.
    with nn.recompute():
        h = unit(h, "second", **statistics)
    return F.mean(PF.affine(h, 2, name="c", rng=RNG(2)) ** 2)


def weight_times_itself() -> nn.Variable:
    w = PF.get_parameter_or_create("w", (4, 4), RNG(0).randn(4, 4).astype(np.float32))
    product = F.affine(F.affine(w, w), w.reshape((4, 4), unlink=True))
    product = product + F.affine(w.reshape((4, 4), unlink=True), w)
    return F.mean(PF.affine(F.tanh(F.affine(image(3, 4), product)), 2, name="a", rng=RNG(1)) ** 2)


def normalized_weights(normalize: Callable[[nn.Variable], nn.Variable]) -> nn.Variable:
    h = F.tanh(PF.affine(image(3, 4), 6, name="a", apply_w=normalize, rng=RNG(0)))
    return F.mean(PF.affine(h, 2, name="b", apply_w=normalize, rng=RNG(1)) ** 2)


def weight_normalization() -> nn.Variable:
    return normalized_weights(lambda w: PF.weight_normalization(w, dim=1, name=f"wn{w.shape[0]}"))


def spectral_normalization() -> nn.Variable:
    return normalized_weights(lambda w: PF.spectral_norm(w, dim=1, itr=1, name=f"sn{w.shape[0]}"))


def python_function() -> nn.Variable:
    h = PF.affine(image(3, 4), 4, name="a", rng=RNG(0))
    doubled = Gate()
    doubled.factor = 2.0
    h = doubled(h) + F.tanh(PF.affine(h, 4, name="b", rng=RNG(1)))
    return F.mean(h**2)


def rewired() -> nn.Variable:
    x = image(3, 4)
    h = F.tanh(PF.affine(x, 4, name="a", rng=RNG(0)))
    y = F.mean(PF.affine(h, 4, name="b", rng=RNG(1)) ** 2)
    h.rewire_on(F.sigmoid(PF.affine(x, 4, name="c", rng=RNG(2))))
    return y


def leaf(name: str, *shape: int, need_grad: bool = True) -> nn.Variable:
    return PF.get_parameter_or_create(name, shape, RNG(len(name)).randn(*shape) * 0.4, need_grad=need_grad)


def three_that_write() -> nn.Variable:
    """One leaf is a bias, a factor, and what is added; and it is written in three components."""
    shared = leaf("leaf", 5)
    spread = F.broadcast(F.reshape(shared, (1, 5)), (4, 5))
    h = F.tanh(F.affine(image(4, 5), leaf("w", 5, 5), shared))
    h = F.tanh(F.affine(h, leaf("w2", 5, 5)) * spread)
    return F.mean(F.affine(F.sigmoid(h + spread), leaf("w_3", 5, 5), shared) ** 2)


def lstm_twice() -> nn.Variable:
    """Functions that keep references of their own to the arrays of what they share."""
    w, state = leaf("w", 1, 4, 5, 10), leaf("state", 1, 1, 2, 5)
    x = PF.affine(image(6, 3), 5, name="in", rng=RNG(2))
    y, h, c = F.lstm(F.reshape(x, (3, 2, 5), inplace=False), state, state, w)
    y = PF.affine(F.reshape(y, (6, 5)), 5, name="between", rng=RNG(4))
    y, _, _ = F.lstm(F.reshape(y, (3, 2, 5)), h, c, w)
    penalty = 1e-4 * F.sum(w**2)
    return penalty + F.mean(PF.affine(F.reshape(y, (6, 5)), 2, name="last", rng=RNG(3)) ** 2)


def normalized_and_plain() -> nn.Variable:
    """Functions with references of their own add to a gradient after others that have none."""
    w, u = leaf("w", 5, 5), leaf("u", 5, need_grad=False)
    h = PF.affine(image(6, 3), 5, name="in", rng=RNG(2))
    for _ in range(3):
        h = F.tanh(F.affine(h, F.spectral_norm(w, u, itr=1)))
    return F.mean(h**2) + F.mean(F.sigmoid(F.affine(h, w)))


NETWORKS: Dict[str, Callable[[], nn.Variable]] = {
    f.__name__: f
    for f in (
        transformer_block,
        u_net,
        dense_block,
        squeeze_and_excite,
        unrolled_lstm,
        gradient_penalty,
        embedding_with_tied_output,
        fused_convolution,
        weight_times_itself,
        weight_normalization,
        spectral_normalization,
        python_function,
        rewired,
        three_that_write,
        lstm_twice,
        normalized_and_plain,
    )
}


def finite_gradients(
    loss: Any, scale: Optional[float], clear_buffer: bool, **options: Any
) -> Dict[str, np.ndarray]:
    # Forward changes running statistics and the vectors of spectral normalization.
    buffers = [(v, v.d.copy()) for v in nn.get_parameters(grad_only=False).values() if not v.need_grad]
    loss.forward(clear_no_need_grad=clear_buffer)
    zero_grads()
    loss.backward(scale, clear_buffer=clear_buffer, **options)
    for v, value in buffers:
        v.d = value
    found = gradients()
    assert all(np.isfinite(gradient).all() for gradient in found.values())
    return found
