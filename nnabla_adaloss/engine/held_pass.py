# SPDX-License-Identifier: Apache-2.0
"""A backward pass with scales that are known: measured some iterations ago, and held since."""

from __future__ import annotations

import math
from typing import Any, Callable, List, Mapping, Optional, Sequence, Set

from ..errors import GraphChangedError
from ..graph.node import Node
from ..kernels.arrays import stored_dtype
from ..kernels.measurements import Measurements
from .held_scales import Brought, HeldScales
from .layer_watch import LayerWatch
from .leaf_gradients import LeafGradients
from .pass_context import PassContext
from .planned_steps import PlannedSteps
from .scaled_factors import ScaledFactors


class HeldPass:
    """Does what a pass before did, and looks at nothing but the gradients of parameters.

    Where that is possible everything is done before and after nnabla's own backward, and nothing between two
    functions; else around each function. Gradients are the same, bit for bit.

    Args:
        context: what the pass works with.
        held: the scales.
        planned: the steps, where they can be taken at once; None: around each function.
        measures: whether to take the statistics that the next choice of scales asks for.
        deferred: where parameter gradients are unscaled, if what comes of it is asked for at the end.
        unscale_each: unscale each gradient right after its function: somebody takes it there.
    """

    def __init__(
        self,
        context: PassContext,
        held: HeldScales,
        planned: Optional[PlannedSteps],
        *,
        measures: bool = False,
        deferred: Optional[Measurements] = None,
        unscale_each: bool = False,
    ) -> None:
        self.plan, self.kernels, pool, self.statistics, self._storage, _ = context
        self._held, self._planned, self._measures = held, planned, measures
        self.components = held.components
        self.seed = held.seed if planned is None else planned.seed
        self.loss_scale = held.loss_scale
        self.measures_loss = held.given is None
        self.scales: Mapping[int, float] = held.scales if planned is None else planned.scales
        self.found_inf: List[str] = []
        self.nonzero: Set[int] = set()
        # Whether what forward has written is finite; None: nobody has looked.
        self.state_finite: Optional[bool] = None
        self.matched = held.matched
        self.unfinished: List[Node] = []
        # Who is told of layers, right after each; then no steps are taken at once.
        self.watch: Optional[LayerWatch] = None
        self._factors = ScaledFactors(self.kernels, pool, self._storage)
        self._leaves = LeafGradients(
            self.kernels,
            pool,
            rounded=self._storage is not None,
            deferred=deferred,
            unscale_each=unscale_each,
        )

    @property
    def nodes(self) -> Mapping[int, Node]:
        """The functions, by key; with all steps taken at once nobody asks for them but after an overflow."""
        return self.plan.nodes

    @property
    def layer_scales(self) -> Mapping[str, float]:
        """Alpha by layer."""
        return self._held.layer_scales

    @property
    def accumulated_scales(self) -> Mapping[str, float]:
        """The scale S on each layer's input gradient, by layer."""
        return self._held.accumulated_scales

    @property
    def at_once(self) -> bool:
        """Whether all steps are taken before and after nnabla's backward."""
        return self._planned is not None

    def begin(self) -> None:
        """Do what is to be done before backward starts."""
        planned = self._planned
        if planned is not None:
            self._factors.swap_all(planned.factors)
            self._leaves.take_all(planned.leaves)

    # Around each function.

    def passes_on(self) -> Callable[[Any], bool]:
        """What tells whether nothing is to be done around a function."""
        steps, nodes = self._held.steps, self.nodes

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
        step = self._held.steps.get(node.function_key)
        if step is None:
            return
        self.unfinished[:] = [node]
        self._bring(step.before)
        if self._measures and node.scalings:
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
        if self._planned is not None:
            self._leaves.give_back()
        elif self.unfinished:
            node = self.unfinished[0]
            self._factors.restore()
            if self.watch is not None:
                self.watch.ran(node)
            self._bring(self._held.steps[node.function_key].after)
            if node.leaves:
                self._leaves.give_back()
            self.unfinished.clear()

    # With all steps taken at once.

    @property
    def between(self) -> Optional[Callable[[Any], None]]:
        """What is to be called after each function all the same; None: nothing is."""
        between = {} if self._planned is None else self._planned.between
        if not between:
            return None

        def after(f: Any) -> None:
            for brought in between.get(hash(f), ()):
                self._bring_one(brought)

        return after

    # At the end.

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
        self.nonzero = {entry.key for entry, amax in zip(written, largest) if amax}
        nodes: List[Node] = []
        if math.inf in largest:
            bad = {entry.key for entry, amax in zip(written, largest) if amax == math.inf}
            nodes = [node for node in self.nodes.values() if not bad.isdisjoint(node.leaf_keys)]
        self.found_inf = [node.label for node in nodes]
        if self.components is not None:
            # Where the gradient of a layer is not finite, that of its weight is not.
            self.components.overflowed = self.components.producers[nodes[0].function_key] if nodes else None

    def _measure(self, node: Node, scale: float) -> None:
        for v, key in zip(node.outputs, node.output_keys):
            if key in self.scales:
                self.statistics.gradient(v, key, scale)
        for scaling in node.scalings:
            self.statistics.data(scaling.factor, scaling.factor_key)

    def _bring(self, brought: Sequence[Brought]) -> None:
        for one in brought:
            self._bring_one(one)

    def _bring_one(self, brought: Brought) -> None:
        array = brought.variable.grad
        if stored_dtype(array) is None:
            return
        self.kernels.scale_(array, brought.factor)
        if self._storage is not None:
            self._storage.store_gradient(brought.key, array)
