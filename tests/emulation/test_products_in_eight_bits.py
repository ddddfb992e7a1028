# SPDX-License-Identifier: Apache-2.0
"""What matrix products read, what everybody else reads, and that all arrays come back."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Tuple

import ml_dtypes
import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, Format, FormatEmulation, Precision
from nnabla_adaloss.core.precision import FP8_HYBRID
from nnabla_adaloss.emulation.rounding_plan import operands_of
from nnabla_adaloss.graph.description import visited
from nnabla_adaloss.graph.functions import is_matrix_product
from tests.emulation.networks import arrays_of, half, is_half, masked_attention, variables_of
from tests.worlds.architectures import dense_block, embedding_with_tied_output
from tests.worlds.random_graphs import STEPS, build
from tests.worlds.values import constant, data

# A format of 16 bits' mantissa in which nothing here under- or overflows.
WIDE = Format.ieee("float19", exponent_bits=8, mantissa_bits=10)
# In matrix products alone it reads 8 bits.
HYBRID = {"forward": "float8_e4m3", "backward": "float8_e5m2", "saturate": True, "operands_only": True}
WIDE_HYBRID = Precision(**HYBRID, otherwise=WIDE)
FORMATS = {False: (ml_dtypes.float8_e4m3fn, 448.0), True: (ml_dtypes.float8_e5m2, 57344.0)}


def read(array: np.ndarray, *, gradient: bool = False) -> np.ndarray:
    """What a product reads of an array, in NumPy."""
    dtype, largest = FORMATS[gradient]
    abs_max = np.abs(array).max()
    scale = np.float32(2.0 ** np.floor(np.log2(largest / abs_max))) if abs_max else np.float32(1.0)
    return (array * scale).astype(dtype).astype(np.float32) / scale


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """What was there, and what a product reads in its place: attribute, before, after, is gradient."""
    found: List[Any] = []
    rounded = FormatEmulation._rounded

    def spy(self: FormatEmulation, operand: Any, source: Any, **options: Any) -> Any:
        before, copy = source.data.copy(), rounded(self, operand, source, **options)
        if operand.fitted:
            after = (copy or source).data.copy()
            found.append((operand.attribute, before, after, operand.holds_gradient))
        return copy

    monkeypatch.setattr(FormatEmulation, "_rounded", spy)
    return found


def parameter(*shape: int) -> nn.Variable:
    v = data(*shape)
    v.need_grad = True
    return v


def mlp() -> nn.Variable:
    h = F.tanh(F.affine(data(4, 3), parameter(3, 5), parameter(5)))
    return F.mean(F.affine(h, parameter(5, 2), parameter(2)) ** 2)


def recurrent() -> nn.Variable:
    x, w, u = data(2, 3, 4), parameter(4, 5), parameter(5, 5)
    h = F.constant(0.1, (2, 5))
    for t in range(3):
        h = F.tanh(F.affine(x[:, t], w) + F.affine(h, u))
    return F.mean(h**2)


GRAPHS: Dict[str, Callable[[], nn.Variable]] = {
    f.__name__: f for f in (mlp, dense_block, masked_attention, embedding_with_tied_output, recurrent)
}


def leaves_of(loss: nn.Variable) -> List[nn.Variable]:
    return [v for v in variables_of(loss).values() if v.parent is None and v.need_grad]


def gradients(scaled: Any, scale: float = 1.0, **options: Any) -> List[np.ndarray]:
    leaves = leaves_of(scaled.variable)
    for leaf in leaves:
        leaf.grad.zero()
    scaled.forward(clear_no_need_grad=True)
    scaled.backward(scale, clear_buffer=True, **options)
    return [leaf.g.copy() for leaf in leaves]


@pytest.mark.parametrize("name", GRAPHS)
def test_every_product_reads_rounded_operands(name: str, seen: List[Any]) -> None:
    loss = GRAPHS[name]()
    before = arrays_of(loss)
    emulation = FormatEmulation(loss, "fp8_hybrid")
    emulation.forward()
    forward = len(seen)
    products = [f for f in visited(loss)[0] if is_matrix_product(f.info.type_name)]
    assert forward == sum(len({hash(v) for v in f.inputs[:2]}) for f in products)
    emulation.backward(1.0)
    assert sum(attribute == "grad" for attribute, *_ in seen[forward:]) == len(products)
    for attribute, old, new, gradient in seen:
        assert gradient == (attribute == "grad")
        np.testing.assert_array_equal(new, read(old, gradient=gradient))
    assert arrays_of(loss) == before


def test_everybody_else_reads_half_precision() -> None:
    loss = mlp()
    hidden = loss.parent.inputs[0].parent.inputs[0].parent.inputs[0]
    emulation = FormatEmulation(loss, "fp8_hybrid")
    emulation.forward()
    emulation.backward(8.0)
    for values, gradient in ((hidden.d, False), (hidden.g, True)):
        assert is_half(values)
        assert not np.array_equal(values, read(values, gradient=gradient))
    weight = hidden.parent.inputs[0].parent.inputs[1]
    assert not is_half(weight.d)
    assert is_half(weight.g)


def test_results_of_a_product_whose_weight_has_changed() -> None:
    x, w, b = data(6, 8), parameter(8, 5), parameter(5)
    y = F.affine(x, w, b)
    emulation = FormatEmulation(F.sum(y), "fp8_hybrid")
    for _ in range(2):
        emulation.forward()
        np.testing.assert_array_equal(y.d, half(read(x.d) @ read(w.d) + half(b.d)))
        w.d = w.d * 3.0 + 1.0


def test_a_leaf_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = recurrent()
    emulation = FormatEmulation(loss, "fp8_hybrid")
    count: List[Any] = []
    round_operand = emulation.emulated_storage.round_operand

    def counted(source: Any, target: Any, operand: Any) -> Any:
        if not operand.holds_gradient:
            count.append(source.shape)
        return round_operand(source, target, operand)

    monkeypatch.setattr(emulation.emulated_storage, "round_operand", counted)
    for _ in range(2):
        count.clear()
        emulation.forward()
        emulation.backward(1.0)
        # Weights once; in backward again what flows into products whose weight needs a gradient.
        assert sorted(count) == sorted([(4, 5), (5, 5), *[(2, 4), (2, 5)] * 6])


def test_the_engines_scaled_weights_are_read_in_eight_bits(seen: List[Any]) -> None:
    loss = mlp()
    weight = leaves_of(loss)[2]
    assert weight.shape == (5, 2)
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=8.0)
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "fp8_hybrid"), config)
    # The first pass measures, weights among others, which must stay in range.
    for again in (False, True):
        scaling.forward()
        seen.clear()
        scaling.backward(1.0, iteration=0, rerun=again)
    scaled = [new for _, old, new, _ in seen if old.shape == (5, 2)]
    assert len(scaled) == 1
    np.testing.assert_array_equal(scaled[0], 8.0 * read(weight.d))


def check_no_bit_changes(
    loss: nn.Variable, scale: float, precision: Precision, seed: int = 3
) -> AdaptiveLossScaling:
    rng = np.random.default_rng(seed)

    def random_scale(g: np.ndarray, W: np.ndarray, *, config: AdaLossConfig, fan_in: float) -> float:
        return float(2.0 ** rng.integers(-6, 10))

    ones, scaling = (
        AdaptiveLossScaling(FormatEmulation(loss, precision), AdaLossConfig(method, use_bound=False))
        for method in ("fixed", random_scale)
    )
    # The first pass measures, with one scale for all.
    for again in (False, True):
        for one, other in zip(gradients(ones, scale, rerun=again), gradients(scaling, scale, rerun=again)):
            np.testing.assert_array_equal(one, other)
    assert set(ones.layer_scales.values()) <= {1.0}
    return scaling


@pytest.mark.parametrize("stochastic_seed", [None, 5])
@pytest.mark.parametrize("name", GRAPHS)
def test_layer_scales_change_no_bit(name: str, stochastic_seed: Any) -> None:
    precision = Precision(**HYBRID, otherwise=WIDE, stochastic_seed=stochastic_seed)
    scaling = check_no_bit_changes(GRAPHS[name](), 8.0, precision)
    assert set(scaling.layer_scales.values()) != {1.0}


@pytest.mark.slow
@pytest.mark.gate
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**31),
    st.lists(st.sampled_from(sorted(STEPS)), max_size=6),
    st.booleans(),
    st.integers(-8, 16),
)
def test_layer_scales_change_no_bit_of_random_graphs(
    seed: int, steps: List[str], input_gradient: bool, exponent: int
) -> None:
    loss = build(seed, steps, input_gradient=input_gradient).loss
    check_no_bit_changes(loss, 2.0**exponent, WIDE_HYBRID, seed)


def test_an_overflow_stays_to_be_seen() -> None:
    loss = mlp()
    emulation = FormatEmulation(loss, "fp8_hybrid")
    assert all(np.isfinite(g).all() for g in gradients(emulation, 64.0))
    assert not all(np.isfinite(g).all() for g in gradients(emulation, 1e9))
    scaling = AdaptiveLossScaling(emulation)
    assert not all(np.isfinite(g).all() for g in gradients(scaling, 1e9))
    assert scaling.found_inf


# ---- other products


ROWS, COLUMNS, IMAGES, KERNEL = (4, 6), (6, 3), (2, 2, 5, 5), (3, 2, 3, 3)
deformable = partial(F.deformable_convolution, pad=(1, 1))
# What computes it, the shapes of its inputs, those of more that are zero, and which inputs are its operands.
PRODUCTS: Dict[str, Tuple[Callable[..., nn.Variable], List[Any], List[Any], List[int]]] = {
    "Einsum": (partial(F.einsum, equation="ij,jk->ik"), [ROWS, COLUMNS], [], [0, 1]),
    "INQAffine": (partial(F.inq_affine, inq_iterations=(5,)), [ROWS, COLUMNS], [COLUMNS], [0]),
    "INQConvolution": (partial(F.inq_convolution, inq_iterations=(5,)), [IMAGES, KERNEL], [KERNEL], [0]),
    "BinaryConnectConvolution": (F.binary_connect_convolution, [IMAGES, KERNEL], [KERNEL], [0]),
    "BinaryConnectAffine": (F.binary_connect_affine, [ROWS, COLUMNS], [COLUMNS], [0]),
    "BinaryWeightAffine": (F.binary_weight_affine, [ROWS, COLUMNS], [COLUMNS, (3,)], [0]),
    "DepthwiseConvolution": (F.depthwise_convolution, [IMAGES, (2, 3, 3)], [], [0, 1]),
    "Deconvolution": (F.deconvolution, [IMAGES, (2, 3, 3, 3)], [], [0, 1]),
    "DeformableConvolution": (deformable, [IMAGES, KERNEL, (2, 18, 5, 5)], [], [0, 1]),
    "FusedConvolution": (F.fused_convolution, [IMAGES, KERNEL, (3,)], [], [0, 1]),
    "AdaptiveSeparableConvolution": (
        F.adaptive_separable_convolution,
        [IMAGES] + [(2, 3, 3, 3)] * 2,
        [],
        [0, 1, 2],
    ),
    "PatchCorrelation": (partial(F.patch_correlation, channel_last=True), [(1, 4, 4, 2)] * 2, [], [0, 1]),
    "BatchMatmul": (F.batch_matmul, [(2, 3, 3), (2, 3, 4)], [], [0, 1]),
}


@pytest.mark.parametrize("type_name", PRODUCTS)
def test_other_products(type_name: str, seen: List[Any]) -> None:
    function, inputs, more, expected = PRODUCTS[type_name]
    y = function(*(parameter(*shape) for shape in inputs), *(constant(np.zeros(shape)) for shape in more))
    f = next(f for f in visited(y)[0] if f.info.type_name == type_name)
    assert is_matrix_product(type_name)
    reads, backward_reads = operands_of(f, FP8_HYBRID)
    assert [o.variable for o in reads] == [f.inputs[i] for i in expected]
    assert [o.attribute for o in backward_reads].count("grad") == (type_name != "FusedConvolution")
    loss = F.mean(y**2)
    before = arrays_of(loss)
    alone = gradients(FormatEmulation(loss, WIDE_HYBRID))
    assert all(np.isfinite(g).all() for g in alone)
    # They do read what lies in the place of their arrays.
    exact = gradients(FormatEmulation(loss, WIDE))
    assert any(not np.array_equal(one, other) for one, other in zip(alone, exact))
    assert arrays_of(loss) == before
    for _, old, new, gradient in seen:
        np.testing.assert_array_equal(new, read(old, gradient=gradient))


def test_gradients_of_gradients() -> None:
    x, w = parameter(4, 3), parameter(3, 2)
    y = F.tanh(F.affine(x, w))
    (g,) = nn.grad([y], [x])
    loss = F.mean(g**2)
    data_grad = next(f for f in visited(loss)[0] if f.info.type_name == "AffineDataGrad")
    assert [o.holds_gradient for o in operands_of(data_grad, FP8_HYBRID)[0]] == [True, False]
    assert all(np.isfinite(g).all() for g in gradients(FormatEmulation(loss, "fp8_hybrid")))
