# SPDX-License-Identifier: Apache-2.0
"""A backward pass from its first function to the end, and what becomes of exceptions on the way."""

from __future__ import annotations

from itertools import compress
from operator import attrgetter
from typing import Iterable, Optional, Tuple, Union

import nnabla as nn

from ..graph.hooks import Hook, root_cause
from ..graph.loss_like import LossLike, run_backward
from ..graph.loss_seed import LossSeed, Seed
from ..graph.plan import GraphPlan
from ..kernels.arrays import stored_dtype
from .backward_pass import BackwardPass
from .held_pass import HeldPass
from .onlookers import Onlookers
from .pass_hooks import HookAfter, PassHooks
from .planned_pass import PlannedPass

AnyPass = Union[BackwardPass, HeldPass, PlannedPass]

_persistent = attrgetter("persistent")


def run_pass(
    loss: LossLike,
    running: AnyPass,
    grad: Optional[Seed],
    clear_buffer: bool,
    onlookers: Onlookers,
    seed: LossSeed,
) -> None:
    """Run the backward of `loss`, with the steps of a pass around each function or around all of it.

    Whatever was swapped is put back, also when something raises.

    Args:
        loss: the loss, or what wraps it.
        running: the steps.
        grad: seed gradient of the loss's shape; None for one.
        clear_buffer: free what backward no longer needs.
        onlookers: who is called besides.
        seed: makes the gradient that backward starts from.
    """
    error: Optional[BaseException] = None
    hooks: Union[PassHooks, HookAfter, None] = None
    pair: Tuple[Optional[Hook], Optional[Hook]] = None, None
    try:
        if not isinstance(running, PlannedPass):
            hooks = PassHooks(running, onlookers.pre_hook, onlookers.post_hook)
            looked_at = onlookers.callbacks is not None or running.watch is not None
            # nnabla computes activations again before it calls a hook: weights must be put back by then.
            pair = hooks.pair(looked_at=looked_at or running.plan.recomputes)
        else:
            running.begin()
            between = running.between
            if between:
                hooks = HookAfter(running, between)
                pair = None, hooks
        run_backward(loss, running.seed, grad, clear_buffer, onlookers.callbacks, *pair, seed)
        running.finish_last()
    except BaseException as raised:
        error = root_cause(raised)
    finally:
        running.restore()
    # What a hook raised comes first: nnabla hides it behind an error of its own.
    error = error if hooks is None else hooks.error or error
    if error is not None:
        running.statistics.finish()
        raise error
    running.finish()


def unscale_visible(running: AnyPass, clear_buffer: bool) -> None:
    """Unscale gradients that stay readable after a pass."""
    plan = running.plan
    for variable, key in _readable(plan) if clear_buffer else zip(plan.variables, plan.variable_keys):
        scale = running.scales.get(key, 1.0)
        if scale == 1.0:
            continue
        array = variable.grad
        if not array.clear_called and stored_dtype(array) is not None:
            running.kernels.scale_(array, 1.0 / scale)


def _readable(plan: GraphPlan) -> Iterable[Tuple[nn.Variable, int]]:
    """The variables whose gradients stay when buffers are cleared, with their keys."""
    pairs = zip(plan.variables, plan.variable_keys)
    if plan.kept_keys:
        return [(v, key) for v, key in pairs if v.persistent or key in plan.kept_keys]
    return compress(pairs, map(_persistent, plan.variables))
