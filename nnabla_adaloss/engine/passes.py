# SPDX-License-Identifier: Apache-2.0
"""Which backward pass runs: one that chooses scales, one that holds them, or one that is planned at once."""

from __future__ import annotations

import math
from typing import Mapping, NamedTuple, Optional, Union

import nnabla as nn

from ..core.ada_loss import AdaLoss
from ..core.config import AdaLossConfig
from ..core.layer_scale import Constraints
from ..core.methods import Needs
from ..graph.components import Components
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from .backward_pass import BackwardPass, ScaleChoice
from .component_scales import ComponentPass
from .emulated_storage import EmulatedStorage
from .gradient_ranges import GradientRanges
from .held_pass import HeldPass
from .held_scales import HeldScales, StepRecorder
from .layer_alphas import AlphasByComponent, AlphasByMethod, AlphasOfOne, LayerAlphas
from .layer_watch import LayerWatch
from .leaf_arrays import LeafArrays
from .loss_section import GivenScale, LossSection, MeasuredScale, OneScale
from .onlookers import NOBODY, Onlookers
from .pass_context import PassContext
from .planned_pass import PlannedPass
from .planned_steps import Obstacle, PlannedSteps, plan_steps
from .prepared_graph import PreparedGraph

# Where host and network share the memory: a network whose scaled weights are larger has layers that take long
# beside what is done around them.
_MAX_BYTES = 2**23


class Asked(NamedTuple):
    """What is asked of a pass, besides its scales.

    Attributes:
        iteration: number of the iteration, for methods that do not recompute each time.
        attempt: number of the pass within the iteration.
        onlookers: who is called around its functions.
        watch: who is told of its layers.
    """

    iteration: int
    attempt: int
    onlookers: Onlookers = NOBODY
    watch: Optional[LayerWatch] = None


class Passes:
    """Makes the backward passes of one engine.

    Args:
        loss: the loss.
        config: how scales are computed.
        ada_loss: decides about layers, and remembers.
        kernels: passes over memory.
        storage: an emulated storage, or None.
    """

    def __init__(
        self,
        loss: nn.Variable,
        config: AdaLossConfig,
        ada_loss: AdaLoss,
        kernels: Kernels,
        storage: Optional[EmulatedStorage],
    ) -> None:
        self._loss, self._ada_loss, self._kernels, self._storage = loss, ada_loss, kernels, storage
        self._u_max, self._by_layer = config.range.u_max, config.method.needs is Needs.COMPONENTS
        self._ranges = GradientRanges.where_layers_differ(config, storage)
        self._max_bytes = config.planned_bytes
        if self._max_bytes is None and not kernels.asynchronous:
            self._max_bytes = _MAX_BYTES

    @property
    def u_max_single(self) -> float:
        """The largest magnitude of a gradient of one element; such are never stored in 8 bits."""
        storage = self._storage
        if storage is None:
            return self._u_max
        return max(self._u_max, storage.precisions.narrowest.gradient_format(1).max)

    def limits(self, components: Components) -> Mapping[str, float]:
        """The largest magnitude of each component, by name, where layers are not stored alike."""
        return {} if self._ranges is None else self._ranges.of_components(components)

    def replayed(
        self, planned: PreparedGraph, held: HeldScales, asked: Asked, found: LeafArrays
    ) -> Union[HeldPass, PlannedPass]:
        """A pass with scales that are held: all steps at once, where nobody looks at single functions.

        Args:
            planned: the graph.
            held: the scales.
            asked: what is asked of the pass.
            found: the gradients of its leaves.
        """
        measures = planned.holding.measures(asked.iteration)
        if measures:
            planned.statistics.begin(asked.iteration, anew=False)
            planned.holding.measured(asked.iteration)
        if planned.held is not held:
            before, planned.held = planned.held, held
            # Scales that were measured anew are mostly what they were.
            if before is None or not held.is_applied_as(before):
                planned.steps = self._plan_steps(planned.plan, held)
        steps, context = planned.steps, self._context(planned)
        looked_at = measures or asked.watch is not None or asked.onlookers.present
        if isinstance(steps, PlannedSteps) and not looked_at:
            return PlannedPass(context, held, steps, found, planned.measurements)
        running = HeldPass(
            context,
            held,
            measures=measures,
            deferred=planned.measurements,
            unscale_each=asked.onlookers.take_gradients,
        )
        running.watch = asked.watch
        return running

    def choosing(
        self,
        planned: PreparedGraph,
        start_scale: float,
        given: Optional[float],
        components: Optional[ComponentPass],
        asked: Asked,
    ) -> BackwardPass:
        """A pass that chooses its scales from what it measures, or from what was measured before.

        Args:
            planned: the graph.
            start_scale: the scale the loss gradient starts with when nothing is known.
            given: S0; None: it is measured.
            components: what is measured of components; None: nothing.
            asked: what is asked of the pass.
        """
        # Scaled copies of weights are stored as weights are.
        stored = math.inf if self._storage is None else self._storage.precisions.narrowest.stored_data.max
        guard_from = 1.0 if given is None else 0.0
        constraints = Constraints(weight_max=min(self._u_max, stored), guard_from=guard_from)
        section: LossSection = GivenScale(start_scale)
        alphas: LayerAlphas = AlphasByMethod(self._ada_loss, constraints)
        if given is None and components is not None:
            section = MeasuredScale(components, hash(self._loss), start_scale, self.u_max_single)
        if self._by_layer and components is not None:
            alphas = AlphasByComponent(self._ada_loss, constraints, components)
        recorder = StepRecorder(planned.plan) if planned.holding.wanted(asked.iteration, given) else None
        choice = ScaleChoice(section, alphas, components)
        return self._pass(planned, start_scale, choice, asked, recorder)

    def of_one_scale(self, planned: PreparedGraph, scale: float, asked: Asked) -> BackwardPass:
        """A pass with one scale for all layers, which teaches nothing."""
        return self._pass(planned, scale, ScaleChoice(OneScale(scale), AlphasOfOne()), asked, None)

    def _pass(
        self,
        planned: PreparedGraph,
        start_scale: float,
        choice: ScaleChoice,
        asked: Asked,
        recorder: Optional[StepRecorder],
    ) -> BackwardPass:
        running = BackwardPass(
            self._context(planned),
            choice,
            start_scale,
            asked.iteration,
            attempt=asked.attempt,
            deferred=planned.measurements,
            unscale_each=asked.onlookers.take_gradients,
            recorder=recorder,
        )
        running.watch = asked.watch
        return running

    def _context(self, planned: PreparedGraph) -> PassContext:
        return PassContext(
            planned.plan,
            self._kernels,
            planned.pool,
            planned.statistics,
            self._storage,
            self._u_max,
            self._by_layer,
            self._ranges,
        )

    def _plan_steps(self, plan: GraphPlan, held: HeldScales) -> Union[PlannedSteps, Obstacle]:
        storage = self._storage
        return plan_steps(
            plan,
            held,
            rounded=storage is not None,
            at_random=storage is not None and storage.precisions.at_random,
            max_bytes=self._max_bytes,
        )
