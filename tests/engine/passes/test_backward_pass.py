# SPDX-License-Identifier: Apache-2.0
"""Exceptions in a pass: arrays are put back, and the original comes out."""

from __future__ import annotations

from typing import Any, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from nnabla_adaloss.engine.passes.hooked import HookedPass
from nnabla_adaloss.engine.passes.hookless import HooklessPass
from tests.worlds.passes import run, settle
from tests.worlds.values import assert_equal, data

pytestmark = pytest.mark.any_context


def clipping() -> nn.Variable:
    """Around what clips, gradients are multiplied between two functions."""
    h = PF.affine(data(4, 5), 5, name="first")
    for name in ("inner", "outer"):
        h = PF.affine(F.clip_grad_by_value(F.tanh(h), *clip_range(h)), 5, name=name)
    return F.mean(h**2)


def clip_range(h: nn.Variable) -> List[nn.Variable]:
    return [F.constant(value, h.shape) for value in (-1e-3, 1e-3)]


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
    assert_equal(run(scaling, 8.0, function_post_hook=hook), expected)
