# SPDX-License-Identifier: Apache-2.0
"""Where a pass with hooks takes its steps from: a schedule, or decisions that are made as it runs."""

from __future__ import annotations

from typing import Callable, Optional, Protocol

from ...core.ada_loss import AdaLoss
from ...graph.node import NodeStructure
from ..choosing import ScaleChooser
from ..schedule import Rescale, ScaleSchedule, Step

Apply = Callable[[Rescale], None]
"""Multiplies a gradient, before the function of a step runs."""


class StepSource(Protocol):
    """Hands out what is done around each function."""

    @property
    def seed(self) -> float:
        """The scale of the loss gradient."""

    def step(self, node: NodeStructure, apply: Apply) -> Optional[Step]:
        """What is done around `node`, which runs next, when `before` has been applied; None: nothing."""

    def schedule(self) -> ScaleSchedule:
        """All steps, when the pass has ended."""


class ScheduledSteps:
    """The steps of a schedule.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: ScaleSchedule) -> None:
        self._schedule = schedule
        self.seed = schedule.seed

    def step(self, node: NodeStructure, apply: Apply) -> Optional[Step]:
        """What the schedule says; None: nothing."""
        step = self._schedule.steps.get(node.number)
        if step is not None:
            for rescale in step.before:
                apply(rescale)
        return step

    def schedule(self) -> ScaleSchedule:
        """The schedule."""
        return self._schedule


class ChosenSteps:
    """Steps that are chosen as the pass runs, from arrays as they are.

    Args:
        chooser: chooses them.
        ada_loss: remembers and reports what was decided.
    """

    def __init__(self, chooser: ScaleChooser, ada_loss: AdaLoss) -> None:
        self.chooser, self._ada_loss = chooser, ada_loss
        self.seed = chooser.seed

    def step(self, node: NodeStructure, apply: Apply) -> Optional[Step]:
        """What is decided now; None: the scale is passed on."""
        if self.chooser.passes_on(node):
            return None
        step = self.chooser.step(node, apply)
        self._ada_loss.take_over_all(self.chooser.decided)
        return step

    def schedule(self) -> ScaleSchedule:
        """What was decided."""
        return self.chooser.schedule()
