# SPDX-License-Identifier: Apache-2.0
"""Base of functions that are the identity in forward and change the gradient in backward."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Union

import nnabla as nn
from nnabla.function import PythonFunction

from ..core.statistics import ArrayStatistics
from ..core.validation import instance_or_none
from ..kernels import Kernels, select_kernels
from ..kernels.arrays import as_float32, prepare_master

Array = Union[nn.Variable, nn.NdArray]
Gradients = Sequence[nn.NdArray]


def check_array(name: str, value: object) -> None:
    """Raise TypeError, with the argument's name, unless `value` is a Variable or an NdArray."""
    if not isinstance(value, (nn.Variable, nn.NdArray)):
        raise TypeError(f"{name} must be an nnabla.Variable or nnabla.NdArray, not {type(value).__name__}")


class IdentityFunction(PythonFunction):  # type: ignore[misc]  # nnabla has no type hints
    """Function of one input whose outputs are copies of it; subclasses implement `pass_back`."""

    # nnabla lets no Python function share memory between input and output.

    def __init__(self, context: Optional[nn.Context] = None, outputs: int = 1, name: str = "") -> None:
        super().__init__(instance_or_none("ctx", context, nn.Context))
        self._outputs, self._name = outputs, name or type(self).__name__
        self.kernels: Kernels = select_kernels(self.ctx)

    @property
    def name(self) -> str:
        return self._name

    def min_outputs(self) -> int:
        return self._outputs

    def grad_depends_output_data(self, i: int, o: int) -> bool:
        return False

    def grad_depends_input_data(self, i: int, j: int) -> bool:
        return False

    def setup_impl(self, inputs: List[Any], outputs: List[Any]) -> None:
        for output in outputs:
            output.reset_shape(inputs[0].shape, True)

    def forward_impl(self, inputs: List[Any], outputs: List[Any]) -> None:
        for output in outputs:
            self.pass_on(inputs[0].data, output.data)

    def backward_impl(
        self, inputs: List[Any], outputs: List[Any], propagate_down: List[bool], accum: List[bool]
    ) -> None:
        if propagate_down[0]:
            self.pass_back([output.grad for output in outputs], inputs[0].grad, accum[0])

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        """Sum the gradients of the outputs into that of the input, `target`."""
        for gradient in gradients:
            self.pass_on(gradient, target, accumulate=accumulate)
            accumulate = True

    def pass_on(
        self, source: nn.NdArray, target: nn.NdArray, factor: float = 1.0, *, accumulate: bool = False
    ) -> None:
        """Write factor * source to `target`, in float32 or float16, or add it; lazy zeros stay so."""
        if source.zeroing:
            if not accumulate:
                target.zero()
            return
        readable = as_float32(source, nn.NdArray(source.shape))
        if not accumulate or target.zeroing:
            self.kernels.scaled_copy(readable, target, factor)
        else:
            prepare_master(target, self.kernels.context)
            self.kernels.unscale_add(readable, target, 1.0 / factor, accumulate=True)

    def statistics(self, array: nn.NdArray) -> ArrayStatistics:
        """Statistics of `array`; a lazily zero one stays so."""
        return ArrayStatistics.of_zeros(array.size) if array.zeroing else self.kernels.statistics(array)
