# SPDX-License-Identifier: Apache-2.0
"""A loss scale that does not depend on the gradient."""

from __future__ import annotations

from dataclasses import dataclass

from ..validation import positive_number
from .method import Method, Needs, Range


@dataclass(frozen=True)
class Fixed(Method):
    """The same scale for every layer; only bounds and the room that gradients leave change it.

    Attributes:
        fixed_loss_scale: the scale; positive and finite.

    Example:
        >>> Fixed(8.0).scale(None, None, range=Range(6e-8, 65504.0), fan_in=4)
        8.0
    """

    needs = Needs.NOTHING
    fixed_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        positive_number("fixed_loss_scale", self.fixed_loss_scale)

    def scale(self, g: None, W: None, *, range: Range, fan_in: float) -> float:
        """`fixed_loss_scale`, whatever the gradient."""
        return self.fixed_loss_scale
