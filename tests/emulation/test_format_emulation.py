# SPDX-License-Identifier: Apache-2.0
"""Emulated storage: what is rounded, what is kept, and that the user's arrays come back."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater
from numpy.typing import NDArray

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.emulation import format_emulation
from nnabla_adaloss.emulation.format_emulation import with_storage
from nnabla_adaloss.graph.description import visited
from tests.emulation.networks import arrays_of, is_half, leaf, masked_attention
from tests.worlds.interruptions import Moments
from tests.worlds.networks import layers
from tests.worlds.passes import run
from tests.worlds.values import FLOAT, HALF, assert_equal, constant, snapshot


def network() -> nn.Variable:
    h = PF.batch_normalization(layers(6, names="a", batch=4), name="bn")
    h = F.reshape(h, (4, 6), inplace=True)
    h = F.prelu(h, PF.get_parameter_or_create("slope", (1,), np.array([0.3])))
    return F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="b"), constant([[1]] * 4)))


def test_outputs_and_gradients_are_halves_and_masters_are_not_touched() -> None:
    variable = network()
    masters = snapshot(nn.get_parameters())
    for name, gradient in run(FormatEmulation(variable), 8.0).items():
        assert is_half(gradient) != name.startswith("bn/"), name
    assert not is_half(masters["a/affine/W"])
    assert_equal(snapshot(), masters)
    for f in visited(variable)[0]:
        stored = is_half(f.outputs[0].d), is_half(f.outputs[0].g)
        assert stored == ((False, True) if f.info.type_name == "SoftmaxCrossEntropy" else (True, True))


# Less one, what half precision drops of it is all that there is.
FINE = np.float32(1 + 2.0**-12)


def test_weights_of_one_shape_are_rounded_each_by_itself() -> None:
    x = constant(np.eye(2))
    weights = [leaf(np.full((2, 2), value)) for value in (FINE, 2.0 * FINE)]
    products = [F.affine(x, w) for w in weights]
    loss = FormatEmulation(F.sum(products[0] - 1.0) + F.sum(products[1] - 2.0))
    loss.forward()
    assert loss.variable.d == 0.0
    assert [np.unique(w.d).tolist() for w in weights] == [[FINE], [2 * FINE]]
    for v, value in zip((*weights, *products), (1.0, 2.0) * 2):
        known = loss.emulated_storage.data[hash(v)].statistics
        assert (known.count, known.abs_max) == (4, value)


def test_a_weight_that_is_also_read_in_fp32_is_rounded_for_those_that_read_it_in_half() -> None:
    w = leaf([[FINE, 1.0]])
    scaled, shares = w - 1.0, F.softmax(w)
    loss = FormatEmulation(F.sum(scaled) + F.sum(shares))
    loss.forward()
    assert not scaled.d.any()
    assert shares.d[0, 0] != shares.d[0, 1]
    assert w.d[0, 0] == FINE


def test_the_rounding_plan_follows_the_graph() -> None:
    w = constant([[[FINE]]])
    x = leaf(np.ones(1))
    product = F.batch_logdet(w) * x
    loss = FormatEmulation(F.sum(product))
    loss.forward()
    assert loss.variable.d > 0.0
    w.need_grad = True
    loss.forward()
    assert loss.variable.d == 0.0
    assert loss.emulated_storage.weights.keys() == {hash(w), hash(x)}
    product.rewire_on(x * 2.0)
    loss.backward()
    assert loss.emulated_storage.weights.keys() == {hash(x)}


_ACTIVATIONS = """
abs acos acosh asin asinh atan atanh celu cos cosh crelu elu erf exp gelu hard_sigmoid
hard_tanh leaky_relu log log_sigmoid mish relu relu6 selu sigmoid sin sinh softplus
softsign swish tan tanh
"""

# What nnabla's own half precision casts before it computes.
CASTS: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "x + 1": lambda x: x + 1.0,
    "1 - x": lambda x: 1.0 - x,
    "3 * x": lambda x: 3.0 * x,
    "2 / x": lambda x: 2.0 / x,
    "x ** 2": lambda x: x**2.0,
    "2 ** x": lambda x: 2.0**x,
    "maximum": lambda x: F.maximum_scalar(x, 0.5),
    "minimum": lambda x: F.minimum_scalar(x, 3.0),
    "atan2": lambda x: F.atan2(x, x * x),
    "in place": lambda x: F.relu(x, inplace=True),
    "batch normalization": lambda x: PF.batch_normalization(x, name="bn"),
    "fixed batch normalization": lambda x: PF.batch_normalization(x, batch_stat=False, name="bn"),
    "layer normalization": lambda x: F.layer_normalization(x, None, None),
    "instance normalization": lambda x: F.instance_normalization(x, None, None),
    "group normalization": lambda x: F.group_normalization(x, None, None, 2),
    **{name: getattr(F, name) for name in _ACTIVATIONS.split()},
}


@pytest.mark.parametrize("name", CASTS)
def test_data_are_read_as_stored_where_native_half_casts_them(name: str) -> None:
    function, rng = CASTS[name], np.random.default_rng(0)
    exact = 1.0 + rng.integers(1, 8, (4, 6, 2, 2)) / 8.0
    if name in ("acos", "asin", "atanh"):
        exact -= 1.0
    fine = exact * (1.0 + rng.integers(0, 2, exact.shape) * 2.0**-13)

    def computed(data: NDArray[Any], context: nn.Context, *, emulated: bool) -> NDArray[Any]:
        nn.clear_parameters()
        with nn.context_scope(context):
            x, w = nn.Variable(data.shape), leaf(np.ones(1))
            y = function(x)
            y.persistent = True
            loss = F.sum(y * F.reshape(w, (1,) * y.ndim))
            x.d = data
            (FormatEmulation(loss) if emulated else loss).forward()
        return np.array(y.d)

    for context, emulated in ((HALF, False), (FLOAT, True)):
        stored, given = (computed(data, context, emulated=emulated) for data in (exact, fine))
        np.testing.assert_array_equal(stored, given)


def test_backward_rounds_weights_itself_where_forward_did_not() -> None:
    w = leaf([FINE])
    x = leaf([2.0**12])
    product = w * x
    variable = F.sum(product)
    loss = FormatEmulation(variable)
    variable.forward()
    loss.backward()
    assert (x.g, w.g) == (1.0, 2.0**12)
    # The gradient of the loss is 1 unless a scale is given.
    loss.backward(4.0)
    assert (x.g, w.g) == (1.0 + 4.0, 5 * 2.0**12)


def test_a_loss_of_several_elements_starts_from_its_seed() -> None:
    x = leaf(np.ones(2))
    loss = FormatEmulation(x * 2.0)
    loss.forward()
    loss.backward(4.0, grad=np.array([1.0, 3.0]))
    assert x.g.tolist() == [8.0, 24.0]
    with pytest.raises(ValueError, match="loss has shape .2,., not one element"):
        loss.backward(4.0)


def test_a_function_that_a_hook_brings_into_the_graph_rounds_as_any_other() -> None:
    x = leaf([1.0, 2.0])
    inner = x * 2.0
    outer = F.sin(inner)
    loss = FormatEmulation(F.sum(outer + 1.0))
    loss.forward()
    seen: List[str] = []

    def rewire(f: Any) -> None:
        seen.append(f.info.type_name)
        if len(seen) == 1:
            outer.rewire_on(F.tan(inner))

    loss.backward(function_pre_hook=rewire)
    assert "Tan" in seen
    assert is_half(inner.g)
    np.testing.assert_allclose(inner.g, 1.0 + np.tan(inner.d) ** 2, rtol=1e-3)


def chain() -> Tuple[nn.Variable, nn.Variable, nn.Variable]:
    needed = leaf(np.ones(2)) * 2.0
    behind = F.sin(needed)
    return needed, behind, F.sum(behind + 1.0)


def test_buffers_are_freed_as_forward_and_backward_are_told_to() -> None:
    for options, freed in (
        ({}, (False, False)),
        ({"clear_buffer": True}, (True, True)),
        ({"clear_no_need_grad": True}, (False, True)),
    ):
        needed, behind, loss = chain()
        FormatEmulation(loss).forward(**options)
        assert (needed.data.clear_called, behind.data.clear_called) == freed
    for clear_buffer in (False, True):
        needed, behind, loss = chain()
        emulation = FormatEmulation(loss)
        emulation.forward()
        emulation.backward(clear_buffer=clear_buffer)
        assert needed.grad.clear_called is behind.data.clear_called is clear_buffer


def test_callbacks_of_a_communicator_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: List[Any] = []
    monkeypatch.setattr(format_emulation, "run_backward", lambda *arguments: seen.extend(arguments))
    loss, callbacks = FormatEmulation(chain()[-1]), object()
    loss.backward(communicator_callbacks=callbacks)
    assert seen[:5] == [loss.variable, 1.0, None, False, callbacks]


def test_storage_is_emulated_where_it_is_asked_for() -> None:
    variable = chain()[-1]
    assert with_storage(variable, None) is variable
    emulation = with_storage(variable, "bfloat16")
    assert isinstance(emulation, FormatEmulation)
    assert (emulation.variable, emulation.precisions.common.forward.name) == (variable, "bfloat16")
    with pytest.raises(TypeError, match="^storage emulates .* is a FormatEmulation: .* leave storage out$"):
        with_storage(emulation, "float16")


def test_labels_are_not_rounded() -> None:
    labels = np.array([[2049], [2051]])
    t = nn.Variable.from_numpy_array(labels)
    x = leaf(np.zeros((2, 3000)))
    loss = FormatEmulation(F.sum(F.softmax_cross_entropy(x, t)))
    loss.forward()
    loss.backward()
    np.testing.assert_array_equal(t.d, labels)
    np.testing.assert_array_equal(np.argmin(x.g, axis=1), labels[:, 0])


def test_a_leaf_is_never_rounded_through_an_alias() -> None:
    w = leaf([0.1, 0.2])
    y = F.reshape(w, (2, 1), inplace=True)
    FormatEmulation(F.sum(y)).forward()
    np.testing.assert_array_equal(w.d, np.array([0.1, 0.2], np.float32))


def test_gradient_rounding_counts_flushed_elements() -> None:
    x = leaf([1.0, 1.0, 1.0, 0.0])
    factors = constant([1e-5, 1e3, 1.0, 0.0])
    with pytest.raises(ValueError, match="needs no gradient"):
        FormatEmulation(F.sum(factors))
    loss = FormatEmulation(F.sum(x * factors * factors))
    assert loss.gradient_rounding(x) is None
    loss.forward()
    loss.backward(1.0)
    assert loss.gradient_rounding(x) == (4, 3, 1, 1)


def test_unknown_formats_wrong_losses_and_half_contexts_are_refused() -> None:
    variable = network()
    with pytest.raises(ValueError, match=r"storage.*float16"):
        FormatEmulation(variable, "float12")
    with pytest.raises(
        TypeError, match=r"a AdaptiveLossScaling: .*AdaptiveLossScaling\(FormatEmulation\(loss"
    ):
        FormatEmulation(AdaptiveLossScaling(variable))  # type: ignore[arg-type]
    with nn.context_scope(HALF):
        x = nn.Variable((2, 2), need_grad=True)
        loss = F.sum(x * x)
    for storage in ("float16", {"a": "float16"}):
        with pytest.raises(ValueError, match="cpu:half.* or leave storage out$"):
            FormatEmulation(loss, storage)
    with pytest.raises(ValueError, match="scale"):
        FormatEmulation(variable).backward(float("nan"))
    with pytest.raises(ValueError, match="grad"):
        FormatEmulation(variable).backward(1.0, grad=np.ones(3))


@pytest.mark.parametrize("wrap", [lambda loss: loss, AdaptiveLossScaling])
def test_a_scale_is_checked_however_much_it_is_like_the_one_before(wrap: Any) -> None:
    x = constant(np.ones((2, 3)))
    loss = wrap(FormatEmulation(F.mean(PF.affine(x, 2))))
    loss.forward()
    loss.backward(1.0)
    with pytest.raises(TypeError, match="scale=True"):
        loss.backward(True)
    with pytest.raises(TypeError, match="scale"):
        loss.backward(np.array([1.0, 2.0]))
    loss.backward(np.array(1.0))


def test_gradients_can_stay_in_fp32_behind_stored_weights() -> None:
    """What forward has stored is read as it was stored; gradients below the format are not lost."""
    x = constant(np.full((4, 3), 1e-9))
    w = leaf(np.full((4, 3), 3.0))
    y = leaf(np.ones((4, 3)))
    loss = F.mean(w * x) + F.mean(y * 1e-9)
    emulation = FormatEmulation(loss)
    emulation.forward()
    emulation.backward(0.0625)
    assert emulation.gradient_rounding(y) == (12, 12, 12, 0)
    emulation.backward(1.0, round_gradients=False)
    assert emulation.gradient_rounding(y) is None
    assert not w.g.any()
    np.testing.assert_allclose(y.g, 1e-9 / 12.0, rtol=1e-5)


def test_gradients_in_fp32_leave_no_rounded_copy_in_place_of_a_weight() -> None:
    """Also of one that is rounded for each function by itself, as another reads it in fp32."""
    w = leaf([[FINE, 1.0], [1.0, FINE]])
    h = leaf(np.ones((2, 2)))
    loss = F.mean(F.affine(F.affine(h, w), w) * F.softmax(w))
    emulation, before = FormatEmulation(loss), arrays_of(loss)
    emulation.forward()
    emulation.backward(round_gradients=False)
    assert arrays_of(loss) == before
    assert w.d[0, 0] == FINE


def test_nnablas_updater_ends_a_search_that_no_scale_can_end_with_an_error_that_says_so() -> None:
    loss = FormatEmulation(F.mean(PF.affine(constant([[np.nan]]), 2)))
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    updater = DynamicLossScalingUpdater(solver, loss, lambda: None, scaling_factor=2.0**10)
    expected = "^scale=.* not finite at any scale, .* `nnabla_adaloss.diagnose.updater.`, or train with"
    with pytest.raises(ValueError, match=expected):
        updater.update()
    assert 0.0 < updater.scale < 2.0**-126


# ---- interruptions


class Planned(Exception):
    pass


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("which", ["function_pre_hook", "function_post_hook"])
@pytest.mark.parametrize("storage", ["float16", "fp8_hybrid"])
def test_all_arrays_are_back_after_an_exception_in_a_hook(direction: str, which: str, storage: str) -> None:
    loss, seen = network(), []
    emulation = FormatEmulation(loss, storage)
    emulation.forward()
    before = arrays_of(loss)

    def hook(f: Any) -> None:
        seen.append(f.info.type_name)
        if f.info.type_name == "Affine":
            raise Planned

    with pytest.raises(Planned):
        getattr(emulation, direction)(**{which: hook})
    assert seen.count("Affine") == 1
    assert arrays_of(loss) == before


@pytest.mark.parametrize("storage", ["float16", "fp8_hybrid"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_interruption_at_any_moment_leaves_nothing_swapped(direction: str, storage: str) -> None:
    loss = masked_attention()
    emulation = FormatEmulation(loss, storage)
    emulation.forward()
    emulation.backward()
    before, moments = arrays_of(loss), Moments(0)
    moments.run(getattr(emulation, direction))
    assert moments.count > 300
    for stop in range(1, moments.count, 5):
        with pytest.raises(KeyboardInterrupt):
            Moments(stop).run(getattr(emulation, direction))
        assert arrays_of(loss) == before, stop
