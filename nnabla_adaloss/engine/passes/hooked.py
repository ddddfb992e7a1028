# SPDX-License-Identifier: Apache-2.0
"""Backward pass with hooks around nnabla's functions."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn

from ...core.components import NodeStructure
from ...core.schedule import Rescale
from ...errors import GraphChangedError
from ...graph.description import type_name_of
from ...graph.hooks import Hook
from ...graph.loss import Seed
from ..chooser import Decision
from ..layer_watch import LayerWatch
from ..leaf_gradients import LeafGradients, WrittenLeaves, contributions_of
from ..prepared_graph import PreparedGraph
from ..scaled_weights import ScaledWeights, SwappedWeights

Hooks = Sequence[Optional[Hook]]
"""Hooks to call in order; None is skipped."""


class PassInputs(NamedTuple):
    """Arguments of a call of `backward`, besides its scale, and the gradients that it adds to."""

    clear_buffer: bool
    callbacks: Optional[Any] = None  # nnabla's communicator callbacks
    pre_hook: Optional[Hook] = None
    post_hook: Optional[Hook] = None
    grad: Optional[Seed] = None  # seed gradient of the loss's shape; None for one
    masters: Sequence[nn.NdArray] = ()  # unscaled fp32 gradients of the leaves, in the order of the plan
    all_zero: bool = False  # True if these are all zero, lazily: nnabla has yet to write the zeros


class HookedPass:
    """Applies the steps of a schedule around each function."""

    def __init__(
        self, prepared: PreparedGraph, decision: Decision, inputs: PassInputs, watch: Optional[LayerWatch]
    ) -> None:
        self._prepared, self._decision, self._inputs, self._watch = prepared, decision, inputs, watch
        # Gradients to measure as they arrive.
        self._measured = frozenset(() if decision.slice is None else decision.slice.gradients)
        # The running function, with the rescales after it; None for a function without a step.
        self._running: Optional[Tuple[NodeStructure, Tuple[Rescale, ...]]] = None
        self._weights = ScaledWeights(prepared)
        # Callbacks (such as all-reduce) and hooks of the user read gradients right after their function.
        unscale_each = inputs.callbacks is not None or inputs.post_hook is not None
        self._leaves = LeafGradients(prepared, unscale_each=unscale_each)

    def begin(self) -> Tuple[Hooks, Hooks]:
        """Measure data before backward frees them; return the hooks before and after functions."""
        measured = self._decision.slice
        if measured is not None:
            self._prepared.statistics.measure((), [*measured.activations, *measured.weights])
        # Hooks of the user come last: after a function they read what `_finish` has restored and unscaled.
        return (self._prepare, self._inputs.pre_hook), (self._finish, self._inputs.post_hook)

    def end(self) -> WrittenLeaves:
        """Unscale gradients of leaves, and return them."""
        return WrittenLeaves(self._leaves.finish(), self._decision.schedule.components)

    def restore(self) -> None:
        """Restore all swapped arrays of a pass that is given up, and unscale its gradients."""
        self._weights.restore()
        self._leaves.restore()

    def _prepare(self, f: Any) -> None:
        """Measure and rescale gradients, and swap weights and gradients of leaves, before a function runs."""
        graph, plan, schedule = self._prepared.graph, self._prepared.plan, self._decision.schedule
        node = plan.by_number.get(graph.numbers.get(hash(f), -1))
        if node is None:
            # The function was not there when the graph was read.
            raise GraphChangedError(
                f"{type_name_of(f.info.type_name)} is not where it was when the loss was wrapped: the graph "
                "was rewired. These gradients are not valid; the next backward will be"
            )
        # Gradients are measured before rescaling: multiplied, they may be infinite, and their size unknown.
        arrived = [(p, schedule.arriving_scales[p]) for p in node.outputs if p in self._measured]
        self._prepared.statistics.measure(arrived, ())
        step = schedule.steps.get(node.number)
        if step is None:
            return
        self._prepared.rescale(step.before)
        if self._decision.copier is not None and node.layer_inputs:
            self._decision.copier(graph, node, step.scale)
        self._running = node, step.after
        scaled = [(one, alpha) for one, alpha in zip(node.layer_inputs, step.alphas) if alpha != 1.0]
        if scaled:
            self._weights.swap(SwappedWeights(graph, scaled))
        self._leaves.take(*contributions_of(self._prepared, node, step))

    def _finish(self, _: Any) -> None:
        """Restore the arrays of a function that has run, and rescale gradients."""
        if self._running is None:
            return
        (node, after), self._running = self._running, None
        self._weights.restore()
        if self._watch is not None:
            self._watch.report(node)
        self._prepared.rescale(after)
        if node.leaves:
            self._leaves.give_back()
