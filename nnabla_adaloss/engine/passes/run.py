# SPDX-License-Identifier: Apache-2.0
"""A backward pass from its first function to the end, and what becomes of exceptions on the way."""

from __future__ import annotations

from itertools import compress
from operator import attrgetter
from typing import Iterable, Optional, Tuple, Union

import nnabla as nn

from ...graph.hooks import HookGuard, root_cause
from ...graph.loss_like import LossLike, run_backward
from ...graph.loss_seed import LossSeed, Seed
from ...graph.plan import GraphPlan
from ...kernels.arrays import stored_dtype
from .hooked import HookedPass, UserHooks
from .hookless import HooklessPass

AnyPass = Union[HookedPass, HooklessPass]

_persistent = attrgetter("persistent")


def run_pass(
    loss: LossLike,
    running: AnyPass,
    grad: Optional[Seed],
    clear_buffer: bool,
    hooks: UserHooks,
    seed: LossSeed,
) -> None:
    """Run the backward of `loss`, with the steps of a pass around each function or around all of it.

    Whatever was swapped is put back, also when something raises: nnabla does not stop backward when a hook
    does, so that arrays are put back at once, and later hooks do nothing.

    Args:
        loss: the loss, or what wraps it.
        running: the steps.
        grad: seed gradient of the loss's shape; None for one.
        clear_buffer: free what backward no longer needs.
        hooks: the user's own.
        seed: makes the gradient that backward starts from.
    """
    error: Optional[BaseException] = None
    guard = HookGuard(running.restore)
    try:
        pre, post = running.begin(guard)
        run_backward(loss, running.seed, grad, clear_buffer, hooks.callbacks, pre, post, seed)
        if guard.error is None:
            running.end()
    except BaseException as raised:
        error = root_cause(raised)
    finally:
        running.restore()
    # What a hook raised comes first: nnabla hides it behind an error of its own.
    error = guard.error or error
    if error is not None:
        running.statistics.finish()
        raise error
    running.finish()


def unscale_visible(running: AnyPass, clear_buffer: bool) -> None:
    """Unscale gradients that stay readable after a pass."""
    plan = running.plan
    pairs = _readable(plan) if clear_buffer else zip(plan.variables, plan.structure.gradients)
    for variable, position in pairs:
        scale = running.scales.get(position, 1.0)
        if scale == 1.0:
            continue
        array = variable.grad
        if not array.clear_called and stored_dtype(array) is not None:
            running.kernels.scale_(array, 1.0 / scale)


def _readable(plan: GraphPlan) -> Iterable[Tuple[nn.Variable, int]]:
    """The variables whose gradients stay when buffers are cleared, with their positions."""
    pairs = zip(plan.variables, plan.structure.gradients)
    if plan.structure.kept_gradients:
        return [(v, p) for v, p in pairs if v.persistent or p in plan.structure.kept_gradients]
    return compress(pairs, map(_persistent, plan.variables))
