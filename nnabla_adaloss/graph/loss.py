# SPDX-License-Identifier: Apache-2.0
"""Loss, a Variable or a wrapper of one, and the seed gradient of its backward."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Protocol, Union, runtime_checkable

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.config import AdaLossConfig
from ..core.scale_policy import global_scale
from ..core.validation import array_of_numbers, scalar
from ..host_context import FLOAT32, HOST
from .description import visited
from .hooks import Hook

Seed = Union[NDArray[Any], nn.NdArray]
"""Seed gradient given by a user."""

NEEDS_NO_GRADIENT = (
    "loss needs no gradient: it is not computed from any variable with need_grad=True; "
    "pass the output of the network's loss function, and look for unlinked variables, need_grad=False, and "
    "derivatives that are 0 everywhere, such as the second one of a ReLU"
)
"""Error message for a loss without trained variables."""

REDUCE = (
    "reduce it with nnabla.functions.sum, as nnabla's backward of several elements does, or with "
    "nnabla.functions.mean, which makes gradients smaller by their number"
)
"""Advice for a loss of several elements."""


@runtime_checkable
class LossWrapper(Protocol):
    """Wrapper of a Variable with its methods forward and backward."""

    @property
    def variable(self) -> nn.Variable:
        """The wrapped loss Variable."""

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
"""A scalar Variable, or a wrapper that behaves like one."""


def variable_of(loss: LossLike) -> nn.Variable:
    """Unwrap the Variable of `loss`; TypeError without one, ValueError if it needs no gradient."""
    if isinstance(loss, nn.Variable):
        variable = loss
    elif isinstance(loss, LossWrapper):
        variable = loss.variable
    else:
        instead = ": add the losses, or train on each by itself" if isinstance(loss, (list, tuple)) else ""
        raise TypeError(f"loss must be an nnabla.Variable or a wrapper, got {type(loss).__name__}{instead}")
    is_trained = variable.need_grad
    if not is_trained and variable.parent is not None:
        # A rewired loss has its new `need_grad` after the next forward only, but leaves have theirs at once.
        _, inputs, *_ = visited(variable)
        is_trained = any(v.need_grad and v.parent is None for read in inputs for v in read)
    if variable.parent is None or not is_trained:
        raise ValueError(NEEDS_NO_GRADIENT)
    return variable


def check_scale(scale: Any, name: str = "scale") -> float:
    """Convert `scale` to float; TypeError or ValueError unless gradients can be unscaled in float32."""
    if isinstance(scale, AdaLossConfig):
        raise TypeError(f"{name} must be a number; an AdaLossConfig is given as config=")
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
    """Makes the seed gradient on the device, by `scaled`: one from the host would make the GPU wait."""

    def __init__(self, loss: nn.Variable, scaled: Callable[[nn.NdArray, nn.NdArray, float], None]) -> None:
        self._loss, self._scaled, context = loss, scaled, loss.parent.context
        # To access the array where functions leave theirs. nnabla's default context names no array class.
        self._context = nn.Context([], context.array_class or HOST.array_class, context.device_id)
        # nnabla frees its memory when buffers are cleared; the array object stays.
        self._array = nn.NdArray(loss.shape)

    def gradient(self, scale: float, grad: Optional[Seed] = None) -> Union[nn.NdArray, NDArray[np.float32]]:
        """Compute `scale * grad` (ones if `grad` is None), in an array that the next call reuses."""
        if grad is None:
            self._array.fill(scale)
            # This makes memory of it on the device: a `fill` waits for the first access.
            self._array.data_ptr(FLOAT32, self._context)
            return self._array
        if not isinstance(grad, nn.NdArray):
            return np.asarray(grad, dtype=np.float32).reshape(self._loss.shape) * np.float32(scale)
        if self._array.shape != self._loss.shape:  # as after a batch of another size
            self._array = nn.NdArray(self._loss.shape)
        self._scaled(grad, self._array, scale)
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
    """Call `loss.backward` with the seed gradient `scale * grad` (ones if `grad` is None)."""
    if isinstance(loss, nn.Variable):
        loss.backward(seed.gradient(scale, grad), clear_buffer, communicator_callbacks, pre, post)
    else:
        loss.backward(scale, clear_buffer, communicator_callbacks, pre, post, grad=grad)
