# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import subprocess
import sys

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig
from nnabla_adaloss.functions import (
    ScaleTracker,
    adaptive_loss_scaling,
    branch,
    cast_loss_scaling,
    loss_scaling,
    unscale,
)
from tests.functions.graphs import gradients, variable


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"^config must be an AdaLossConfig"):
        ScaleTracker({"n_uf_threshold": 0.1})
    with pytest.raises(ValueError, match=r"^config\.delay is 1"):
        ScaleTracker(AdaLossConfig(delay=1))
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"^scale="):
            ScaleTracker(scale=wrong)
    tracker = ScaleTracker()
    with pytest.raises(TypeError, match=r"^scale="):
        tracker.scale = None
    assert tracker.scale == 8.0


def test_knows_nothing_before_the_first_backward() -> None:
    tracker = ScaleTracker()
    assert (tracker.layer_scales, tracker.accumulated_scales, tracker.found_inf) == ({}, {}, False)


def test_init_scale_is_part_of_the_start() -> None:
    tracker = ScaleTracker(AdaLossConfig(init_scale=4.0), scale=2.0)
    w = variable([3.0])
    v = unscale(w, tracker)
    loss = loss_scaling(F.sum(v), tracker)
    loss.forward()
    np.testing.assert_array_equal(gradients([w], loss.backward)[0], [1.0])
    assert v.g[0] == 8.0


def test_a_graph_built_anew_in_each_iteration_leaves_nothing_behind() -> None:
    tracker = ScaleTracker()
    w = variable(np.eye(4))
    x = variable(np.ones((2, 4)), need_grad=False)
    found = []
    for i in range(5):
        v = unscale(w, tracker)
        y = F.tanh(adaptive_loss_scaling(F.affine(F.tanh(F.affine(x, unscale(w, tracker))), v), v, tracker))
        a, b = branch(y, 2, tracker)
        loss = loss_scaling(F.sum(a + float(i) * cast_loss_scaling(b, tracker)), tracker)
        loss.forward()
        (g,) = gradients([w], loss.backward)
        found.append(g)
        np.testing.assert_allclose(g, (1 + i) * found[0], rtol=1e-5)
        del v, y, a, b, loss
        gc.collect()
        assert len(tracker._functions) == 0


def test_two_trackers_do_not_know_of_each_other() -> None:
    trackers = [ScaleTracker(scale=2.0), ScaleTracker(scale=32.0)]
    w = variable([3.0])
    losses = [loss_scaling(F.sum(unscale(w, t) * 5.0), t) for t in trackers]
    for loss in losses:
        loss.forward()
    both = gradients([w], lambda: [loss.backward() for loss in losses])
    np.testing.assert_array_equal(both[0], [10.0])
    with pytest.raises(ValueError, match="Unscale"):
        loss_scaling(F.sum(unscale(w, 2.0)), trackers[0])


@pytest.mark.parametrize("module", ["functions", "engine", "emulation", "kernels", "graph.plan"])
@pytest.mark.slow
def test_packages_can_be_imported_in_any_order(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import nnabla_adaloss.{module}"], check=True)


def test_auto_forward_with_a_whole_graph() -> None:
    tracker = ScaleTracker()
    w = variable([3.0])
    with nn.auto_forward():
        v = unscale(w, tracker)
        loss = loss_scaling(F.sum(v * v), tracker)
        assert float(loss.d) == 9.0
    np.testing.assert_array_equal(gradients([w], loss.backward)[0], [6.0])
