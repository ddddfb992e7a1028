# SPDX-License-Identifier: Apache-2.0
"""Networks as people build them: scales change no bit of their gradients."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from nnabla_adaloss.core.choose import Choice
from nnabla_adaloss.core.components import Components
from tests.worlds.architectures import NETWORKS, RNG, finite_gradients
from tests.worlds.passes import look, settle
from tests.worlds.trainings import updater_of
from tests.worlds.values import FLOAT, HALF, assert_equal, bits, data, gradients, zero_grads


@pytest.mark.parametrize("clear_buffer", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_no_scale_of_any_component_changes_a_bit(
    network: str, hooked: bool, clear_buffer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nn.clear_parameters()
    loss = NETWORKS[network]()
    expected = finite_gradients(loss, 1.0, clear_buffer)
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(dtype="float32"))
    finite_gradients(scaling, None, clear_buffer)
    rng = np.random.default_rng(len(network))

    def at_random(components: Components, *_: Any, **__: Any) -> Choice:
        return Choice([2.0**k for k in rng.integers(-6, 10, len(components.names)).tolist()], {})

    monkeypatch.setattr("nnabla_adaloss.engine.chooser.choose", at_random)
    post = {"function_post_hook": look} if hooked else {}
    found = finite_gradients(scaling, None, clear_buffer, **post)
    assert len(set(scaling.result.schedule.component_scales)) > 1
    assert hooked == (scaling.result.kind == "single functions are watched")
    assert_equal(*({name: bits(g) for name, g in one.items()} for one in (found, expected)))


def first_gradients(network: str, context: nn.Context, weight: float, storage: Optional[str]) -> np.ndarray:
    nn.clear_parameters()
    nn.random.set_parameter_seed(313)
    nn.seed(0)
    with nn.context_scope(context):
        loss = NETWORKS[network]() * weight
    found: List[np.ndarray] = []

    def note(s: Any) -> None:
        found[:] = [v.g.astype(np.float64).ravel() / weight for v in s.get_parameters().values()]

    updater = updater_of(loss, solver=S.Sgd(0.0), storage=storage, on_gradients=note)
    assert updater.update().reason == "updated"
    return np.concatenate(found)


@pytest.mark.parametrize("weight", [1.0, 1e-9])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_in_half_precision_gradients_stay_close(network: str, native: bool, weight: float) -> None:
    exact = first_gradients(network, FLOAT, weight, "float32")
    way = (HALF, weight, None) if native else (FLOAT, weight, "float16")
    # The u-net's batch normalization takes its statistics in half on a CPU.
    assert np.linalg.norm(first_gradients(network, *way) - exact) < 0.02 * np.linalg.norm(exact)


# Activations that backward computes again are not read before it.


def attention() -> nn.Variable:
    x = data(2, 4, 8)
    q, k, v = (PF.affine(x, 8, base_axis=2, name=name, rng=RNG(i)) for i, name in enumerate("qkv"))
    with nn.recompute():
        h = F.tanh(F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v))
    return F.mean(PF.affine(h, 3, base_axis=2, name="out", rng=RNG(9)) ** 2)


def normalized_weight() -> nn.Variable:
    h = F.tanh(PF.affine(data(4, 5), 6, name="first", rng=RNG(1)))
    with nn.recompute():
        h = F.tanh(PF.affine(h, 6, name="a", apply_w=normalized, rng=RNG(0)))
    return F.mean(PF.affine(h, 2, name="b", rng=RNG(3)) ** 2)


def normalized(w: nn.Variable) -> nn.Variable:
    return PF.weight_normalization(w, dim=1, name="wn")


def residual() -> nn.Variable:
    h = PF.convolution(data(2, 3, 6, 6), 4, (3, 3), name="stem", rng=RNG(0))
    for index in range(2):
        with nn.recompute():
            inner = F.relu(PF.batch_normalization(h, name=f"bn{index}"))
            h = h + PF.convolution(inner, 4, (3, 3), pad=(1, 1), name=f"conv{index}", rng=RNG(index + 1))
    return F.mean(PF.affine(F.relu(h), 2, name="last", rng=RNG(3)) ** 2)


RECOMPUTED: Dict[str, Callable[[], nn.Variable]] = {
    f.__name__: f for f in (attention, normalized_weight, residual)
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("method", ["amax_history", "approx_range", "abs_range", "fixed"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("network", RECOMPUTED)
def test_what_is_computed_again_has_the_gradients_of_nnablas_loop(
    network: str, half: bool, method: str, hooked: bool
) -> None:
    nn.clear_parameters()
    with nn.context_scope(HALF if half else FLOAT):
        loss = RECOMPUTED[network]()
    zero_grads()
    # In half the loss gradient fits; scales are powers of two, and nothing is subnormal.
    scale = np.float32(2.0**12 if half else 1.0)
    loss.forward(clear_no_need_grad=True)
    loss.backward(scale, clear_buffer=True)
    expected = {name: v.g.astype(np.float32) / scale for name, v in nn.get_parameters().items()}
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(method, fixed_loss_scale=4.0, use_bound=False))
    hooks = {"function_post_hook": look} if hooked else {}
    for iteration in range(3):
        settle(scaling, iteration, **hooks)
        if half:
            for name, gradient in gradients().items():
                close = 2e-2 * np.abs(expected[name]).max()
                assert np.abs(gradient - expected[name]).max() <= close, name
        else:
            assert_equal(gradients(), expected)
