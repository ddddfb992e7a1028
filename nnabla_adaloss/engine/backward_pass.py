# SPDX-License-Identifier: Apache-2.0
"""One backward pass: what happens before and after each function's own backward.

Every gradient carries an accumulated scale S. Before a function runs, its output gradients are brought to
one S; a layer's input gradient gets alpha by handing the function `alpha * weight` in place of its
weight; where branches of a fan-out meet, they are brought to a common scale before nnabla adds them. After
it ran, weights are put back and parameter gradients are divided by S in fp32.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set

import nnabla as nn

from ..core.branches import common_scale
from ..errors import GraphChangedError
from ..graph.node import Node
from ..kernels.arrays import stored_dtype
from ..kernels.measurements import Measurements
from .component_scales import ComponentPass
from .held_scales import HeldScales, StepRecorder
from .layer_alphas import LayerAlphas
from .layer_watch import LayerWatch
from .leaf_gradients import LeafGradients
from .loss_section import LossSection
from .measured_components import first_overflow, measure_components
from .pass_context import PassContext
from .scaled_factors import ScaledFactors


class ScaleChoice(NamedTuple):
    """Who chooses the scales of one pass.

    Attributes:
        loss_section: between the loss and the first layers.
        alphas: of the layers.
        components: the scales of components, where scales come from them; None: nothing is measured of them.
    """

    loss_section: LossSection
    alphas: LayerAlphas
    components: Optional[ComponentPass] = None


class BackwardPass:
    """The state of one backward pass, and its steps: before a function, after it, and at the end.

    Args:
        context: what the pass works with.
        choice: who chooses the scales.
        start_scale: the scale the loss gradient starts with when nothing is known.
        iteration: number of the iteration, for methods that do not recompute each time.
        attempt: number of the pass within the iteration.
        deferred: where parameter gradients are unscaled, if what comes of it is asked for at the end.
        unscale_each: unscale each gradient right after its function: somebody takes it there.
        recorder: takes down what is done; None: nobody will do it again.
    """

    def __init__(
        self,
        context: PassContext,
        choice: ScaleChoice,
        start_scale: float,
        iteration: int,
        *,
        attempt: int = 0,
        deferred: Optional[Measurements] = None,
        unscale_each: bool = False,
        recorder: Optional[StepRecorder] = None,
    ) -> None:
        self.plan, self.kernels, self.pool, self.statistics, self.storage, self.u_max, *_ = context
        self.ranges = context.ranges
        self.nodes = self.plan.nodes
        self._loss_section, self._alphas, self.components = choice
        self.start_scale = start_scale
        self._recorder = recorder
        self.iteration = iteration
        self.scales: Dict[int, float] = {hash(v): self._loss_section.seed for v in self.plan.roots}
        self.attempt = attempt
        # Who is told of layers, right after each.
        self.watch: Optional[LayerWatch] = None
        self.layer_scales: Dict[str, float] = {}
        self.accumulated_scales: Dict[str, float] = {}
        # How far the loss section raised the gradient: the bounds on accumulated scales do not count it.
        self.lift = 1.0
        self.found_inf: List[str] = []
        # Keys of the leaves whose gradients are not all zeros.
        self.nonzero: Set[int] = set()
        # Whether what forward has written is finite; None: nobody has looked.
        self.state_finite: Optional[bool] = None
        # How many gradients were brought to the scale of a branch that they meet.
        self.matched = 0
        # The function that runs or ran last, if there is still something to do after it.
        self.unfinished: List[Node] = []
        self._scale = start_scale
        # What the input gradients of the function that runs are to be brought to; None: nothing else.
        self._behind: Optional[float] = None
        self._targets: Dict[int, float] = {}
        self._factors = ScaledFactors(self.kernels, self.pool, self.storage)
        self._leaves = LeafGradients(
            self.kernels,
            self.pool,
            rounded=self.storage is not None,
            deferred=deferred,
            unscale_each=unscale_each,
        )

    @property
    def seed(self) -> float:
        """The scale that the loss gradient itself carries."""
        return self._loss_section.seed

    @property
    def loss_scale(self) -> float:
        """The scale with which the gradient left the functions of one element at the loss."""
        return self._loss_section.left_with

    @property
    def measures_loss(self) -> bool:
        """Whether that was chosen from what was measured."""
        return self._loss_section.measures

    def to_hold(self, given: Optional[float]) -> Optional[HeldScales]:
        """What this pass has done, to be done again; None when nobody took it down, or more will be known
        in the next pass.

        Args:
            given: S0; None: it was measured.
        """
        if self._recorder is None or self.found_inf or not self.statistics.complete:
            return None
        if self.components is not None and not self.components.complete:
            return None
        positions = self.plan.positions
        return HeldScales(
            self.plan.structure,
            given,
            self.start_scale,
            self._loss_section.seed,
            self._loss_section.left_with,
            self._recorder.steps,
            {positions[key]: scale for key, scale in self.scales.items()},
            None if self.components is None else list(self.components.scales),
            self.matched,
        )

    def finish_last(self) -> None:
        """Do what is to be done after the function that ran last, if that is still to be done."""
        if self.unfinished:
            self._finish(self.unfinished[0])
            self.unfinished.clear()

    def restore(self) -> None:
        """Put every swapped array back; harmless when none is swapped."""
        self._factors.restore()
        self._leaves.restore()

    def finish(self) -> None:
        """End the pass: unscale what is left, and collect the layers that were not finite."""
        self._leaves.finish()
        findings = self.statistics.finish()
        self.state_finite = findings.watched_finite
        written = list(zip(*self._leaves.results(findings.largest)))
        self.nonzero = {entry.key for entry, largest in written if largest}
        keys, labels = (
            set(findings.nonfinite),
            {self.nodes[w.function].label for w, largest in written if largest == math.inf},
        )
        if self.components is not None:
            bad = measure_components(self, self.components, findings, written)
            raised = bad - findings.nonfinite if self.measures_loss else set()
            self.components.overflowed = first_overflow(
                self.plan, self.components, bad, written, raised=raised
            )
            keys |= bad
        if keys or labels:
            self.found_inf = [
                node.label
                for node in self.nodes.values()
                if not keys.isdisjoint(node.output_keys)
                # All uses of a weight share its master: where output gradients were seen, they tell more.
                or (node.label in labels and not (keys and node.scalings))
            ]

    # Before a function's backward.

    def passes_on(self) -> Callable[[Any], bool]:
        """What does all that is to be done around a function that only passes its scale on, and tells whether
        it does.
        """
        trivial, scales = self.plan.trivial, self.scales

        def passed_on(f: Any) -> bool:
            known = trivial.get(hash(f))
            if known is None or known[0] not in scales:
                return False
            output, first, others = known
            scale = scales[output]
            # An input that another branch has reached already may carry another scale.
            if (first in scales and scales[first] != scale) or (
                others and any(scales.get(key, scale) != scale for key in others)
            ):
                return False
            scales[first] = scale
            for key in others:
                scales[key] = scale
            return True

        return passed_on

    def prepare(self, f: Any) -> None:
        """Do what is to be done before the function `f` runs.

        Raises:
            GraphChangedError: it is not in the plan.
        """
        node = self.nodes.get(hash(f))
        if node is None or self.scales.keys().isdisjoint(node.output_keys):
            raise GraphChangedError(
                f"{f.info.type_name} is not where it was when the loss was wrapped: the graph was rewired. "
                "These gradients are not valid; the next backward will be"
            )
        self.unfinished[:] = [node]
        recorder = self._recorder
        if recorder is not None:
            recorder.begin(node)
        scale = self._unify_outputs(node)
        if node.non_homogeneous:
            scale = self._to_unit_scale(node, scale)
        elif node.loss_section and node.single in self.scales:
            scale = self._rescale_loss_section(node, scale)
        if node.passes_on:
            scale = self._join(node, scale)
        self._scale = scale
        self._targets.clear()
        alphas = []
        for index, scaling in enumerate(node.scalings):
            alpha = self._alphas.alpha(self, node, scaling, scale)
            alphas.append(alpha)
            self._targets[scaling.target_key] = scale * alpha
            self.layer_scales[scaling.layer] = alpha
            self.accumulated_scales[scaling.layer] = scale * alpha
            if alpha != 1.0:
                self._factors.swap(scaling, alpha, index)
        if recorder is not None:
            recorder.run(scale, tuple(alphas))
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
        target = common_scale(
            [(s, self.abs_max(v, k)) for v, k, s in seen], u_max=self._u_max_of([k for _, k, _ in seen])
        )
        for v, k, _ in seen:
            self.match(v, k, target)
        return target

    def _to_unit_scale(self, node: Node, scale: float) -> float:
        # Clipping compares the gradient with a threshold that the user means unscaled.
        for v, k in zip(node.outputs, node.output_keys):
            if k in self.scales:
                self.bring_to(v, k, 1.0)
        for v, k in zip(node.inputs, node.input_keys):
            if k in self.scales:
                self.bring_to(v, k, 1.0)
        return 1.0

    def _rescale_loss_section(self, node: Node, scale: float) -> float:
        target, self._behind = self._loss_section.scale(self, node, scale)
        self.bring_to(node.outputs[0], node.output_keys[0], target)
        if node.loss_exit:
            self.lift = max(self.lift, (self._behind or target) / self.start_scale)
        return target

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
        meeting = [k for _, k, _ in stored] + [k for _, k in outputs if k in self.scales]
        target = common_scale([(scale, arriving), *branches], u_max=self._u_max_of(meeting))
        for v, k, _ in stored:
            self.match(v, k, target)
        for v, k in outputs:
            if k in self.scales:
                self.match(v, k, target)
        return target

    def abs_max(self, variable: nn.Variable, key: int) -> float:
        """The largest magnitude of a gradient as stored; the largest there is while it is not known."""
        known = self.statistics.gradient(variable, key, self.scales[key])
        return known.abs_max if known.count else self._u_max_of([key])

    def _u_max_of(self, keys: Sequence[int]) -> float:
        """The largest magnitude that all of some gradients may have."""
        ranges = self.ranges
        return self.u_max if ranges is None else min(ranges.of(key).u_max for key in keys)

    # After a function's backward.

    def _finish(self, node: Node) -> None:
        self._factors.restore()
        if self.watch is not None:
            self.watch.ran(node)
        scales = self.scales
        for key in node.input_keys:
            scales[key] = self._scale
        if node.non_homogeneous:
            self._from_unit_scale(node)
        elif self._behind is not None:
            for v, key in zip(node.inputs, node.input_keys):
                self.bring_to(v, key, self._behind)
            self._behind = None
        scales.update(self._targets)
        if node.leaves:
            self._leaves.give_back()
        if self._recorder is not None:
            self._recorder.end()

    def _from_unit_scale(self, node: Node) -> None:
        components = self.components
        for v, k in zip(node.inputs, node.input_keys):
            wanted = None if components is None else components.scales[components.of[k]]
            self.bring_to(v, k, self.start_scale if wanted is None else wanted)

    # Gradients and what is known of them.

    def match(self, variable: nn.Variable, key: int, target: float) -> None:
        self.matched += self.scales[key] != target
        self.bring_to(variable, key, target)

    def bring_to(self, variable: nn.Variable, key: int, target: float) -> None:
        scale = self.scales[key]
        if scale == target:
            return
        self.scales[key] = target
        if self._recorder is not None:
            self._recorder.bring(key, target / scale)
        array = variable.grad
        if stored_dtype(array) is None:
            return
        self.kernels.scale_(array, target / scale)
        if self.storage is not None:
            self.storage.store_gradient(key, array)
