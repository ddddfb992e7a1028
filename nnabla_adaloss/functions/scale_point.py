# SPDX-License-Identifier: Apache-2.0
"""The accumulated scale S at one point of a graph, valid for one backward pass."""

from __future__ import annotations


class PassCounter:
    """How many backward passes of a graph have started."""

    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = 0


class ScalePoint:
    """The scale S of the gradients behind one function, as the current backward pass left it.

    Args:
        counter: counts the passes of the graph; a scale is valid in the pass that set it.
    """

    __slots__ = ("_counter", "_pass", "_scale")

    def __init__(self, counter: PassCounter) -> None:
        self._counter = counter
        self._pass = 0
        self._scale = 1.0

    @property
    def scale(self) -> float:
        """S; RuntimeError unless it was set in this backward pass."""
        if self._pass != self._counter.passes or not self._pass:
            raise RuntimeError(
                "the scale of a gradient is unknown: backward did not start at the Variable that the last "
                "loss_scaling(loss, tracker) returned"
            )
        return self._scale

    def set(self, value: float) -> None:
        """Note S for this backward pass; RuntimeError when that was done already."""
        if self._pass == self._counter.passes:
            raise RuntimeError(
                "a scaling function ran twice in one backward pass: start backward at the Variable that "
                "loss_scaling(loss, tracker) returned"
            )
        self._pass = self._counter.passes
        self._scale = value


class UnitScale(ScalePoint):
    """S of what `unscale` hands on: 1, in every pass."""

    __slots__ = ()

    @property
    def scale(self) -> float:
        """One."""
        return 1.0
