# SPDX-License-Identifier: Apache-2.0
"""Chooses the scales of one backward pass: which scale each gradient carries, and where it gets it.

Every gradient carries an accumulated scale S. Before a function runs, its output gradients are brought to one
S; the input gradient of a layer gets alpha on top; where branches of a fan-out meet, they are brought to a
common scale before nnabla adds them. Nothing here touches an array: with statistics that are known
(`delay=1`), a schedule is chosen before backward starts; with those of arrays (`delay=0`), step by step while
it runs.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Protocol, Tuple

from ..core.layer_scale import Decision, Observed
from ..core.overflow import common_scale
from ..emulation.gradient_ranges import GradientRanges
from ..errors import GraphChangedError
from ..graph.node import LayerSlot, NodeStructure
from ..graph.structure import GraphStructure
from .component_pass import ComponentPass
from .schedule import Rescale, ScaleSchedule, Step
from .statistics import Statistics

Decided = Tuple[str, Observed, Decision]
"""What was decided about a layer, by name, and from what."""


class LossSection(Protocol):
    """Chooses scales between the loss and the first layers."""

    @property
    def measures(self) -> bool:
        """Whether scales come from what was measured."""

    @property
    def seed(self) -> float:
        """The scale that the loss gradient itself starts with."""

    @property
    def left_with(self) -> float:
        """The scale with which the gradient first left the functions of one element."""

    def scale(
        self, chooser: ScaleChooser, node: NodeStructure, scale: float
    ) -> Tuple[float, Optional[float]]:
        """What the output gradient of `node`, which carries `scale`, is brought to, and what its input
        gradients are brought to after it has run; None: they stay as they are.
        """


class LayerAlphas(Protocol):
    """Chooses the scales of layers."""

    def alpha(self, chooser: ScaleChooser, node: NodeStructure, slot: LayerSlot, scale: float) -> float:
        """What the input gradient of a layer is multiplied by, when its output gradient carries `scale`.

        What is stored already where the input gradient is added is brought to the same scale.
        """


class ScaleChoice(NamedTuple):
    """What the scales of one pass are chosen by.

    Attributes:
        loss_section: between the loss and the first layers.
        alphas: of the layers.
        components: the scales of components, where scales come from them; None: they are not measured.
    """

    loss_section: LossSection
    alphas: LayerAlphas
    components: Optional[ComponentPass] = None


class PassStart(NamedTuple):
    """Where a pass starts.

    Attributes:
        iteration: number of the iteration, for methods that do not recompute each time.
        attempt: number of the pass within the iteration.
        fixed_scale: S0, where it is given; None: measured.
        start_scale: the scale that the loss gradient starts with when nothing is known.
    """

    iteration: int
    attempt: int
    fixed_scale: Optional[float]
    start_scale: float


class ScaleChooser:
    """Chooses one step after the other, in backward order.

    Args:
        structure: how the graph is built.
        choice: what scales are chosen by.
        statistics: those of gradients and weights.
        start: where the pass starts.
        u_max: the largest magnitude of the storage format; of the narrowest, where layers differ.
        ranges: the range of each gradient, where layers differ; None: they do not.

    Attributes:
        scales: the scale of each gradient so far, by position.
        lift: how far the loss section has raised the gradient above `start.start_scale`.
        matched: how many gradients were brought to the scale of a branch that they meet.
        decided: what was decided about layers.
    """

    def __init__(
        self,
        structure: GraphStructure,
        choice: ScaleChoice,
        statistics: Statistics,
        start: PassStart,
        u_max: float,
        ranges: Optional[GradientRanges] = None,
    ) -> None:
        self.ranges = ranges
        self.structure, self.statistics, self.start, self.u_max = structure, statistics, start, u_max
        self._section, self._alphas, self.components = choice
        self._rescale: Optional[Callable[[Rescale], None]] = None
        self.scales: Dict[int, float] = dict.fromkeys(structure.roots, self._section.seed)
        self.lift = 1.0
        self.matched = 0
        self.decided: List[Decided] = []
        self._steps: Dict[int, Step] = {}
        self._brought: List[Rescale] = []

    @property
    def seed(self) -> float:
        """The scale that the loss gradient itself carries."""
        return self._section.seed

    @property
    def measures_loss(self) -> bool:
        """Whether the loss scale comes from what was measured."""
        return self._section.measures

    def schedule(self) -> ScaleSchedule:
        """What was chosen so far."""
        return ScaleSchedule(
            self.structure,
            self.start.fixed_scale,
            self.start.start_scale,
            self._section.seed,
            self._section.left_with,
            self._steps,
            self.scales,
            None if self.components is None else list(self.components.scales),
            self.matched,
        )

    def passes_on(self, node: NodeStructure) -> bool:
        """Pass the scale on, if that is all there is to choose for `node`; False: see `step`."""
        if not node.trivial:
            return False
        scales, first = self.scales, node.inputs[0]
        scale = scales.get(node.outputs[0])
        # An input that another branch has reached already may carry another scale.
        if scale is None or (first in scales and scales[first] != scale):
            return False
        if len(node.inputs) > 1 and any(scales.get(p, scale) != scale for p in node.inputs):
            return False
        for position in node.inputs:
            scales[position] = scale
        return True

    def step(self, node: NodeStructure, rescale: Optional[Callable[[Rescale], None]] = None) -> Step:
        """What is done around the backward of `node`.

        Args:
            node: the function that is next.
            rescale: called with each gradient that is brought to another scale before it runs, as soon as
                that is decided: statistics of arrays show it from then on. None: nothing runs.

        Raises:
            GraphChangedError: no function before it has a gradient for it.
        """
        if self.scales.keys().isdisjoint(node.outputs):
            raise GraphChangedError.at(node.type_name)
        self._rescale = rescale
        scale = self._unify_outputs(node) if node.single is None else self.scales[node.single]
        behind: Optional[float] = None
        if node.non_homogeneous:
            scale = self._to_unit_scale(node)
        elif node.loss_section and node.single in self.scales:
            scale, behind = self._rescale_loss_section(node, scale)
        if node.passes_on:
            scale = self._join(node, scale)
        alphas = tuple([self._alphas.alpha(self, node, slot, scale) for slot in node.slots])
        before = self._taken() if self._brought else ()
        scales = self.scales
        for position in node.inputs:
            scales[position] = scale
        if node.non_homogeneous:
            self._from_unit_scale(node)
        elif behind is not None:
            for position in node.inputs:
                self._note(position, behind)
        for slot, alpha in zip(node.slots, alphas):
            scales[slot.target] = scale * alpha
        step = Step(before, scale, alphas, self._taken() if self._brought else ())
        if node.leaves or node.slots or before or step.after:
            self._steps[node.number] = step
        # What applies it holds this object.
        self._rescale = None
        return step

    def _taken(self) -> Tuple[Rescale, ...]:
        taken = tuple(self._brought)
        self._brought.clear()
        return taken

    def _unify_outputs(self, node: NodeStructure) -> float:
        seen = [(p, self.scales[p]) for p in node.outputs if p in self.scales]
        if len({scale for _, scale in seen}) == 1:
            return seen[0][1]
        branches = [(s, self.abs_max(p)) for p, s in seen]
        target = common_scale(branches, u_max=self._u_max_of(p for p, _ in seen))
        for position, _ in seen:
            self.match(position, target)
        return target

    def _to_unit_scale(self, node: NodeStructure) -> float:
        # Clipping compares the gradient with a threshold that the user means unscaled.
        for position in (*node.outputs, *node.inputs):
            if position in self.scales:
                self.bring_to(position, 1.0)
        return 1.0

    def _rescale_loss_section(self, node: NodeStructure, scale: float) -> Tuple[float, Optional[float]]:
        target, behind = self._section.scale(self, node, scale)
        self.bring_to(node.outputs[0], target)
        if node.loss_exit:
            self.lift = max(self.lift, (behind or target) / self.start.start_scale)
        return target, behind

    def _join(self, node: NodeStructure, scale: float) -> float:
        """Bring earlier branches of the unscaled inputs and the output gradient to one scale."""
        scaled = {slot.target for slot in node.slots}
        stored = [(p, self.scales[p]) for p in node.inputs if p in self.scales and p not in scaled]
        if all(s == scale for _, s in stored):
            return scale
        branches = [(s, self.abs_max(p)) for p, s in stored]
        outputs = [p for p in node.outputs if p in self.scales]
        arriving = max(map(self.abs_max, outputs), default=0.0)
        meeting = [*(p for p, _ in stored), *outputs]
        target = common_scale([(scale, arriving), *branches], u_max=self._u_max_of(meeting))
        for position in meeting:
            self.match(position, target)
        return target

    def _from_unit_scale(self, node: NodeStructure) -> None:
        components = self.components
        for position in node.inputs:
            wanted = None if components is None else components.scales[components.of[position]]
            self._note(position, self.start.start_scale if wanted is None else wanted)

    def abs_max(self, position: int) -> float:
        """The largest magnitude of a gradient as stored; the largest there is while it is not known."""
        known = self.statistics.gradient(position, self.scales[position])
        return known.abs_max if known.count else self._u_max_of([position])

    def _u_max_of(self, positions: Iterable[int]) -> float:
        """The largest magnitude that all of some gradients may have."""
        ranges = self.ranges
        return self.u_max if ranges is None else min(ranges.of(position).u_max for position in positions)

    def match(self, position: int, target: float) -> None:
        """Bring a gradient to the scale of a branch that it meets; such are counted."""
        self.matched += self.scales[position] != target
        self.bring_to(position, target)

    def bring_to(self, position: int, target: float) -> None:
        """Have a gradient multiplied, so that it carries the scale `target`."""
        rescale = self._note(position, target)
        if rescale is not None and self._rescale is not None:
            self._rescale(rescale)

    def _note(self, position: int, target: float) -> Optional[Rescale]:
        scale = self.scales[position]
        if scale == target:
            return None
        self.scales[position] = target
        self._brought.append(Rescale(position, target / scale))
        return self._brought[-1]


def choose(
    structure: GraphStructure,
    choice: ScaleChoice,
    statistics: Statistics,
    start: PassStart,
    u_max: float,
    ranges: Optional[GradientRanges] = None,
) -> ScaleChooser:
    """Choose the scales of a whole pass before it starts.

    It reads nothing but its arguments, and changes only `choice`, which is made for one pass. What it returns
    has the `schedule()`, and in `decided` what to remember of the layers. Where `statistics.complete` is
    false afterwards, something was not known, and the schedule is of no use.

    Args:
        structure: how the graph is built.
        choice: what scales are chosen by.
        statistics: those of earlier iterations.
        start: where the pass starts.
        u_max: the largest magnitude of the storage format; of the narrowest, where layers differ.
        ranges: the range of each gradient, where layers differ; None: they do not.
    """
    chooser = ScaleChooser(structure, choice, statistics, start, u_max, ranges)
    for node in structure.nodes:
        if not chooser.passes_on(node):
            chooser.step(node)
    return chooser
