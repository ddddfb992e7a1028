# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from nnabla_adaloss import Method, Needs


@dataclass(frozen=True)
class Headroom(Method):
    """Raises the largest element of the gradient to `margin` below the largest number."""

    needs = Needs.STATISTICS
    margin: float = 1024.0

    def scale(self, g, W, *, range, fan_in):
        return range.u_max / (self.margin * g.abs_max) if g.abs_max else 1.0
