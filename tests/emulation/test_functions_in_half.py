# SPDX-License-Identifier: Apache-2.0
"""Every function of the table, reading in emulation what is in fp32, beside nnabla's own half precision."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, Callable, Dict, List, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest
from numpy.typing import NDArray

from nnabla_adaloss import FormatEmulation, ScaleTracker
from nnabla_adaloss.functions.loss_scaling import LossScaling, Unscale
from nnabla_adaloss.graph.functions import FUNCTIONS, properties_of
from tests.emulation.networks import half, is_half, leaf
from tests.worlds.values import FLOAT, HALF, constant

Array = NDArray[np.float32]
Call = Tuple[Callable[..., Any], List[Any]]

ROWS, COLUMNS, IMAGES, KERNEL, MAPS = (4, 6), (6, 5), (2, 3, 4, 4), (3, 3, 3, 3), (1, 3, 1, 1)
SMALL_IMAGES, SEPARABLE = (2, 2, 5, 5), (2, 3, 3, 3)


def numbers(*values: float) -> Array:
    """Numbers that are no data: labels, indices, ranges."""
    return np.array(values, np.float32)


def gradient_of(layer: Callable[..., Any], of: int) -> Callable[..., Any]:
    """A product that `nn.grad` makes of a layer: of its output gradient and its other input."""
    shape = (IMAGES, KERNEL) if layer is not F.affine else (ROWS, COLUMNS)

    def made(g: nn.Variable, other: nn.Variable) -> nn.Variable:
        inputs = [other, other]
        inputs[of] = leaf(np.ones(shape[of]))
        return nn.grad([layer(*inputs)], [inputs[of]], grad_outputs=[g])[0]

    return made


def normalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """A batch normalization with running statistics of its own."""
    return lambda x, beta, gamma: function(x, beta, gamma, constant(np.zeros(MAPS)), constant(np.ones(MAPS)))


# What makes it, and its inputs: shapes of data, or numbers.
CALLS: Dict[str, Call] = {
    "Affine": (F.affine, [ROWS, COLUMNS, (5,)]),
    "Convolution": (F.convolution, [IMAGES, KERNEL, (3,)]),
    "Deconvolution": (F.deconvolution, [IMAGES, KERNEL, (3,)]),
    "DepthwiseConvolution": (F.depthwise_convolution, [IMAGES, (3, 3, 3), (3,)]),
    "DepthwiseDeconvolution": (F.depthwise_deconvolution, [IMAGES, (3, 3, 3), (3,)]),
    "BatchMatmul": (F.batch_matmul, [(2, 3, 4), (2, 4, 5)]),
    "AdaptiveSeparableConvolution": (
        F.adaptive_separable_convolution,
        [SMALL_IMAGES, SEPARABLE, SEPARABLE],
    ),
    # nnabla's backward crashes where only one of the others needs a gradient.
    "DeformableConvolution": (
        lambda x: F.deformable_convolution(
            x, leaf(np.ones((3, 2, 3, 3))), leaf(np.zeros((2, 18, 5, 5))), pad=(1, 1)
        ),
        [SMALL_IMAGES],
    ),
    "PatchCorrelation": (partial(F.patch_correlation, channel_last=True), [(1, 4, 4, 2)] * 2),
    "Einsum": (partial(F.einsum, equation="ij,jk->ik"), [ROWS, COLUMNS]),
    "FusedConvolution": (F.fused_convolution, [IMAGES, KERNEL, (3,)]),
    "BinaryConnectAffine": (F.binary_connect_affine, [ROWS, COLUMNS, COLUMNS]),
    "BinaryConnectConvolution": (F.binary_connect_convolution, [IMAGES, KERNEL, KERNEL]),
    "BinaryWeightAffine": (F.binary_weight_affine, [ROWS, COLUMNS, COLUMNS, (5,)]),
    "BinaryWeightConvolution": (F.binary_weight_convolution, [IMAGES, KERNEL, KERNEL, (3,)]),
    "INQAffine": (
        partial(F.inq_affine, inq_iterations=(5,)),
        [ROWS, COLUMNS, np.zeros(COLUMNS, np.float32)],
    ),
    "INQConvolution": (
        partial(F.inq_convolution, inq_iterations=(5,)),
        [IMAGES, KERNEL, np.zeros(KERNEL, np.float32)],
    ),
    "LSTM": (F.lstm, [(2, 3, 4), (1, 1, 3, 5), (1, 1, 3, 5), (1, 4, 5, 9)]),
    "GRU": (F.gru, [(2, 3, 4), (1, 1, 3, 5), (1, 3, 5, 9)]),
    "RNN": (F.rnn, [(2, 3, 4), (1, 1, 3, 5), (1, 5, 9)]),
    "SpectralNorm": (F.spectral_norm, [(4, 3), (4,)]),
    "AffineDataGrad": (gradient_of(F.affine, 0), [(4, 5), COLUMNS]),
    "AffineFilterGrad": (gradient_of(F.affine, 1), [(4, 5), ROWS]),
    "ConvolutionDataGrad": (gradient_of(F.convolution, 0), [(2, 3, 2, 2), KERNEL]),
    "ConvolutionFilterGrad": (gradient_of(F.convolution, 1), [(2, 3, 2, 2), IMAGES]),
    "DeconvolutionDataGrad": (gradient_of(F.deconvolution, 0), [(2, 3, 6, 6), KERNEL]),
    "DeconvolutionFilterGrad": (gradient_of(F.deconvolution, 1), [(2, 3, 6, 6), IMAGES]),
    "ClipGradByNorm": (partial(F.clip_grad_by_norm, clip_norm=1.0), [ROWS]),
    "ClipGradByValue": (F.clip_grad_by_value, [ROWS, ROWS, ROWS]),
    "Sink": (F.sink, [ROWS]),
    "VATNoise": (F.vat_noise, [ROWS, ROWS]),
    "Transpose": (partial(F.transpose, axes=(1, 0)), [ROWS]),
    "Reshape": (partial(F.reshape, shape=(24,), inplace=False), [ROWS]),
    "BatchNormalization": (normalized(F.batch_normalization), [IMAGES, MAPS, MAPS]),
    "FusedBatchNormalization": (normalized(F.fused_batch_normalization), [IMAGES, MAPS, MAPS]),
    "MeanSubtraction": (F.mean_subtraction, [IMAGES, (3, 4, 4), (1,)]),
    "MinMaxQuantize": (
        F.min_max_quantize,
        [ROWS, *(numbers([value]) for value in (1.0, 2.0, 0.0, 255.0))],
    ),
    "QuantizeLinear": (F.quantize_linear, [ROWS, numbers([0.01]), numbers([0.0])]),
    "Sum": (partial(F.sum, axis=1), [ROWS]),
    "Where": (F.where, [np.eye(*ROWS, dtype=np.float32), ROWS, ROWS]),
    "Mean": (partial(F.mean, axis=1), [ROWS]),
    "EpsilonInsensitiveLoss": (partial(F.epsilon_insensitive_loss, epsilon=0.001), [ROWS, ROWS]),
    "LayerNormalization": (lambda x: F.layer_normalization(x, None, None), [IMAGES]),
    "InstanceNormalization": (lambda x: F.instance_normalization(x, None, None), [IMAGES]),
    "GroupNormalization": (lambda x: F.group_normalization(x, None, None, 3), [IMAGES]),
    "SoftmaxCrossEntropy": (F.softmax_cross_entropy, [ROWS, numbers([1], [2], [0], [1])]),
    "CumSum": (partial(F.cumsum, axis=1), [ROWS]),
    "CumProd": (partial(F.cumprod, axis=1), [ROWS]),
    "TopKData": (partial(F.top_k_data, k=3), [ROWS]),
    "TopKGrad": (partial(F.top_k_grad, k=3), [ROWS]),
    # Its shape follows from what it reads: it cannot read what is not computed yet.
    "Unique": (lambda: F.unique(constant([2.0, 1.0]), axis=0), []),
    "Assign": (F.assign, [ROWS, ROWS]),
    "BoolScatter": (F.bool_scatter, [(3,), numbers(1, 0, 1, 1)]),
    "ScatterNd": (partial(F.scatter_nd, shape=(2050,)), [(1,), numbers([2049])]),
    "Constant": (partial(F.constant, 0.1, ROWS), []),
    "ScaledLoss": (LossScaling(ScaleTracker(), name="ScaledLoss").apply, [ROWS]),
    "Unscale": (Unscale(ScaleTracker()).apply, [ROWS]),
}
ONE = """
Identity Unlink Shape Sort Softmax LogSoftmax ReLU LeakyReLU ReLU6 CReLU ELU CELU SELU GELU Swish Mish
SoftPlus SoftSign Sigmoid LogSigmoid HardSigmoid Tanh HardTanh Abs Exp Log Erf Sin Cos Tan Sinh Cosh ASin
ACos ATan ASinh ACosh ATanh
"""
TWO = """
Add2 Sub2 Mul2 Div2 Pow2 Maximum2 Minimum2 BcAdd2 ATan2 AddN MulN SquaredError AbsoluteError HuberLoss Equal
NotEqual Greater GreaterEqual Less LessEqual
"""
AND_A_NUMBER = """
AddScalar MulScalar PowScalar RSubScalar RDivScalar RPowScalar MaximumScalar MinimumScalar EqualScalar
NotEqualScalar GreaterScalar GreaterEqualScalar LessScalar LessEqualScalar
"""
FACE = {name.replace("_", ""): function for name, function in vars(F).items() if callable(function)}
CALLS.update((name, (FACE[name.lower()], [ROWS])) for name in ONE.split())
CALLS.update((name, (FACE[name.lower()], [ROWS, ROWS])) for name in TWO.split())
CALLS.update((name, (partial(FACE[name.lower()], val=1.5), [ROWS])) for name in AND_A_NUMBER.split())
# It asks for a communicator.
ALIKE = {"SyncBatchNormalization": "BatchNormalization"}


def in_fp32(v: nn.Variable, shape: Sequence[int]) -> nn.Variable:
    """The numbers of `v`, as a function that keeps fp32 has written them."""
    return F.reshape(F.cumsum(v, axis=0), shape, inplace=True)


def outcome(
    function: Callable[..., Any], arrays: Sequence[Array], needs: Sequence[bool], *, computed: int = -1
) -> Tuple[List[Array], List[Array]]:
    """Outputs of a function and the gradients of its inputs: in emulation, where the input `computed` is in
    fp32, else in the present context.
    """
    emulated = computed >= 0
    leaves = [leaf(array[None] if i == computed else array) for i, array in enumerate(arrays)]
    for v, need in zip(leaves, needs):
        v.need_grad = need
    read = [in_fp32(v, arrays[i].shape) if i == computed else v for i, v in enumerate(leaves)]
    made = function(*read)
    outputs = [*made] if isinstance(made, (list, tuple)) else [made]
    rng, terms = np.random.default_rng(0), []
    for y in outputs:
        y.persistent = True
        terms.append(F.sum(y * constant(1.0 + rng.integers(0, 8, y.shape) / 8.0)) * leaf(1.0))
    loss = F.add_n(*terms)
    run = FormatEmulation(loss) if emulated else loss
    run.forward()
    written = [y.d.copy() for y in outputs]
    try:
        run.backward()
    except (RuntimeError, SystemError):
        # It has no backward.
        return written, []
    return written, [v.g.ravel().copy() for v, need in zip(leaves, needs) if need]


def equal(found: Any, expected: Any) -> bool:
    """Whether outputs are equal to those that read them in half, and gradients."""
    pairs = zip(chain(*found), chain(*expected))
    return all(np.array_equal(half(a), half(b), equal_nan=True) for a, b in pairs)


def ignores_copies(function: Callable[..., Any], arrays: Sequence[Array], index: int) -> bool:
    """Whether a function has references of its own to what it reads."""
    inputs = [constant(array) for array in arrays]
    made = function(*inputs)
    y = made[0] if isinstance(made, (list, tuple)) else made
    y.forward()
    before = y.d.copy()
    inputs[index].data = nn.NdArray.from_numpy_array(arrays[index] - 1.0)
    y.forward()
    return np.array_equal(before, y.d)


def is_rounded(name: str, arrays: Sequence[Array], index: int) -> bool:
    """Whether an input is read in half precision: not what cuDNN computes in fp32, nor what is written."""
    row, inputs = properties_of(name), [nn.Variable(array.shape) for array in arrays]
    in_half = any(v is inputs[index] for v in row.in_half(inputs))
    return in_half and not (row.keeps_fp32 or row.own_references or index in row.writes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inputs_in_fp32_are_rounded_as_native_half_rounds_them(name: str) -> None:
    if name in ALIKE:
        assert properties_of(name) is properties_of(ALIKE[name])
        return
    assert name in CALLS, f"{name} has a row in the table of functions: add what makes it to CALLS"
    function, inputs = CALLS[name]
    rng, data = np.random.default_rng(0), [not isinstance(spec, np.ndarray) for spec in inputs]
    exact = [1.0 + rng.integers(0, 8, one) / 8.0 if is_data else one for one, is_data in zip(inputs, data)]
    exact = [np.float32(array - (name in ("ACos", "ASin", "ATanh"))) for array in exact]
    for i, is_data in enumerate(data):
        fine, stored = list(exact), list(exact)
        if is_data:
            fine[i] = exact[i] + 0.45 * np.spacing(exact[i].astype(np.float16)).astype(np.float32)
        stored[i] = half(fine[i])
        rounded = is_rounded(name, exact, i)
        for need in {False, is_data}:
            needs = [one and (need or other != i) for other, one in enumerate(data)]
            with nn.context_scope(HALF):
                casts = equal(outcome(function, fine, needs), outcome(function, stored, needs))
            with nn.context_scope(FLOAT):
                found = outcome(function, fine, needs, computed=i)
                if properties_of(name).keeps_fp32:
                    for y, expected in zip(found[0], outcome(function, fine, needs)[0]):
                        np.testing.assert_array_equal(y, expected)
                elif rounded and not ignores_copies(function, exact, i):
                    assert equal(found, outcome(function, stored, needs, computed=i)) == casts


KEEPERS = [name for name, row in FUNCTIONS.items() if row.keeps_fp32 and CALLS[name][1]]
VIEWS: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "none": lambda y: y,
    "in place": lambda y: F.reshape(y, (1, *y.shape), inplace=True),
    "twice in place": lambda y: F.reshape(F.reshape(y, (-1,), inplace=True), y.shape, inplace=True),
    "copied": lambda y: F.reshape(y, (-1,), inplace=False),
    "identity": F.identity,
    "transposed": lambda y: F.transpose(y, [*range(y.ndim)][::-1]),
    "cut off": F.unlink,
}


def kept(name: str) -> nn.Variable:
    """The output of a function that keeps fp32, for numbers that half precision does not hold."""
    function, inputs = CALLS[name]
    rng = np.random.default_rng(1)
    return function(
        *(constant(one) if isinstance(one, np.ndarray) else leaf(rng.random(one)) for one in inputs)
    )


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", KEEPERS)
def test_arrays_kept_in_fp32_are_read_in_half_through_any_view(name: str, view: str) -> None:
    y = kept(name)
    seen = VIEWS[view](y)
    read, also = seen * leaf(np.ones(seen.shape)), F.cumsum(seen, axis=0)
    for v in (y, seen, read, also):
        v.persistent = True
    FormatEmulation(F.sum(read) + F.sum(also)).forward()
    np.testing.assert_array_equal(read.d, half(seen.d))
    # Readers that compute in fp32 read what was written, unless a copy was stored between them.
    assert name == "Shape" or not is_half(y.d)
    stored = half(y.d) if view in ("copied", "identity", "transposed") else y.d
    np.testing.assert_array_equal(seen.d.ravel(), (stored.T if view == "transposed" else stored).ravel())
    np.testing.assert_array_equal(also.d, np.cumsum(seen.d, axis=0, dtype=np.float32))


@pytest.mark.parametrize("normalization", [F.batch_normalization, F.fused_batch_normalization])
def test_statistics_of_a_batch_are_read_in_half(normalization: Any) -> None:
    x = constant(np.random.default_rng(0).standard_normal((6, 3, 4, 4)))
    parameters = (constant(np.full(MAPS, value)) for value in (0.1, 1.1, 0.0, 1.0))
    outputs = normalization(x, *parameters, batch_stat=True, output_stat=True)
    read = [y * leaf(np.ones(y.shape)) for y in outputs]
    for v in (*outputs, *read):
        v.persistent = True
    FormatEmulation(F.add_n(*map(F.sum, read))).forward()
    assert [is_half(y.d) for y in outputs] == [True, False, False]
    for y, product in zip(outputs, read):
        np.testing.assert_array_equal(product.d, half(y.d))


def logarithm(context: nn.Context, *, emulated: bool) -> Tuple[Array, Array]:
    """What log(softmax) computes where half precision knows no number, and the gradient."""
    with nn.context_scope(context):
        x = leaf([[0.0, -3.0, -18.0]])
        y = F.log(F.softmax(x))
        y.persistent = True
        loss = F.sum(y[:, :2])
        run = FormatEmulation(loss) if emulated else loss
        run.forward()
        run.backward()
        return y.d.astype(np.float32), x.g.astype(np.float32)


def test_a_probability_below_half_precision_is_zero_for_a_logarithm() -> None:
    (native, gradient), (found, emulated) = logarithm(HALF, emulated=False), logarithm(FLOAT, emulated=True)
    assert native[0, 2] == found[0, 2] == -np.inf
    np.testing.assert_allclose(found[0, :2], native[0, :2], rtol=2.0**-9)
    np.testing.assert_allclose(emulated[0, :2], gradient[0, :2], rtol=2.0**-8)


def test_backward_reads_the_same_numbers_and_others_their_own() -> None:
    x, w = leaf([[0.0, 0.3, -0.7]]), leaf([[1.0, 2.0, 3.0]])
    p = F.softmax(x)
    p.persistent = True
    loss = FormatEmulation(F.sum(p * w))
    loss.forward()
    loss.backward()
    np.testing.assert_array_equal(w.g, half(p.d))
    # The backward of the softmax itself reads what it has written.
    exact = p.d * (w.d - np.sum(p.d * w.d))
    np.testing.assert_allclose(x.g, exact, rtol=2.0**-10)


@pytest.mark.parametrize("function", [F.relu, F.elu, F.add2])
def test_a_function_that_computes_in_place_reads_in_half(function: Any) -> None:
    def results(*, inplace: bool) -> List[Array]:
        x, w = leaf([[0.0, 0.3, -0.7]]), leaf([[1.0, 2.0, 3.0]])
        options = {"inplace": True} if inplace and function is not F.elu else {}
        more = [w] if function is F.add2 else []
        y = function(F.cumsum(x, axis=0), *more, **options)
        y.persistent = True
        loss = FormatEmulation(F.sum(y * w))
        for _ in range(2):
            x.grad.zero()
            w.grad.zero()
            loss.forward(clear_no_need_grad=True)
            loss.backward(clear_buffer=True)
        return [y.d.copy(), x.g.copy(), w.g.copy()]

    for found, expected in zip(results(inplace=True), results(inplace=False)):
        np.testing.assert_array_equal(found, expected)


def test_unlinked_arrays_are_not_leaves() -> None:
    x = leaf([[0.0, 0.3, -0.7]])
    p = F.softmax(x)
    p.persistent = True
    y = p.get_unlinked_variable(need_grad=False) * p
    y.persistent = True
    loss = FormatEmulation(F.sum(y))
    for shift in (0.0, 1.0):
        x.d = [[shift, 0.3, -0.7]]
        loss.forward()
        expected = np.exp(x.d) / np.exp(x.d).sum()
        np.testing.assert_allclose(p.d, expected, rtol=1e-6)
        np.testing.assert_array_equal(y.d, half(half(p.d) ** 2))


@pytest.mark.parametrize("function", [F.max, F.sort])
def test_indices_are_not_rounded(function: Any) -> None:
    """Functions write them as integers, in half precision as well."""
    x = leaf(np.arange(5000.0)[None])
    values, indices = function(x, axis=1, with_index=True)
    for v in (values, indices):
        v.persistent = True
    FormatEmulation(F.sum(values)).forward()
    indices.forward()
    assert indices.d.ravel()[-1] == 4999


def test_embeddings_are_looked_up_by_the_largest_number_of_many() -> None:
    scores, table = leaf(np.eye(1, 5000, 4999)), leaf(np.eye(5000, 1, -4999))
    index = F.max(scores, axis=1, with_index=True, only_index=True)
    found = F.embed(index, table)
    found.persistent = True
    FormatEmulation(F.sum(found)).forward()
    assert found.d == 1.0


def test_written_arrays_of_a_function_are_not_copies() -> None:
    mean, count = constant(np.zeros((3, 4, 4))), constant(np.zeros(1))
    FormatEmulation(F.sum(F.mean_subtraction(leaf(np.ones((2, 3, 4, 4))), mean, count))).forward()
    assert mean.d.any()
    assert count.d == 1
