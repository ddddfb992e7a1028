# SPDX-License-Identifier: Apache-2.0
"""Networks as people build them: scales change no bit of their gradients."""

from __future__ import annotations

from typing import Any, List, Optional

import nnabla as nn
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from nnabla_adaloss.core.choose import Choice
from nnabla_adaloss.core.components import Components
from tests.worlds.architectures import NETWORKS, finite_gradients
from tests.worlds.passes import look
from tests.worlds.trainings import updater_of
from tests.worlds.values import FLOAT, HALF, assert_equal, bits


@pytest.mark.parametrize(("hooked", "clear_buffer"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_no_scale_of_any_component_changes_a_bit(
    network: str, hooked: bool, clear_buffer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(("native", "weight"), [(False, 1e-9), (True, 1e-9), (True, 1.0)])
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_gradients_in_half_precision_stay_close(network: str, native: bool, weight: float) -> None:
    exact = first_gradients(network, FLOAT, weight, "float32")
    way = (HALF, weight, None) if native else (FLOAT, weight, "float16")
    # The u-net's batch normalization takes its statistics in half on a CPU.
    assert np.linalg.norm(first_gradients(network, *way) - exact) < 0.02 * np.linalg.norm(exact)
