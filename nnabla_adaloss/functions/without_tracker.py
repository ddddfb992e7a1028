# SPDX-License-Identifier: Apache-2.0
"""Scaling functions outside of a tracked graph: they scale, and nobody takes the scale back."""

from __future__ import annotations

from typing import Any, List, Optional

import nnabla as nn

from ..core.config import AdaLossConfig
from ..graph.matrix_products import GemmSlot
from ..kernels import NNablaAdaLoss
from ..kernels.arrays import as_float32
from .identity import IdentityFunction


class AdaptiveGradientScale(IdentityFunction):
    """Identity that multiplies the gradient by alpha, computed from it and a weight.

    Args:
        w: the weight, of which only statistics are taken.
        slot: K of the layer with this weight.
        config: how alpha is computed; its recorder is told each alpha.
        context: where it runs; None for the current context.
    """

    def __init__(
        self, w: nn.Variable, slot: GemmSlot, config: AdaLossConfig, context: Optional[nn.Context] = None
    ) -> None:
        super().__init__(context)
        self._w = w
        self._slot = slot
        self._ada_loss = NNablaAdaLoss(config, self.kernels)
        self._iteration = 0

    def backward_impl(
        self, inputs: List[Any], outputs: List[Any], propagate_down: List[bool], accum: List[bool]
    ) -> None:
        """Compute alpha and multiply the gradient by it."""
        if not propagate_down[0]:
            return
        g, weight = outputs[0].grad, as_float32(self._w.data, nn.NdArray(self._w.shape))
        alpha = self._ada_loss.loss_scale(
            self.name,
            g,
            weight,
            fan_in=self._slot.fan_in,
            fan_in_bound=self._slot.fan_in_bound,
            previous_scale=1.0,
            iteration=self._iteration,
            g_statistics=self.statistics(g),
            weight_statistics=self.statistics(weight),
        )
        self._iteration += 1
        self.pass_gradient(g, inputs[0].grad, alpha, accumulate=accum[0])


class PlainBranch(IdentityFunction):
    """Identity with several outputs, whose gradients are added as they are."""

    def __init__(self, n: int, context: Optional[nn.Context] = None) -> None:
        super().__init__(context)
        self._n = n

    def min_outputs(self) -> int:
        """Number of outputs."""
        return self._n

    def backward_impl(
        self, inputs: List[Any], outputs: List[Any], propagate_down: List[bool], accum: List[bool]
    ) -> None:
        """Add the branches' gradients."""
        accumulate = accum[0]
        for output in outputs if propagate_down[0] else ():
            self.pass_gradient(output.grad, inputs[0].grad, 1.0, accumulate=accumulate)
            accumulate = True
