# SPDX-License-Identifier: Apache-2.0
"""Small programs, one for each of nnabla's own functions that training needs.

Nothing is imported before a program runs: the examination must not depend on what it examines.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional


class Trial(NamedTuple):
    """A function of nnabla's, tried once.

    Attributes:
        program: makes its output. It is given an object with nnabla's functions `F` and `PF`, and with `x`
            and `labels`, which make inputs of a shape.
        expected: what NumPy makes of the same inputs, given NumPy and the inputs; None: the CPU's result in
            float is taken for right.
    """

    program: Callable[[Any], Any]
    expected: Optional[Callable[..., Any]] = None


def _normalized(np: Any, x: Any, *axes: int) -> Any:
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5)


def _softmax(np: Any, x: Any) -> Any:
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


# Reductions are large enough to take the way that large ones take on a GPU, by cuBLAS or cuDNN.
TRIALS: Mapping[str, Trial] = {
    "sum": Trial(lambda n: n.F.sum(n.x(64, 512)), lambda np, x: x.sum()),
    "sum, of rows": Trial(lambda n: n.F.sum(n.x(64, 128), axis=1), lambda np, x: x.sum(1)),
    "sum, of columns": Trial(lambda n: n.F.sum(n.x(128, 64), axis=0), lambda np, x: x.sum(0)),
    "mean": Trial(lambda n: n.F.mean(n.x(64, 512)), lambda np, x: x.mean()),
    "mean, of rows": Trial(lambda n: n.F.mean(n.x(64, 128), axis=1), lambda np, x: x.mean(1)),
    "max": Trial(lambda n: n.F.max(n.x(64, 128), axis=1), lambda np, x: x.max(1)),
    "min": Trial(lambda n: n.F.min(n.x(64, 128), axis=1), lambda np, x: x.min(1)),
    "norm": Trial(lambda n: n.F.norm(n.x(64, 64)), lambda np, x: np.sqrt((x * x).sum())),
    "add2": Trial(lambda n: n.x(64, 64) + n.x(64, 64), lambda np, a, b: a + b),
    "add2, broadcast": Trial(lambda n: n.x(64, 64) + n.x(1, 64), lambda np, a, b: a + b),
    "mul2": Trial(lambda n: n.x(64, 64) * n.x(64, 64), lambda np, a, b: a * b),
    "mul_scalar": Trial(lambda n: n.x(64, 64) * 3.0, lambda np, x: 3 * x),
    "pow_scalar": Trial(lambda n: n.x(64, 64) ** 2, lambda np, x: x * x),
    "exp": Trial(lambda n: n.F.exp(n.x(64, 64)), lambda np, x: np.exp(x)),
    "tanh": Trial(lambda n: n.F.tanh(n.x(64, 64)), lambda np, x: np.tanh(x)),
    "sigmoid": Trial(lambda n: n.F.sigmoid(n.x(64, 64)), lambda np, x: 1 / (1 + np.exp(-x))),
    "relu": Trial(lambda n: n.F.relu(n.x(64, 64)), lambda np, x: x.clip(0)),
    "gelu": Trial(lambda n: n.F.gelu(n.x(64, 64))),
    "swish": Trial(lambda n: n.F.swish(n.x(64, 64)), lambda np, x: x / (1 + np.exp(-x))),
    "softmax": Trial(lambda n: n.F.softmax(n.x(64, 64)), _softmax),
    "log_softmax": Trial(lambda n: n.F.log_softmax(n.x(64, 64)), lambda np, x: np.log(_softmax(np, x))),
    "softmax_cross_entropy": Trial(lambda n: n.F.softmax_cross_entropy(n.x(64, 10), n.labels(64, 1))),
    "sigmoid_cross_entropy": Trial(lambda n: n.F.sigmoid_cross_entropy(n.x(64, 2), n.labels(64, 2, of=2))),
    "squared_error": Trial(
        lambda n: n.F.squared_error(n.x(64, 10), n.x(64, 10)), lambda np, a, b: (a - b) ** 2
    ),
    "layer_normalization": Trial(
        lambda n: n.PF.layer_normalization(n.x(32, 64)), lambda np, x: _normalized(np, x, 1)
    ),
    "batch_normalization": Trial(
        lambda n: n.PF.batch_normalization(n.x(8, 16, 8, 8)), lambda np, x: _normalized(np, x, 0, 2, 3)
    ),
    "instance_normalization": Trial(
        lambda n: n.PF.instance_normalization(n.x(8, 16, 8, 8)), lambda np, x: _normalized(np, x, 2, 3)
    ),
    "group_normalization": Trial(lambda n: n.PF.group_normalization(n.x(8, 16, 8, 8), 4)),
    "weight_normalization": Trial(lambda n: n.PF.affine(n.x(8, 16), 8, apply_w=n.PF.weight_normalization)),
    "affine": Trial(lambda n: n.PF.affine(n.x(64, 64), 32)),
    "batch_matmul": Trial(lambda n: n.F.batch_matmul(n.x(8, 16, 32), n.x(8, 32, 16)), lambda np, a, b: a @ b),
    "convolution": Trial(lambda n: n.PF.convolution(n.x(8, 16, 8, 8), 16, (3, 3), pad=(1, 1))),
    "convolution, one dimension": Trial(lambda n: n.PF.convolution(n.x(8, 16, 32), 16, (3,), pad=(1,))),
    "deconvolution": Trial(lambda n: n.PF.deconvolution(n.x(8, 16, 4, 4), 16, (2, 2), stride=(2, 2))),
    "depthwise_convolution": Trial(
        lambda n: n.PF.depthwise_convolution(n.x(8, 16, 8, 8), (3, 3), pad=(1, 1))
    ),
    "max_pooling": Trial(lambda n: n.F.max_pooling(n.x(8, 16, 8, 8), (2, 2))),
    "average_pooling": Trial(lambda n: n.F.average_pooling(n.x(8, 16, 8, 8), (2, 2))),
    "global_average_pooling": Trial(
        lambda n: n.F.global_average_pooling(n.x(8, 16, 8, 8)),
        lambda np, x: x.mean((2, 3), keepdims=True),
    ),
    "embed": Trial(lambda n: n.PF.embed(n.labels(8, 16, of=50), 50, 32)),
    "lstm": Trial(lambda n: n.PF.lstm(n.x(5, 4, 8), n.x(1, 1, 4, 8), n.x(1, 1, 4, 8), training=True)[0]),
    "transpose": Trial(lambda n: n.F.transpose(n.x(8, 4, 6), (2, 0, 1)), lambda np, x: x.transpose(2, 0, 1)),
    "concatenate": Trial(
        lambda n: n.F.concatenate(n.x(8, 8), n.x(8, 8), axis=1), lambda np, a, b: np.concatenate([a, b], 1)
    ),
    "slice": Trial(lambda n: n.x(8, 8)[:, :4], lambda np, x: x[:, :4]),
    "broadcast": Trial(lambda n: n.F.broadcast(n.x(1, 8), (8, 8)), lambda np, x: x.repeat(8, 0)),
    "interpolate": Trial(lambda n: n.F.interpolate(n.x(4, 4, 8, 8), output_size=(16, 16), mode="nearest")),
    # Whatever it drops: what is kept is twice as large, so that the first term is zero.
    "dropout": Trial(lambda n: _dropout(n, n.x(64, 64)), lambda np, x: x),
}


def _dropout(n: Any, x: Any) -> Any:
    y = n.F.dropout(x, 0.5)
    return (y - 2.0 * x) * y + x
