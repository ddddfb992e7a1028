# SPDX-License-Identifier: Apache-2.0
"""A backward pass with hooks around nnabla's functions: for what cannot be done before and after them all."""

from __future__ import annotations

from typing import AbstractSet, Any, List, Tuple

from ...core.schedule import Rescale, ScaleSchedule
from ...errors import GraphChangedError
from ...graph.node import Node
from ..leaf_gradients import LeafGradients, contributions_of
from ..prepared_graph import PreparedGraph
from ..report import PassReport
from ..scaled_weights import ScaledWeights
from .backward_pass import BackwardPass, Hooks, PassRequest


class HookedPass(BackwardPass):
    """Applies the steps of a schedule around each function; `kind` says why."""

    def __init__(
        self, prepared: PreparedGraph, request: PassRequest, schedule: ScaleSchedule, kind: str
    ) -> None:
        super().__init__(prepared, request, schedule)
        self.kind = kind
        self._nodes, self._steps = self.plan.nodes, schedule.steps
        self._measured: AbstractSet[int] = frozenset(() if self._share is None else self._share.gradients)
        if request.measure_all:
            wanted = self.statistics.wanted
            self._measured = self.plan.structure.limiting_gradients | wanted.gradients | wanted.watched
        # The function that runs or ran last, if there is still something to do after it.
        self._unfinished: List[Tuple[Node, Tuple[Rescale, ...]]] = []
        self._weights = ScaledWeights(prepared.kernels, prepared.pool, prepared.storage)
        self._leaves = LeafGradients(
            prepared.kernels,
            prepared.pool,
            prepared.measurements,
            rounded=prepared.storage.rounds,
            unscale_each=request.hooks.take_gradients,
        )

    def begin(self) -> Tuple[Hooks, Hooks]:
        if self._request.measure_all:
            self.statistics.measure((), sorted(self.statistics.wanted.data))
        elif self._share is not None:
            self.statistics.measure((), [*self._share.activations, *self._share.weights])
        hooks = self._request.hooks
        # nnabla computes activations again before it calls a hook: weights must be put back by then.
        if hooks.take_gradients or self._request.watch is not None or self.plan.recomputes:
            return (self._prepare, hooks.pre_hook), (self._finish_last, hooks.post_hook)
        # A call of a hook costs: what is to be done after a function is done before the next, or by `end`.
        return (self._finish_last, self._prepare, hooks.pre_hook), ()

    def end(self) -> None:
        self._finish_last()

    def restore(self) -> None:
        self._weights.restore()
        self._leaves.restore()

    def finish(self) -> PassReport:
        return self._report_of(self._leaves)

    def _prepare(self, f: Any) -> None:
        node = self._nodes.get(hash(f))
        if node is None:
            raise GraphChangedError.at(f.info.type_name)
        if self._measured:
            # As it arrives: what it is multiplied by for this function may be too much.
            arriving = self._schedule.arriving
            arrived = [(p, arriving[p]) for p in node.structure.outputs if p in self._measured]
            if arrived:
                self.statistics.measure(arrived, ())
        step = self._steps.get(node.number)
        if step is None:
            return
        self.rescale(step.before)
        if self._request.look is not None and node.scalings:
            self._request.look(node, step.scale)
        self._unfinished[:] = [(node, step.after)]
        for index, (scaling, alpha) in enumerate(zip(node.scalings, step.alphas)):
            if alpha != 1.0:
                self._weights.swap(scaling, alpha, index)
        self._leaves.take(*contributions_of(self.plan.structure, node, step))

    def _finish_last(self, _: Any = None) -> None:
        if not self._unfinished:
            return
        node, after = self._unfinished.pop()
        self._weights.restore()
        if self._request.watch is not None:
            self._request.watch.ran(node)
        self.rescale(after)
        if node.leaves:
            self._leaves.give_back()
