# SPDX-License-Identifier: Apache-2.0
"""The loss, a Variable or a wrapper of one, and the gradient that its backward starts from."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Protocol, Union, runtime_checkable

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.config import AdaLossConfig
from ..core.scale_policy import global_scale
from ..core.validation import array_of_numbers, scalar
from ..host_context import array_context
from .description import visited
from .hooks import Hook

Seed = Union[NDArray[Any], nn.NdArray]
"""The seed gradient of a loss that a user gives."""

_FLOAT32 = np.dtype(np.float32)

NEEDS_NO_GRADIENT = (
    "loss needs no gradient: it is not computed from any variable with need_grad=True; "
    "pass the output of the network's loss function"
)
"""Message of the error for a loss that trains nothing."""

REDUCE = (
    "reduce it with nnabla.functions.sum, as nnabla's backward of several elements does, or with "
    "nnabla.functions.mean, which makes gradients smaller by their number"
)
"""Advice for a loss of several elements."""


@runtime_checkable
class LossWrapper(Protocol):
    """A loss with the two methods of a Variable, around a Variable."""

    @property
    def variable(self) -> nn.Variable:
        """The wrapped loss itself."""

    def forward(
        self,
        clear_buffer: bool = False,
        clear_no_need_grad: bool = False,
        function_pre_hook: Optional[Hook] = None,
        function_post_hook: Optional[Hook] = None,
    ) -> None:
        """Run forward as `Variable.forward` does."""

    def backward(
        self,
        scale: float = 1.0,
        clear_buffer: bool = False,
        communicator_callbacks: Optional[Any] = None,
        function_pre_hook: Optional[Hook] = None,
        function_post_hook: Optional[Hook] = None,
        *,
        grad: Optional[Seed] = None,
    ) -> None:
        """Run backward with the seed gradient `scale * grad`."""


LossLike = Union[nn.Variable, LossWrapper]
"""A Variable of one element, or what wraps one and acts like it."""


def variable_of(loss: LossLike) -> nn.Variable:
    """The Variable behind `loss`; TypeError when there is none, ValueError when it needs no gradient."""
    if isinstance(loss, nn.Variable):
        variable = loss
    elif isinstance(loss, LossWrapper):
        variable = loss.variable
    else:
        instead = ": add the losses, or train on each by itself" if isinstance(loss, (list, tuple)) else ""
        raise TypeError(
            f"loss must be an nnabla.Variable or a wrapper of one, got {type(loss).__name__}{instead}"
        )
    # nnabla finds out in the next forward what a leaf that needs a gradient means for a rewired graph.
    if variable.parent is None or not (
        variable.need_grad
        or any(v.need_grad and v.parent is None for read in visited(variable)[1] for v in read)
    ):
        raise ValueError(NEEDS_NO_GRADIENT)
    return variable


def check_scale(scale: Any, name: str = "scale") -> float:
    """`scale` as a Python float; TypeError or ValueError unless gradients can be unscaled in float32."""
    if isinstance(scale, AdaLossConfig):
        raise TypeError(
            f"{name} must be a number; AdaptiveLossScalingUpdater takes an AdaLossConfig as config="
        )
    if isinstance(scale, str):
        raise TypeError(f"{name}={scale!r} must be a number; a format is given as storage=")
    return global_scale(name, scalar(scale))


def check_seed(loss: nn.Variable, grad: Optional[Seed]) -> None:
    """Raise TypeError or ValueError unless backward of `loss` can start from `grad`."""
    if grad is None:
        if loss.size != 1:
            raise ValueError(
                f"loss has shape {loss.shape}, not one element: pass its gradient as grad=..., or {REDUCE}"
            )
        return
    shape = tuple((grad if isinstance(grad, nn.NdArray) else array_of_numbers("grad", grad)).shape)
    if math.prod(shape) != loss.size or (shape and shape != loss.shape):
        raise ValueError(f"grad has shape {shape}, but loss has shape {loss.shape}")


class LossSeed:
    """Makes the gradient that backward starts from, on the device: the GPU would wait for one of the host.

    Args:
        loss: the loss.
        scaled: writes an array of any dtype, times a scale, to another one as float32, where both are.
    """

    def __init__(self, loss: nn.Variable, scaled: Callable[[nn.NdArray, nn.NdArray, float], None]) -> None:
        self._loss, self._scaled = loss, scaled
        # nnabla frees what is in it when buffers are cleared, and leaves the array to us.
        self._array: Optional[nn.NdArray] = None
        self._context: Optional[nn.Context] = None

    def gradient(self, scale: float, grad: Optional[Seed] = None) -> Union[nn.NdArray, NDArray[np.float32]]:
        """`scale * grad`, ones when `grad` is None; an array that is handed out is used again next time."""
        if grad is not None or self._array is None:
            check_seed(self._loss, grad)
        if grad is not None and not isinstance(grad, nn.NdArray):
            return np.asarray(grad, dtype=np.float32).reshape(self._loss.shape) * np.float32(scale)
        if self._array is None:
            # The array last: a signal may interrupt us between any two lines.
            self._context = array_context(self._loss.parent.context)
            self._array = nn.NdArray(self._loss.shape)
        if grad is not None:
            self._scaled(grad, self._array, scale)
            return self._array
        self._array.fill(scale)
        self._array.data_ptr(_FLOAT32, self._context)
        return self._array


def run_backward(
    loss: LossLike,
    scale: float,
    grad: Optional[Seed],
    clear_buffer: bool,
    communicator_callbacks: Optional[Any],
    pre: Optional[Hook],
    post: Optional[Hook],
    seed: LossSeed,
) -> None:
    """Call `loss.backward` with the seed gradient `scale * grad` (ones when `grad` is None)."""
    if not isinstance(loss, nn.Variable):
        loss.backward(scale, clear_buffer, communicator_callbacks, pre, post, grad=grad)
        return
    loss.backward(
        seed.gradient(scale, grad),
        clear_buffer=clear_buffer,
        communicator_callbacks=communicator_callbacks,
        function_pre_hook=pre,
        function_post_hook=post,
    )
