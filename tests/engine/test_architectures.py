# SPDX-License-Identifier: Apache-2.0
"""Networks as people build them: scales change no bit of their gradients."""

from __future__ import annotations

from typing import Any, List, Optional

import nnabla as nn
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater, FormatEmulation
from nnabla_adaloss.core.choose import Choice
from nnabla_adaloss.core.components import Components
from tests.worlds.architectures import NETWORKS, finite_gradients
from tests.worlds.values import FLOAT, HALF


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
    post = {"function_post_hook": lambda f: None} if hooked else {}
    found = finite_gradients(scaling, None, clear_buffer, **post)
    assert len(set(scaling.result.schedule.component_scales)) > 1
    assert hooked == (scaling.result.kind == "single functions are watched")
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint32), gradient.view(np.uint32), err_msg=name)


@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_under_emulated_half_precision_gradients_stay_close(network: str) -> None:
    nn.clear_parameters()
    loss = NETWORKS[network]()
    expected = finite_gradients(loss, 1.0, True)
    arrays = {name: v.data for name, v in nn.get_parameters().items()}
    scaling = AdaptiveLossScaling(FormatEmulation(loss), AdaLossConfig(delay=0))
    finite_gradients(scaling, 8.0, True, iteration=0)
    found = finite_gradients(scaling, 8.0, True, iteration=0, again=True)
    exact, rounded = (np.concatenate([g.ravel() for g in x.values()]) for x in (expected, found))
    assert np.linalg.norm(rounded - exact) < 0.02 * np.linalg.norm(exact)
    assert {name: v.data for name, v in nn.get_parameters().items()} == arrays


def first_gradients(network: str, context: nn.Context, weight: float, storage: Optional[str]) -> np.ndarray:
    nn.clear_parameters()
    nn.random.set_parameter_seed(313)
    nn.seed(0)
    with nn.context_scope(context):
        loss = NETWORKS[network]() * weight
    solver = S.Sgd(0.0)
    solver.set_parameters(nn.get_parameters())
    found: List[np.ndarray] = []

    def note(s: Any) -> None:
        found[:] = [v.g.astype(np.float64).ravel() / weight for v in s.get_parameters().values()]

    updater = AdaptiveLossScalingUpdater(solver, loss, storage=storage, on_gradients=note)
    assert updater.update().reason == "updated"
    return np.concatenate(found)


@pytest.mark.parametrize("weight", [1.0, 1e-9])
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_in_native_half_precision_gradients_stay_close(network: str, weight: float) -> None:
    exact = first_gradients(network, FLOAT, weight, "float32")
    native = first_gradients(network, HALF, weight, None)
    # The u-net's batch normalization takes its statistics in half on a CPU.
    assert np.linalg.norm(native - exact) < 0.02 * np.linalg.norm(exact)
