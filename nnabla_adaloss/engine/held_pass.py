# SPDX-License-Identifier: Apache-2.0
"""A backward pass with scales that are known, which are applied around each function."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

from ..errors import GraphChangedError
from ..graph.node import Node
from ..kernels.measurements import Measurements
from .held_scales import HeldScales
from .layer_watch import LayerWatch
from .leaf_gradients import LeafGradients
from .pass_context import PassContext
from .replayed_pass import ReplayedPass
from .scaled_factors import ScaledFactors


class HeldPass(ReplayedPass):
    """Does around each function what a pass before did, where all steps at once cannot be, or somebody looks
    at single functions. Gradients are the same, bit for bit.

    Args:
        context: what the pass works with.
        held: the scales.
        measures: whether to take the statistics that the next choice of scales asks for.
        deferred: where parameter gradients are unscaled, if what comes of it is asked for at the end.
        unscale_each: unscale each gradient right after its function: somebody takes it there.

    Attributes:
        measures: whether it takes the statistics that the next choice of scales asks for.
        unfinished: the function that runs or ran last, if there is still something to do after it.
        watch: who is told of layers, right after each.
    """

    def __init__(
        self,
        context: PassContext,
        held: HeldScales,
        *,
        measures: bool = False,
        deferred: Optional[Measurements] = None,
        unscale_each: bool = False,
    ) -> None:
        super().__init__(context, held)
        self._steps = {self.plan.function_keys[number]: step for number, step in held.steps.items()}
        self.measures = measures
        self.unfinished: List[Node] = []
        self.watch: Optional[LayerWatch] = None
        self._factors = ScaledFactors(context.kernels, context.pool, context.storage)
        self._leaves = LeafGradients(
            context.kernels,
            context.pool,
            rounded=context.storage is not None,
            deferred=deferred,
            unscale_each=unscale_each,
        )

    def passes_on(self) -> Callable[[Any], bool]:
        """What tells whether nothing is to be done around a function."""
        steps, nodes = self._steps, self.nodes

        def passed_on(f: Any) -> bool:
            key = hash(f)
            return key not in steps and key in nodes

        return passed_on

    def prepare(self, f: Any) -> None:
        """Do what is to be done before the function `f` runs.

        Raises:
            GraphChangedError: it is not in the plan.
        """
        node = self.nodes.get(hash(f))
        if node is None:
            raise GraphChangedError(
                f"{f.info.type_name} is not where it was when the loss was wrapped: the graph was rewired. "
                "These gradients are not valid; the next backward will be"
            )
        step = self._steps.get(node.function_key)
        if step is None:
            return
        self.unfinished[:] = [node]
        self.bring(step.before)
        if self.measures and node.scalings:
            self._measure(node, step.scale)
        for index, (scaling, alpha) in enumerate(zip(node.scalings, step.alphas)):
            if self.watch is not None:
                self.watch.held(scaling, step.scale, alpha)
            if alpha != 1.0:
                self._factors.swap(scaling, alpha, index)
        if node.leaves:
            self._leaves.take(node, step.scale, step.targets(node))

    def finish_last(self) -> None:
        """Do what is to be done after the function that ran last, if that is still to be done."""
        if self.unfinished:
            node = self.unfinished[0]
            self._factors.restore()
            if self.watch is not None:
                self.watch.ran(node)
            self.bring(self._steps[node.function_key].after)
            if node.leaves:
                self._leaves.give_back()
            self.unfinished.clear()

    def restore(self) -> None:
        """Put every swapped array back; harmless when none is swapped."""
        self._factors.restore()
        self._leaves.restore()

    def finish(self) -> None:
        """End the pass: unscale what is left, and collect the layers that were not finite."""
        self._leaves.finish()
        found = self.statistics.finish()
        self.state_finite = found.watched_finite
        written, largest = self._leaves.results(found.largest)
        self._conclude([entry.key for entry in written], largest)

    def _measure(self, node: Node, scale: float) -> None:
        for v, key in zip(node.outputs, node.output_keys):
            if key in self.scales:
                self.statistics.gradient(v, key, scale)
        for scaling in node.scalings:
            self.statistics.data(scaling.factor, scaling.factor_key)
