# SPDX-License-Identifier: Apache-2.0
"""The gradient that backward of a loss starts from."""

from __future__ import annotations

import math
from typing import Any, Optional, Union

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..host_context import array_context

Seed = Union[NDArray[Any], nn.NdArray]

_FLOAT32 = np.dtype(np.float32)


def check_seed(loss: nn.Variable, grad: Optional[Seed]) -> None:
    """Raise unless backward of `loss` can start from `grad`.

    Raises:
        ValueError: `loss` has several elements and `grad` is None, or their shapes differ.
    """
    if grad is None:
        if loss.size != 1:
            raise ValueError(
                f"loss has shape {loss.shape}, not one element: pass its gradient as grad=..., "
                "or reduce it with nnabla.functions.mean"
            )
        return
    shape = tuple(grad.shape) if isinstance(grad, nn.NdArray) else np.shape(grad)
    if math.prod(shape) != loss.size or (shape and shape != loss.shape):
        raise ValueError(f"grad has shape {shape}, but loss has shape {loss.shape}")


class LossSeed:
    """Makes the gradient that backward of one loss starts from, where the loss is: on a GPU, one that is made
    on the host is waited for.

    Args:
        loss: the loss.

    Example:
        >>> import nnabla.functions as F
        >>> loss = F.mean(nn.Variable((3,), need_grad=True))
        >>> float(LossSeed(loss).gradient(8.0).data)
        8.0
    """

    def __init__(self, loss: nn.Variable) -> None:
        self._loss = loss
        # nnabla frees what is in it when buffers are cleared, and leaves the array to us.
        self._array: Optional[nn.NdArray] = None
        self._context: Optional[nn.Context] = None

    def gradient(self, scale: float, grad: Optional[Seed] = None) -> Union[nn.NdArray, NDArray[np.float32]]:
        """`scale * grad`, ones when `grad` is None; an array that is handed out is used again next time.

        Raises:
            ValueError: the loss has several elements and `grad` is None, or their shapes differ.
        """
        if grad is not None:
            check_seed(self._loss, grad)
            array = np.asarray(grad.data if isinstance(grad, nn.NdArray) else grad, dtype=np.float32)
            return array.reshape(self._loss.shape) * np.float32(scale)
        if self._array is None:
            check_seed(self._loss, None)
            self._array = nn.NdArray(self._loss.shape)
            self._context = array_context(self._loss.parent.context)
        self._array.fill(scale)
        self._array.data_ptr(_FLOAT32, self._context)
        return self._array
