# SPDX-License-Identifier: Apache-2.0
"""One backward pass: what happens before and after each function's own backward.

Every gradient carries an accumulated scale S. Before a function runs, its output gradients are brought to
one S; a layer's input gradient gets alpha by handing the function `alpha * weight` in place of its
weight; where branches of a fan-out meet, they are brought to a common scale before nnabla adds them. After
it ran, weights are put back and parameter gradients are divided by S in fp32.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import nnabla as nn

from ..core.ada_loss import AdaLoss
from ..core.branches import common_scale
from ..core.layer_scale import Constraints, Observed
from ..core.loss_section import loss_section_factor
from ..core.methods import Fixed
from ..core.statistics import ArrayStatistics
from ..errors import GraphChangedError
from ..graph.node import Node, Scaling
from ..graph.plan import GraphPlan
from ..kernels.arrays import as_float32, stored_dtype
from ..kernels.interface import Kernels
from ..kernels.measurements import Measurements
from ..kernels.scratch import ScratchPool
from .emulated_storage import EmulatedStorage
from .leaf_gradients import LeafGradients
from .statistics_source import StatisticsSource


class PassContext(NamedTuple):
    """What all passes of one engine share."""

    plan: GraphPlan
    ada_loss: AdaLoss
    kernels: Kernels
    pool: ScratchPool
    statistics: StatisticsSource
    storage: Optional[EmulatedStorage]


class BackwardPass:
    """The state of one backward pass, and its steps: before a function, after it, and at the end.

    Args:
        context: what the pass works with.
        start_scale: the scale the loss gradient starts with.
        iteration: number of the iteration, for methods that do not recompute each time.
        deferred: where parameter gradients are unscaled at the end of the pass; None: after each function.
    """

    def __init__(
        self,
        context: PassContext,
        start_scale: float,
        iteration: int,
        *,
        deferred: Optional[Measurements] = None,
    ) -> None:
        self.plan, self.ada_loss, self.kernels, self.pool, self.statistics, self.storage = context
        self.nodes = self.plan.nodes
        config = self.ada_loss.config
        self.u_max = config.range.u_max
        # Scaled copies of weights are stored as weights are.
        stored = self.storage.precision.stored_data.max if self.storage is not None else math.inf
        self._constraints = Constraints(weight_max=min(self.u_max, stored))
        # A constant that cannot overflow by itself needs no look at any array.
        constant = config.method.fixed_loss_scale if isinstance(config.method, Fixed) else math.inf
        self._measures = constant > 1.0
        self.start_scale = start_scale
        self.iteration = iteration
        self.scales: Dict[int, float] = {hash(v): start_scale for v in self.plan.roots}
        self.layer_scales: Dict[str, float] = {}
        self.accumulated_scales: Dict[str, float] = {}
        # How far the loss section raised the gradient: the bounds on accumulated scales do not count it.
        self.lift = 1.0
        self.found_inf: List[str] = []
        # The function that runs or ran last, if there is still something to do after it.
        self.unfinished: List[Node] = []
        self._scale = start_scale
        self._targets: Dict[int, float] = {}
        self._data_swaps: List[Tuple[nn.Variable, nn.NdArray, nn.NdArray]] = []
        self._leaves = LeafGradients(
            self.kernels, self.pool, rounded=self.storage is not None, deferred=deferred
        )

    def finish_last(self) -> None:
        """Do what is to be done after the function that ran last, if that is still to be done."""
        if self.unfinished:
            self._finish(self.unfinished[0])
            self.unfinished.clear()

    def restore(self) -> None:
        """Put every swapped array back; harmless when none is swapped."""
        self._restore_data()
        self._leaves.restore()

    def _restore_data(self) -> None:
        # Forgotten after it is put back: a signal may interrupt us between any two lines. What somebody else
        # put back already (an emulation, to its own master) stays.
        while self._data_swaps:
            variable, source, scaled = self._data_swaps[-1]
            if variable.data == scaled:
                variable.data = source
            self._data_swaps.pop()

    def finish(self) -> None:
        """End the pass: unscale what is left, and collect the layers that were not finite."""
        self._leaves.finish()
        keys, found_inf = self.statistics.finish()
        if found_inf:
            self._leaves.find_inf()
        labels = set(self._leaves.found_inf)
        if keys or labels:
            self.found_inf = [
                node.label
                for node in self.nodes.values()
                if not keys.isdisjoint(node.output_keys)
                # All uses of a weight share its master: where output gradients were seen, they tell more.
                or (node.label in labels and not (keys and node.scalings))
            ]

    def unscale_visible(self, variable: nn.Variable, key: int) -> None:
        """Divide a gradient that stays readable after backward by its scale."""
        array = variable.grad
        if not array.clear_called and stored_dtype(array) is not None:
            self.kernels.scale_(array, 1.0 / self.scales[key])

    # Before a function's backward.

    def prepare(self, f: Any) -> None:
        """Do what is to be done before the function `f` runs.

        Raises:
            GraphChangedError: it is not in the plan.
        """
        node = self.nodes.get(hash(f))
        if node is None or not any(key in self.scales for key in node.output_keys):
            raise GraphChangedError(
                f"{f.info.type_name} is not where it was when the loss was wrapped: the graph was rewired. "
                "These gradients are not valid; the next backward will be"
            )
        self.unfinished[:] = [node]
        scale = self._unify_outputs(node)
        if node.non_homogeneous:
            scale = self._to_unit_scale(node, scale)
        elif node.loss_section and node.single in self.scales:
            scale = self._rescale_loss_section(node, scale)
        scale = self._join(node, scale)
        self._scale = scale
        self._targets.clear()
        for index, scaling in enumerate(node.scalings):
            alpha = self._alpha(node, scaling, scale)
            self._targets[scaling.target_key] = scale * alpha
            self.layer_scales[scaling.layer] = alpha
            self.accumulated_scales[scaling.layer] = scale * alpha
            if alpha != 1.0:
                self._swap_factor(scaling, alpha, index)
        if node.leaves:
            self._leaves.take(node, scale, self._targets)

    def _unify_outputs(self, node: Node) -> float:
        if node.single is not None:
            return self.scales.get(node.single, self.start_scale)
        seen = [(v, k, self.scales[k]) for v, k in zip(node.outputs, node.output_keys) if k in self.scales]
        if not seen:
            return self.start_scale
        if len({scale for _, _, scale in seen}) == 1:
            return seen[0][2]
        target = common_scale([(s, self.abs_max(v, k)) for v, k, s in seen], u_max=self.u_max)
        for v, k, _ in seen:
            self._bring_to(v, k, target)
        return target

    def _to_unit_scale(self, node: Node, scale: float) -> float:
        # Clipping compares the gradient with a threshold that the user means unscaled.
        for v, k in zip(node.outputs, node.output_keys):
            if k in self.scales:
                self._bring_to(v, k, 1.0)
        for v, k in zip(node.inputs, node.input_keys):
            if k in self.scales:
                self._bring_to(v, k, 1.0)
        return 1.0

    def _rescale_loss_section(self, node: Node, scale: float) -> float:
        v, key = node.outputs[0], node.output_keys[0]
        factor = loss_section_factor(
            # Of what nothing is known, nothing is raised.
            self.statistics.gradient(v, key, self.scales[key]).abs_max,
            v.size,
            scale,
            self.start_scale,
            expands=node.expands,
            u_max=self.u_max,
            several=self.plan.loss_exits > 1,
        )
        if factor != 1.0:
            self._bring_to(v, key, scale * factor)
        if node.loss_exit:
            self.lift = max(self.lift, scale * factor / self.start_scale)
        return scale * factor

    def _join(self, node: Node, scale: float) -> float:
        """Bring earlier branches of the unscaled inputs and the output gradient to one scale."""
        scaled = {s.target_key for s in node.scalings}
        stored = [
            (v, k, self.scales[k])
            for v, k in zip(node.inputs, node.input_keys)
            if k in self.scales and k not in scaled
        ]
        if all(s == scale for _, _, s in stored):
            return scale
        branches = [(s, self.abs_max(v, k)) for v, k, s in stored]
        outputs = list(zip(node.outputs, node.output_keys))
        arriving = max((self.abs_max(v, k) for v, k in outputs if k in self.scales), default=0.0)
        target = common_scale([(scale, arriving), *branches], u_max=self.u_max)
        for v, k, _ in stored:
            self._bring_to(v, k, target)
        for v, k in outputs:
            if k in self.scales:
                self._bring_to(v, k, target)
        return target

    def _alpha(self, node: Node, scaling: Scaling, scale: float) -> float:
        g, w = self._operands(node, scaling, scale) if self._measures else (None, None)
        slot = scaling.slot
        observed = Observed(
            self.iteration,
            scale,
            slot.fan_in,
            slot.fan_in_bound,
            g,
            w,
            True,
            # Another branch of the loss may have been raised further.
            max(1.0, min(self.lift, scale / self.start_scale)),
            None if self.ada_loss.takes_statistics else lambda: scaling.matrices(node),
        )
        constraints = self._constraints
        # A leaf's gradient is kept unscaled, in an array of its own: there is nothing to meet.
        stored = None if scaling.to_leaf else self.scales.get(scaling.target_key)
        if stored is not None:
            earlier = _EarlierContribution(self, node, scaling, scale, stored)
            constraints = constraints._replace(earlier=earlier)
        alpha = self.ada_loss.decide(scaling.layer, observed, constraints).alpha
        if stored is not None:
            self._bring_to(scaling.target, scaling.target_key, scale * alpha)
        return alpha

    def largest_contribution(self, node: Node, scaling: Scaling, scale: float) -> float:
        """Bound of the layer's input gradient with an alpha of 1, and of its weight."""
        g, w = self._operands(node, scaling, scale)
        return max(scaling.slot.fan_in_bound * g.abs_max, 1.0) * w.abs_max

    def abs_max(self, variable: nn.Variable, key: int) -> float:
        """The largest magnitude of a gradient as stored; the largest there is while it is not known."""
        known = self.statistics.gradient(variable, key, self.scales[key])
        return known.abs_max if known.count else self.u_max

    def _operands(
        self, node: Node, scaling: Scaling, scale: float
    ) -> Tuple[ArrayStatistics, ArrayStatistics]:
        g = self.statistics.gradient(node.outputs[0], node.output_keys[0], scale)
        return g, self.statistics.data(scaling.factor, scaling.factor_key)

    def _swap_factor(self, scaling: Scaling, alpha: float, index: int) -> None:
        factor = scaling.factor
        source = factor.data
        scaled = self.pool.get(factor.shape, "factor", index)
        self.kernels.scaled_copy(self._readable(factor), scaled, alpha)
        if self.storage is not None and alpha < 1.0:
            self.storage.store(scaled)
        self._data_swaps.append((factor, source, scaled))
        factor.data = scaled

    # After a function's backward.

    def _finish(self, node: Node) -> None:
        self._restore_data()
        scales = self.scales
        for key in node.input_keys:
            scales[key] = self._scale
        if node.non_homogeneous:
            self._from_unit_scale(node)
        scales.update(self._targets)
        if node.leaves:
            self._leaves.give_back()

    def _from_unit_scale(self, node: Node) -> None:
        for v, k in zip(node.inputs, node.input_keys):
            self._bring_to(v, k, self.start_scale)

    # Gradients and what is known of them.

    def _bring_to(self, variable: nn.Variable, key: int, target: float) -> None:
        scale = self.scales[key]
        if scale == target:
            return
        self.scales[key] = target
        array = variable.grad
        if stored_dtype(array) is None:
            return
        self.kernels.scale_(array, target / scale)
        if self.storage is not None:
            self.storage.store_gradient(key, array)

    def _readable(self, variable: nn.Variable) -> nn.NdArray:
        return as_float32(variable.data, self.pool.get(variable.shape, "float32"))


class _EarlierContribution:
    """What a layer's input gradient is added to; it is looked at only when the scales differ."""

    __slots__ = ("_node", "_pass", "_previous_scale", "_scaling", "scale")

    def __init__(
        self, running: BackwardPass, node: Node, scaling: Scaling, previous_scale: float, scale: float
    ) -> None:
        self._pass, self._node, self._scaling = running, node, scaling
        self._previous_scale = previous_scale
        self.scale = scale

    @property
    def own_abs_max(self) -> float:
        return self._pass.largest_contribution(self._node, self._scaling, self._previous_scale)

    @property
    def abs_max(self) -> float:
        return self._pass.abs_max(self._scaling.target, self._scaling.target_key)
