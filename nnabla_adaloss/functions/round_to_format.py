# SPDX-License-Identifier: Apache-2.0
"""Rounding to a narrow format in forward, in backward, or in both."""

from __future__ import annotations

from typing import Any, List, Optional

import nnabla as nn

from ..core.formats import Format
from ..core.precision import Precision, PrecisionLike, get_precision
from ..core.validation import boolean
from ..kernels.arrays import FLOAT32, stored_dtype
from .identity import Array, Gradients, IdentityFunction, check_array


def round_to_format(
    x: Array,
    storage: PrecisionLike,
    forward: bool = True,
    backward: bool = True,
    *,
    ctx: Optional[nn.Context] = None,
) -> Array:
    """Round `x` to the numbers that `storage` can hold, and its gradient likewise.

    Rounding is that of IEEE 754: half to even, with gradual underflow, and overflow to infinity (to NaN in a
    format without infinities, to the largest number in one that saturates). The gradient ignores the rounding
    of `x` (straight-through). A precision with `operands_only` rounds as for a matrix product: scaled by a
    power of two for the whole array, and infinities stay.

    Args:
        x: Variable or NdArray of any shape and dtype.
        storage: `"float16"`, `"bfloat16"`, `"float8_e5m2"`, `"float8_e4m3"`, `"float32"`, `"fp8_hybrid"`, or
            a `Format`; or a `Precision`, where gradients have another format than values.
        forward: round the values; False leaves them unchanged.
        backward: round the gradient; False leaves it unchanged.
        ctx: context to run in; None for the current one.

    Returns:
        A value of the type and shape of `x`, float32.

    Raises:
        TypeError: `x` is not a Variable or NdArray, or `forward` or `backward` not a boolean.
        ValueError: `storage` is unknown.

    Example:
        >>> import numpy as np, nnabla as nn
        >>> from nnabla_adaloss import round_to_format
        >>> x = nn.NdArray.from_numpy_array(np.array([2049.0, 1e-8, 1e5], np.float32))
        >>> round_to_format(x, "float16").data
        array([2048.,    0.,   inf], dtype=float32)
    """
    check_array("x", x)
    forward, backward = boolean("forward", forward), boolean("backward", backward)
    return RoundToFormat(get_precision(storage), forward, backward, ctx)(x)


class RoundToFormat(IdentityFunction):
    """Rounds values, gradients, or both."""

    def __init__(
        self, precision: Precision, forward: bool, backward: bool, context: Optional[nn.Context] = None
    ) -> None:
        super().__init__(context)
        self._precision, self._forward, self._backward = precision, forward, backward
        # Streams of random bits used so far: each backward takes the next.
        self._draws = 0

    def forward_impl(self, inputs: List[Any], outputs: List[Any]) -> None:
        if self._forward:
            self._round(inputs[0].data, outputs[0].data, self._precision.forward)
        else:
            super().forward_impl(inputs, outputs)

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        source = gradients[0]
        if self._backward:
            # When accumulating, round the arriving gradient only, not the sum.
            rounded = nn.NdArray(source.shape) if accumulate else target
            self._draws += 1
            random_key = self._precision.random_key(self._draws)
            self._round(source, rounded, self._precision.backward, random_key)
            source = rounded
        if source is not target:
            self.pass_on(source, target, accumulate=accumulate)

    def _round(
        self, source: nn.NdArray, target: nn.NdArray, storage: Format, random_key: Optional[int] = None
    ) -> None:
        if source.zeroing:
            target.zero()
            return
        if stored_dtype(source) != FLOAT32:
            self.kernels.scaled_float32(source, target, 1.0)
            source = target
        fitted = self._precision.operands_only
        self.kernels.round_to_format(source, target, storage, fitted=fitted, random_key=random_key)
