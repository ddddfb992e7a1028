# SPDX-License-Identifier: Apache-2.0
"""Counts of the elements of each layer's gradients that fp16 storage flushes to zero."""

from __future__ import annotations

from typing import Any, Dict, Iterable, NamedTuple, Optional

import nnabla as nn
import numpy as np
import numpy.typing as npt

from nnabla_adaloss import AdaptiveLossScaling, Graph, GraphPlan, LossLike


class Underflow(NamedTuple):
    """Number of gradient elements that are nonzero in fp32, and of those that are zero as stored."""

    nonzero: int
    lost: int

    @property
    def share(self) -> float:
        """Share of elements that are lost; 0 if all are zero in fp32."""
        return self.lost / self.nonzero if self.nonzero else 0.0


def total(parts: Iterable[Underflow]) -> Underflow:
    """Add up counts."""
    nonzero = lost = 0
    for part in parts:
        nonzero += part.nonzero
        lost += part.lost
    return Underflow(nonzero, lost)


class UnderflowProbe:
    """Runs the same backward twice, with gradients in fp32 and as a method stores them, and compares.

    Counting the elements that each rounding flushes would miss most: after a layer whose gradient is all zero
    nothing is left to flush. Hence the comparison with fp32, on the same weights and activations.

    Args:
        loss: the loss in fp32, of a network without branches.

    Attributes:
        outputs: the output Variable of each layer, the layer nearest to the input first.
    """

    def __init__(self, loss: nn.Variable) -> None:
        self.loss = loss
        self.outputs: Dict[str, nn.Variable] = {}
        self._layer_of: Dict[int, str] = {}
        layer = ""
        graph = Graph(loss)
        for node in reversed(GraphPlan(graph).nodes):
            if node.loss_section:
                continue
            if node.leaves:
                layer = node.label.split("/")[0]
                self.outputs[layer] = graph.variables[node.outputs[0]]
            # A layer's gradients: of its parameters, its output, and the outputs of pooling and activation.
            for position in (*node.leaves, *node.outputs):
                self._layer_of[graph.keys[position]] = layer

    def measure(self, scaled_loss: LossLike, scale: float) -> Dict[str, Underflow]:
        """Count per layer for the present inputs; parameter gradients end up zero.

        Args:
            scaled_loss: the object whose backward the method calls: an emulation of the loss, or a wrapper of
                it.
            scale: the loss scale of that backward; ignored where scales are measured, which do not learn from
                this pass.
        """
        scaled_loss.forward()
        in_fp32 = self._nonzero_elements(self.loss, 1.0)
        if isinstance(scaled_loss, AdaptiveLossScaling):
            learned = scaled_loss.state_dict()
            stored = self._nonzero_elements(scaled_loss, None)
            scaled_loss.load_state_dict(learned)
        else:
            stored = self._nonzero_elements(scaled_loss, scale)
        counts: Dict[str, Underflow] = {name: Underflow(0, 0) for name in self.outputs}
        for key, layer in self._layer_of.items():
            lost = in_fp32[key] & ~stored[key]
            here = Underflow(int(in_fp32[key].sum()), int(lost.sum()))
            counts[layer] = total([counts[layer], here])
        return counts

    def _nonzero_elements(self, loss: LossLike, scale: Optional[float]) -> Dict[int, npt.NDArray[np.bool_]]:
        found: Dict[int, npt.NDArray[np.bool_]] = {}

        def note(f: Any) -> None:
            for variable in f.inputs:
                if variable.need_grad and hash(variable) in self._layer_of:
                    found[hash(variable)] = variable.grad.data != 0.0
                    if variable.parent is None:
                        variable.grad.zero()

        loss.backward(scale, function_post_hook=note)
        return found
