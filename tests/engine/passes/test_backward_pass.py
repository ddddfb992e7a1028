# SPDX-License-Identifier: Apache-2.0
"""Exceptions in a pass: arrays are put back, and the original comes out. Gradients that a pass finds."""

from __future__ import annotations

from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from nnabla_adaloss.engine.passes.backward_pass import leaf_arrays
from nnabla_adaloss.engine.passes.hooked import HookedPass
from nnabla_adaloss.engine.passes.hookless import HooklessPass
from tests.engine.settled import settle

pytestmark = pytest.mark.any_context


def clipping() -> nn.Variable:
    """Around what clips, gradients are multiplied between two functions."""
    x = nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32))
    h = PF.affine(x, 5, name="first")
    for name in ("inner", "outer"):
        h = PF.affine(F.clip_grad_by_value(F.tanh(h), *clip_range(h)), 5, name=name)
    return F.mean(h**2)


def clip_range(h: nn.Variable) -> List[nn.Variable]:
    return [F.constant(value, h.shape) for value in (-1e-3, 1e-3)]


def gradients() -> Dict[str, np.ndarray]:
    return {name: v.g.copy() for name, v in nn.get_parameters().items()}


def run(scaling: Any, *args: Any, **options: Any) -> Dict[str, np.ndarray]:
    for v in nn.get_parameters().values():
        v.grad.zero()
    scaling.forward()
    scaling.backward(*args, **options)
    return gradients()


@pytest.mark.parametrize("pass_type", [HooklessPass, HookedPass])
def test_after_an_exception_arrays_are_put_back_and_nothing_more_is_done(
    pass_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = clipping()
    hook = None if pass_type is HooklessPass else lambda f: None
    config = AdaLossConfig("fixed", fixed_loss_scale=4.0, use_bound=False)
    scaling = AdaptiveLossScaling(loss, config)
    for iteration in range(2):
        settle(scaling, iteration, 8.0, clear=False, function_post_hook=hook)
    expected = run(scaling, 8.0, function_post_hook=hook)
    assert (scaling.result.kind == "hookless") == (pass_type is HooklessPass)
    parameters = nn.get_parameters()
    arrays = {name: (v.data, v.grad) for name, v in parameters.items()}
    calls: List[str] = []
    restore = pass_type.restore

    def interrupted(running: Any, rescales: Any) -> None:
        if rescales:
            calls.append("rescale")
            raise KeyboardInterrupt

    def put_back(running: Any) -> None:
        restore(running)
        # At once: nnabla runs the functions that are left.
        assert all(v.data == arrays[name][0] for name, v in parameters.items())
        calls.append("restore")

    with monkeypatch.context() as patched:
        patched.setattr(pass_type, "rescale", interrupted)
        patched.setattr(pass_type, "restore", put_back)
        # What is to be done when backward has run is not done when it was interrupted.
        patched.setattr(pass_type, "end", lambda running: calls.append("end"))
        with pytest.raises(KeyboardInterrupt):
            run(scaling, 8.0, function_post_hook=hook)
    # By the guard, and once more when nnabla has returned.
    assert calls == ["rescale", "restore", "restore"]
    assert {name: (v.data, v.grad) for name, v in parameters.items()} == arrays
    for name, found in run(scaling, 8.0, function_post_hook=hook).items():
        np.testing.assert_array_equal(found, expected[name], err_msg=name)


def zeroed_leaves(count: int) -> List[nn.Variable]:
    found = [nn.Variable((2,), need_grad=True) for _ in range(count)]
    for v in found:
        v.grad.zero()
    return found


def test_leaf_arrays_come_in_the_order_of_the_leaves() -> None:
    some = zeroed_leaves(3)
    assert leaf_arrays(some)[0] == [v.grad for v in some]


def test_leaf_arrays_tell_whether_all_are_lazily_zero() -> None:
    some = zeroed_leaves(3)
    assert leaf_arrays(some)[1]
    some[1].grad.data = np.zeros(2, np.float32)  # zeros, but not lazily
    assert not leaf_arrays(some)[1]
    assert leaf_arrays([])[1]
